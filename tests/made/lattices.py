"""Lattices of recipes, and made-up predictions of them: memory and time in proportion to tokens."""

from __future__ import annotations

import dataclasses
import functools

from harness.memory.record import CATEGORIES, Instant
from harness.planner.plan.lattice import Point, lattice
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

    return lattice(row, gpus > 1, half, whole_only=False)


def again_of(one: Point) -> float:
    """The share of the forward pass that backward repeats."""
    return 0.3 if one.part != "block" else 0.15 if one.products else one.share


def work(row: Resolved, tokens: float) -> list[Work]:
    """Products, casts, copies and collectives of a step, in proportion to ``tokens``."""
    one, size, ranks = Point(row), row.subject.parameters, row.launch.processes
    frozen = one.adapted
    flops = int(2e3 * tokens * size)
    again, kept = again_of(one), size * (1 if frozen else 3)

    def op(phase: str, kind: str, count: float, **more: int) -> Work:
        given = {"flops": 0, "bytes": 0, **more}
        return Work(phase=phase, kind=kind, dtype="bfloat16", count=max(1, round(count)), **given)

    found = [op("forward", "product", 100, flops=flops // 100)]
    found += [op("backward", "product", 100 * (again + 1 + (not frozen)), flops=flops // 100)]
    found += [op(phase, "memory", 50, bytes=size // 50) for phase in ("forward", "backward")]
    if one.quantized or one.weight_bytes == 4:
        found += [op(phase, "memory", 20, bytes=size // 4) for phase in ("forward", "backward")]
    if one.moved:
        bytes_each = int(0.1 * size * tokens if one.share else 2 * size * tokens)
        found += [op(phase, "streamed", 1, bytes=bytes_each) for phase in ("forward", "backward")]
    if one.swapped:
        moved = int(one.hosted_bytes * one.streamed)
        found += [op(phase, "streamed", 1, bytes=moved) for phase in ("forward", "backward")]
    if "host_optimizer" in row.launch.traits and not frozen:
        found += [op("optimizer", "host", 1, bytes=28 * size // ranks)]
    elif not frozen:
        found += [op("optimizer", "memory", 10, bytes=kept // 10)]
    if row.launch.engine.place("parameters") != "device":
        found += [op(phase, "transfer", 1, bytes=2 * size // ranks) for phase in
                  ("forward", "backward")]  # fmt: skip
    if "split_parameters" in row.launch.traits:
        found += [op(phase, "collective", 57, bytes=2 * size // 57) for phase in
                  ("forward", "backward")]  # fmt: skip
    if ranks > 1 and not frozen:
        found += [op("backward", "overlapped", 57, bytes=4 * size // 57)]
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
