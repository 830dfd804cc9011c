"""Lattices of recipes, and made-up predictions of them: memory and time in proportion to tokens."""

from __future__ import annotations

import dataclasses
import functools

from harness.memory.record import CATEGORIES, Instant
from harness.planner.edits import lattice
from harness.planner.explore import Point
from harness.prediction import Prediction, Work
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from strategies import parse
from tests.made.predictions import GIB

FLUX = Spec(
    recipe="ddp", model="flux-dev", objective="flow", data="synthetic", device="cuda", ema=0.0
)
HALF = ("bf16_pure", "bf16")


@functools.cache
def rows_of(base: Spec, gpus: int, batch: int = 1, half: tuple[str, ...] = HALF) -> list[Resolved]:
    spec = dataclasses.replace(base, processes=gpus, global_batch=batch * gpus)

    def row(text: str) -> Resolved:
        found = resolve(dataclasses.replace(spec, recipe=parse(text, ema=False).text))
        if found.refusal:
            raise SpecError(found.refusal)
        return found

    return lattice(row, gpus > 1, half)


def work(row: Resolved, tokens: float) -> list[Work]:
    """Products, casts, copies and collectives of a step, in proportion to ``tokens``."""
    one, size, ranks = Point(row), row.subject.parameters, row.launch.processes
    frozen = one.adapted
    # The share of the forward pass that backward repeats.
    again = 0.3 if one.part != "block" else 0.15 if one.products else one.share
    found: list[Work] = []

    def op(phase: str, kind: str, count: float = 1, **more: int) -> None:
        given = {"flops": 0, "bytes": 0, **more, "count": max(1, round(count))}
        found.append(Work(phase=phase, kind=kind, dtype="bfloat16", **given))

    def both(kind: str, size: float, count: int = 1) -> None:
        for phase in ("forward", "backward"):
            op(phase, kind, count, bytes=int(size) // count)

    flops = int(2e3 * tokens * size) // 100
    op("forward", "product", 100, flops=flops)
    op("backward", "product", 100 * (again + 1 + (not frozen)), flops=flops)
    both("memory", size, 50)
    if one.quantized or one.weight_bytes == 4:
        both("memory", 5 * size, 20)
    if one.moved:
        both("streamed", (0.1 if one.share else 2) * size * tokens)
    if one.swapped:
        both("streamed", one.hosted_bytes * one.streamed)
    if not frozen:
        hosted = "host_optimizer" in row.launch.traits
        op("optimizer", "host" if hosted else "memory", 1 if hosted else 10,
           bytes=28 * size // ranks if hosted else 3 * size // 10)  # fmt: skip
    if row.launch.engine.place("parameters") != "device":
        both("transfer", 2 * size // ranks)
    if "split_parameters" in row.launch.traits:
        both("collective", 2 * size, 57)
    if ranks > 1 and not frozen:
        op("backward", "overlapped", 57, bytes=4 * size // 57)
    return found


def predicted(row: Resolved, tokens: float) -> Prediction:
    """A step whose activations are ``tokens`` times the weights, or less if recomputed."""
    one = Point(row)
    of_blocks = 1.2 if one.products or one.part != "block" else 2.0 - 1.9 * one.share
    kept = int(tokens * row.subject.parameters * (0.05 if one.moved else of_blocks))
    kept *= 1 if {"pure_bf16", "float_master"} & row.launch.traits else 2
    state = int(one.state_bytes)
    size = state + max(kept, int(one.gradient_bytes))
    sums = {**dict.fromkeys(CATEGORIES, 0), "activations": kept, "parameters": state}
    instant = Instant(bytes=size, phase="forward", op="op", site="", categories=sums, held=[])
    waits = int(one.hosted_bytes * one.streamed)
    if row.launch.engine.place("parameters") != "device":
        waits += int(row.subject.parameters * (2 if one.adapted else 16) / row.launch.processes)
    host = dataclasses.replace(instant, bytes=GIB + waits)
    given = {"allocated": size, "reserved": size, "least": size, "peak": instant, "host": host}
    more = {"beyond": {"forward": kept, "backward": kept}, "work": work(row, tokens)}
    return Prediction(recipe=str(row.recipe), device="cuda", method="trace", **given, **more)
