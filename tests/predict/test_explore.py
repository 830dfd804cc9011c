"""The search for a plan's answer, held to all recipes of its lattice on made-up memory and time.

The rule of the answer is written here a second time, and reads recipes by their names.
"""

from __future__ import annotations

import functools
import itertools
import json
import re

import pytest

from harness import cli
from harness.planner import explore, pool, verdict
from harness.planner.explore import Point, best_of, dominates, option_of, search
from harness.planner.plan.tracing import known
from harness.planner.verdict import Fit
from harness.prediction import Prediction
from harness.resolve import Resolved
from harness.system import cards
from strategies.base import Slot
from tests import refill
from tests.made.lattices import FLUX, predicted, rows_of
from tests.made.predictions import GIB, made_up

SIZES = (6, 12, 16, 24, 40, 80, 400)
PLAN = ["plan", "--model", "flux-dev", "--gpu-memory"]


@pytest.fixture(autouse=True)
def unrecorded(monkeypatch, tmp_path):
    """No prediction that ships with the project counts."""
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)


class Asked:
    """Predictions by a function, and the recipes that were asked for."""

    def __init__(self, gpu, predict) -> None:
        self.gpu, self.predict, self.names = gpu, predict, []

    def __call__(self, rows: list[Resolved]) -> list[Fit]:
        self.names += [str(row.recipe) for row in rows]
        return [verdict.judge(row, self.predict(row), self.gpu) for row in rows]


# ---- the rule, by names ----


RARE = re.compile(r"checkpoint:|(^|\+)offload_activations|adam4bit|fsdp2_offload")
HOST = re.compile(r"block_swap|offload_activations|_offload\b")
OFF = 0.05
"""What a rule leaves open: the answer may be this much worse in memory or time."""


def bits(label: str) -> int:
    """How much a recipe rounds: frozen weights, or trained weights and moments."""
    if "lora" in label:
        return 2 if "qlora" in label else int("cast:to=fp8" in label)
    rounded = "adam8bit" in label or "adam4bit" in label
    return int("bf16_pure" in label) + int(rounded)


def taken(fit: Fit) -> bool:
    """True if trainers have all parts of a recipe."""
    alone = fit.resolved.launch.processes == 1 and "lora" in fit.label
    return not RARE.search(fit.label) and not (alone and "_offload" in fit.label)


def fault(answer: Fit | None, every: list[Fit]) -> str:
    """Return how the rule, or a recipe that dominates it, contradicts an answer."""
    sure = [fit for fit in every if fit.most_bytes <= fit.gpu.memory_bytes
            and (fit.host_most or 0) <= fit.host_memory]  # fmt: skip
    able = sure or [fit for fit in every if fit.may_fit]
    if answer is None or not able:
        return "" if answer is None and not able else f"{len(able)} fit"
    if sure and answer not in sure:
        return "the answer is not sure to fit"
    need, time, own = answer.need_bytes, answer.seconds.total, bits(answer.label)
    for fit in able:
        less = fit.need_bytes < 0.949 * need or fit.seconds.total < 0.949 * time
        no_more = fit.need_bytes <= need and fit.seconds.total <= time
        if less and no_more and bits(fit.label) <= own:
            return f"dominated by {fit.label}"
    quick = min(able, key=lambda fit: fit.seconds.total)
    half = quick.seconds.spread / quick.seconds.total / 2
    far = quick.seconds.total * (1 + half) / (1 - half)
    near = [fit for fit in able if fit.seconds.total <= (1 - OFF) * far and taken(fit)]
    key = own, bool(HOST.search(answer.label))
    for fit in near:
        one = bits(fit.label), bool(HOST.search(fit.label))
        dominated = need <= fit.need_bytes and time <= fit.seconds.total and own <= one[0]
        if one < key and not dominated:
            return f"more exact, or not in host memory: {fit.label}"
    alike = [fit for fit in near if (bits(fit.label), bool(HOST.search(fit.label))) == key]
    least = min((fit.seconds.total for fit in alike), default=time)
    for fit in alike:
        even = fit.seconds.total <= (1.1 - OFF) * least
        if even and fit.need_bytes < (1 - 2 * OFF) * need and fit.seconds.total <= time:
            return f"smaller: {fit.label}"
    return "slow" if answer in alike and time > (1.1 + OFF) * least else ""


@pytest.mark.parametrize(("size", "gpus", "tokens"), [
    *itertools.product(SIZES, (1, 8), (0.3, 1.0)),
    (32, 8, 3.0),  # wrong where estimates count as exact
])  # fmt: skip
def test_no_recipe_of_the_lattice_dominates_the_answer(size, gpus, tokens):
    asked = Asked(cards.of_size(size * GIB), functools.partial(predicted, tokens=tokens))
    rows = rows_of(FLUX, gpus)
    fits, proofs = search(rows, asked.gpu, asked)
    assert len(asked.names) == len(set(asked.names)) == len(fits) < len(rows)
    everything = asked(rows)
    for proof in proofs:
        every = [fit for fit in everything if Point(fit.resolved).adapted == proof.adapters]
        best = next((fit for fit in every if proof.best and fit.label == proof.best.label), None)
        assert fault(best, every) == "", best and best.label


def every(size: int) -> list[Fit]:
    """All recipes with adapters on one GPU, judged."""
    fits = Asked(cards.of_size(size * GIB), functools.partial(predicted, tokens=0.3))(
        rows_of(FLUX, 1)
    )
    return [fit for fit in fits if Point(fit.resolved).adapted]


def test_a_wrong_answer_is_noticed():
    """The control: the slowest, one that does not fit, one in 4 bits, and none at all."""
    fits = every(24)
    sure = [fit for fit in fits if fit.fits]
    assert fault(max(sure, key=lambda fit: fit.seconds.total), fits)
    assert fault(next(fit for fit in every(16) if not fit.may_fit), every(16))
    assert fault(next(fit for fit in sure if fit.label.endswith("qlora:rank=16+checkpoint")), fits)
    assert fault(None, fits) == f"{len(sure)} fit"


def test_what_dominates_needs_no_more_takes_no_longer_and_is_as_exact():
    fits = {fit.label: option_of(fit) for fit in every(80)}
    plain = fits["single+bf16_pure+lora:rank=16"]
    lean, coarse = (plain._replace(need=0.9 * plain.need, point=one) for one in (
        plain.point, fits["single+bf16_pure+qlora:rank=16"].point))  # fmt: skip
    assert dominates(lean, plain) and not dominates(plain, lean)
    assert not dominates(coarse, plain), "it rounds more"
    assert not dominates(lean._replace(seconds=1.01 * plain.seconds), plain)
    assert not dominates(plain._replace(need=0.97 * plain.need), plain), "a block of the allocator"
    assert best_of([plain, lean]) is lean


def test_other_heads_are_better_in_what_they_say_and_each_better_row_has_its_reason():
    fits = every(24)
    best = best_of([option_of(fit) for fit in fits]).fit
    heads = explore.headed(fits, best)
    sure = [fit for fit in fits if fit.fits]
    assert heads["least memory"].need_bytes == min(fit.need_bytes for fit in sure)
    assert heads["fastest"].seconds.total == min(fit.seconds.total for fit in sure)
    assert "exact" not in heads and bits(best.label) == 0
    said = {fit.label: explore.reason(fit, best) for fit in fits if fit.may_fit}
    for fit in fits:
        better = fit.need_bytes < best.need_bytes or fit.seconds.total < best.seconds.total
        if fit.may_fit and fit is not best:
            assert bool(said[fit.label]) == better, fit.label
    assert said["single+bf16_pure+qlora:rank=16"] == "4-bit weights"
    assert "8-bit weights" in said.values()


RECORDED = ["flux-dev RTX-4090 1", "ltx-2 H100-80GB 1", "ltx-2 RTX-4090 1", "krea-2 RTX-4090 1",
            "flux2-klein-4b RTX-4090 1", "qwen-image RTX-4090 1", "wan2.1-14b RTX-4090 1",
            "DiT-XL/2 A100-80GB 8"]  # fmt: skip
"""Plans whose predictions ship with the project."""


@pytest.mark.parametrize("question", RECORDED)
def test_no_recorded_recipe_dominates_the_answer_of_a_plan(question, monkeypatch, tmp_path):
    monkeypatch.undo()
    model, card, gpus = question.split()
    asked = refill.asked(f"--model {model} --gpu {card} --gpus {gpus}")
    shipped = {str(row.recipe): known(row, asked.gpu, recorded=True) for row in asked.resolved}
    _, proofs = search(asked.resolved, asked.gpu, Asked(asked.gpu, None),
                       lambda row: shipped[str(row.recipe)])  # fmt: skip
    assert all(proof.recorded for proof in proofs), "another recipe would be traced"
    for proof in proofs:
        every = [fit for fit in shipped.values()
                 if fit and fit.seconds and ("lora" in fit.label) == proof.adapters]  # fmt: skip
        assert len(every) > 3 and fault(proof.best, every) == ""


@pytest.mark.parametrize(("gpus", "names"), [(1, {"block_swap", "cast"}), (8, {"fsdp2", "zero3"})])
def test_the_lattice_has_what_people_use(gpus, names):
    rows = [Point(row) for row in rows_of(FLUX, gpus)]
    parts = {part.name for one in rows for part in one.row.recipe.strategies}
    assert names | {"qlora", "adam8bit", "bf16_pure", "zero3_offload", "lora"} <= parts
    for adapted in (True, False):
        shares = {one.share for one in rows if one.adapted is adapted}
        assert shares == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert len({(one.part, one.adapted) for one in rows}) == 6
    assert not any(one.adapted for one in rows if one.products)
    assert not any(one.swapped for one in rows if one.part != "block")
    assert {one.share for one in rows if one.moved} == {0, 1}
    assert gpus == 1 or {one.adapted for one in rows if one.sharding == "fsdp2"} == {True, False}


def test_recipes_that_cannot_be_predicted_leave_the_others():
    """The first column fails: another is the root, and the answer is the best of the rest."""
    none = Prediction(recipe="", device="cuda", method="none", reason="hooks")
    rows, gpu = rows_of(FLUX, 8), cards.of_size(24 * GIB)
    fits, _ = search(rows, gpu, Asked(gpu, lambda _: none))
    kinds = {fit.resolved.recipe.in_slot(Slot.ADAPT) is None: fit for fit in reversed(fits)}
    lost = {Point(fit.resolved).column for fit in kinds.values()}

    def predict(row: Resolved) -> Prediction:
        return none if Point(row).column in lost else predicted(row, 1.0)

    _, proofs = search(rows, gpu, Asked(gpu, predict))
    assert all(proof.best and proof.failed for proof in proofs)


def test_a_plan_prints_its_answers_first_and_writes_them(capsys, monkeypatch, tmp_path):
    made_up(monkeypatch, lambda row: predicted(row, 1.0))
    file = tmp_path / "plan.json"
    assert cli.main([*PLAN, "24GiB", "--json", str(file)]) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    adapters, whole = found["searches"]
    assert {row["recipe"] for row in found["rows"]} >= {adapters["answer"], whole["answer"]}
    assert found["fastest"] == adapters["answer"] and whole["sure"]
    assert said.index("\nRecipe ") > said.index(f"Adapters: {adapters['answer']}") > 0
    assert f"of {adapters['recipes']} recipes" in said


def test_a_plan_that_is_interrupted_prints_the_best_so_far(capsys, monkeypatch):
    asked = []

    def predict_all(rows, *_, **__):
        if len(asked) > 2:
            raise KeyboardInterrupt
        asked.append(rows)
        return [predicted(row, 1.0) for row in rows]

    monkeypatch.setattr(pool, "predict_all", predict_all)
    assert cli.main([*PLAN, "24GiB"]) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert "Adapters: single+" in said and "not tried (stopped by Ctrl-C)" in said
    asked *= 2
    assert cli.main([*PLAN, "24GiB"]) == 130
    assert "Adapters" not in capsys.readouterr().out, "nothing is known yet"


def test_a_plan_in_which_nothing_fits_shows_by_how_much(capsys, monkeypatch):
    made_up(monkeypatch, lambda row: predicted(row, 2.0))
    assert cli.main([*PLAN, "1GiB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Adapters: none of " in said and "All weights: none of " in said
    assert said.count("nearest of those predicted: ") == 2


def test_the_largest_batch_is_that_of_the_plan_s_answers(monkeypatch, tmp_path):
    """Activations are in proportion to the micro batch."""
    made_up(monkeypatch, lambda row: predicted(row, 0.3 * row.micro_batch))
    file = tmp_path / "plan.json"
    words = [*PLAN, "80GiB", "--json", str(file)]
    assert cli.main(words) == 0
    answers = [one["answer"] for one in json.loads(file.read_text())["searches"]]
    assert cli.main([*words, "--largest", "batch", "--force"]) == 0
    rows, gpu = json.loads(file.read_text())["rows"], cards.of_size(80 * GIB)
    assert [row["recipe"] for row in rows][: len(answers)] == answers
    for row in rows:
        (one,) = [r for r in rows_of(FLUX, 1) if str(r.recipe) == row["recipe"]]
        size = row["fits"]["micro_batch"]
        fits = [verdict.judge(one, predicted(one, 0.3 * n), gpu).fits for n in (size, size + 1)]
        assert fits == [True, False]
