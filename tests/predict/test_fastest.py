"""The search for a plan's answer, held to all recipes of its lattice, on made-up memory and time.
test_bounds.py has real traces."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import pytest

from harness import cli
from harness.memory.record import CATEGORIES, Instant
from harness.planner import pool, verdict
from harness.planner.plan import fastest
from harness.planner.plan.fastest import NEAR, best_of, common, search
from harness.planner.plan.lattice import Point, lattice
from harness.planner.verdict import Fit
from harness.prediction import Prediction, Work
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from harness.system import cards
from strategies import parse
from tests.made.predictions import GIB

FLUX = Spec(
    recipe="ddp", model="flux-dev", objective="flow", data="synthetic", device="cuda", ema=0.0
)
HALF = ("bf16_pure", "bf16")
MOST = 14
"""Predictions of one plan: as many as it made when its recipes were a list."""


@functools.cache
def rows_of(base: Spec, gpus: int, batch: int = 1, half: tuple[str, ...] = HALF) -> list[Resolved]:
    spec = dataclasses.replace(base, processes=gpus, global_batch=batch * gpus)

    def row(text: str) -> Resolved:
        found = resolve(dataclasses.replace(spec, recipe=parse(text, ema=False).text))
        if found.refusal:
            raise SpecError(found.refusal)
        return found

    return lattice(row, gpus > 1, half, whole_only=False)


# ---- made-up predictions ----


def work(row: Resolved, tokens: float) -> list[Work]:
    """Products, casts, copies and collectives of a step, in proportion to ``tokens``."""
    one, size, ranks = Point(row), row.subject.parameters, row.launch.processes
    frozen = one.adapted
    flops = int(2e3 * tokens * size)
    again, kept = (0.0, 0.15, 1.0)[one.level], size * (1 if frozen else 3)

    def op(phase: str, kind: str, count: float, **more: int) -> Work:
        given = {"flops": 0, "bytes": 0, **more}
        return Work(phase=phase, kind=kind, dtype="bfloat16", count=max(1, round(count)), **given)

    found = [op("forward", "product", 100, flops=flops // 100)]
    found += [op("backward", "product", 100 * (again + 1 + (not frozen)), flops=flops // 100)]
    found += [op(phase, "memory", 50, bytes=size // 50) for phase in ("forward", "backward")]
    if one.quantized or one.weight_bytes == 4:
        found += [op(phase, "memory", 20, bytes=size // 4) for phase in ("forward", "backward")]
    if one.swapped:
        moved = int(one.element_bytes * one.streamed)
        found += [op("forward", "streamed", 1, bytes=moved)]
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
    kept = int(tokens * row.subject.parameters * (2.0, 1.2, 0.1)[one.level])
    kept *= 1 if {"pure_bf16", "float_master"} & row.launch.traits else 2
    state = int(one.state_bytes)
    size = state + max(kept, int(one.gradient_bytes))
    sums = {**dict.fromkeys(CATEGORIES, 0), "activations": kept, "parameters": state}
    instant = Instant(bytes=size, phase="forward", op="op", site="", categories=sums, held=[])
    waits = int(one.element_bytes * one.streamed)
    if row.launch.engine.place("parameters") != "device":
        waits += int(row.subject.parameters * (2 if one.adapted else 16) / row.launch.processes)
    host = dataclasses.replace(instant, bytes=GIB + waits)
    given = {"allocated": size, "reserved": size, "least": size, "peak": instant, "host": host}
    more = {"beyond": {"forward": kept, "backward": kept}, "work": work(row, tokens)}
    return Prediction(recipe=str(row.recipe), device="cuda", method="trace", **given, **more)


class Asked:
    """Predictions by a function, and the recipes that were asked for."""

    def __init__(self, gpu, predict) -> None:
        self.gpu, self.predict, self.names = gpu, predict, []

    def __call__(self, rows: list[Resolved]) -> list[Fit]:
        self.names += [str(row.recipe) for row in rows]
        return [verdict.judge(row, self.predict(row), self.gpu) for row in rows]


def hold(rows: list[Resolved], asked: Asked) -> list[fastest.Proof]:
    """Hold both answers of a search to the best of all recipes."""
    fits, proofs = search(rows, asked.gpu, asked)
    assert len(asked.names) == len(set(asked.names)) == len(fits)
    everything = Asked(asked.gpu, asked.predict)(rows)
    for proof in proofs:
        every = [fit for fit in everything if Point(fit.resolved).adapted == proof.adapters]
        best = best_of(every, common)
        assert (proof.best is None) == (best is None)
        if best is None:
            continue
        assert proof.best.verdict == best.verdict, (proof.best.label, best.label)
        if best.fits:
            most = (1 + 2 * NEAR) * best.seconds.total
            assert proof.best.seconds.total <= most, (proof.best.label, best.label)
    return proofs


SIZES = (6, 12, 16, 24, 40, 80, 400)


def cases() -> list[Any]:
    """Each size once, on one GPU or on eight."""
    return [(size, gpus) for at, size in enumerate(SIZES) for gpus in (1, 8) if at % 2 or gpus > 1]


@pytest.mark.parametrize(("size", "gpus"), cases())
def test_the_answer_is_the_best_of_all_recipes_and_few_are_predicted(size, gpus):
    asked = Asked(cards.of_size(size * GIB), functools.partial(predicted, tokens=1.0))
    proofs = hold(rows_of(FLUX, gpus), asked)
    assert len(asked.names) <= MOST, asked.names
    assert sum(proof.recipes for proof in proofs) > 4 * MOST


@pytest.mark.parametrize("gpus", [1, 8])
def test_without_checkpoints_where_that_fits_and_adapters_no_slower_than_all_weights(gpus):
    asked = Asked(cards.of_size(400 * GIB), functools.partial(predicted, tokens=1.0))
    adapters, whole = (proof.best for proof in hold(rows_of(FLUX, gpus), asked))
    assert not {"checkpoint", "block_swap"} & {
        part.name for fit in (adapters, whole) for part in fit.resolved.recipe.strategies
    }
    assert adapters.samples_per_second >= whole.samples_per_second


def test_the_lattice_has_what_people_use():
    for gpus, names in ((1, {"block_swap", "qlora", "cast"}), (8, {"fsdp2", "zero3", "qlora"})):
        rows = [Point(row) for row in rows_of(FLUX, gpus)]
        parts = {part.name for one in rows for part in one.row.recipe.strategies}
        assert names | {"adam8bit", "bf16_pure", "zero3_offload", "lora"} <= parts
        assert {one.level for one in rows if one.adapted} == {0, 2}
        assert {one.level for one in rows if not one.adapted} == {0, 1, 2}
    assert {one.adapted for one in rows if one.sharding == "fsdp2"} == {True, False}


def test_a_card_without_bfloat16_is_planned_in_float16():
    rows = rows_of(FLUX, 1, half=("fp16",))
    assert rows and not any("bf16" in str(row.recipe) for row in rows)
    hold(rows, Asked(cards.find("T4-16GB"), functools.partial(predicted, tokens=0.2)))


def test_a_trainer_s_recipe_is_preferred_within_the_uncertainty_of_time():
    """Streaming is not in ai-toolkit, and sd-scripts has it for some models alone."""
    rows = rows_of(FLUX, 1)
    taken = [row for row in rows if fastest.trained_by(row)]
    assert taken and len(taken) < len(rows)
    asked = Asked(cards.of_size(40 * GIB), functools.partial(predicted, tokens=1.0))
    for proof in hold(rows, asked):
        quick = proof.quicker
        assert quick is None or fastest.trained_by(proof.best.resolved)


def test_what_cannot_be_predicted_ends_the_search():
    none = Prediction(recipe="", device="cuda", method="none", reason="hooks")
    asked = Asked(cards.of_size(40 * GIB), lambda row: none)
    fits, proofs = search(rows_of(FLUX, 1), asked.gpu, asked)
    assert len(fits) <= 2 * fastest.UNTIMED and [proof.best for proof in proofs] == [None, None]


def test_a_plan_prints_its_answers_first_and_writes_them(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        pool, "predict_all", lambda rows, *_, **__: [predicted(row, 1.0) for row in rows]
    )
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "plan.json"
    words = ["plan", "--model", "flux-dev", "--gpu-memory", "24GiB", "--json", str(file)]
    assert cli.main(words) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    adapters, whole = found["searches"]
    assert {row["recipe"] for row in found["rows"]} >= {adapters["answer"], whole["answer"]}
    assert found["fastest"] == adapters["answer"] and not whole["sure"]
    table = said.index(" Recipe ")
    assert table > said.index(f"Adapters: {adapters['answer']}") > 0
    assert f"of {adapters['recipes']} recipes" in said and "export it: " in said[:table]
    assert all(len(line) <= 80 for line in said.splitlines() if "./run.sh export" not in line)


def test_a_plan_in_which_nothing_fits_shows_by_how_much(capsys, monkeypatch):
    monkeypatch.setattr(
        pool, "predict_all", lambda rows, *_, **__: [predicted(row, 1.0) for row in rows]
    )
    assert cli.main(["plan", "--model", "flux-dev", "--gpu-memory", "1GiB"]) == 0
    assert "None is predicted to fit. Nearest: " in " ".join(capsys.readouterr().out.split())
