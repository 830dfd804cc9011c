"""Each family of public models in miniature on two processes: it trains as alone, with evidence.

Each runs under ZeRO-3 with checkpoints, whose hooks ask the most of a foreign module, and under one
of the others by turns. All families under all kinds of strategy are on record
(``tests.made.families``).
"""

from __future__ import annotations

import itertools

import pytest
from conftest import Case, launched_together

from harness.resolve import resolve
from harness.result import Status
from strategies import parse
from strategies.subject import PARTS
from tests.made import families
from tests.made.publics import MINIATURES, miniature

OTHERS = ("ddp", "zero2+lora", "ddp+lora+checkpoint", "zero2", "zero3+lora:targets=attention")
TWO = {"processes": 2, "steps": 1}
RUNS = {f"{name}-0": miniature(name, "zero3+checkpoint", **TWO) for name in MINIATURES}
RUNS |= {
    f"{name}-1": miniature(name, recipe, **TWO)
    for name, recipe in zip(MINIATURES, itertools.cycle(OTHERS), strict=False)
}
FOREIGN = {
    "controlnet": "token_blocks",
    "difffit": "halves",
    "prune_structured": "halves",
    "attend:kernel=naive": "attend",
    "checkpoint:every=2": "chain",
    "sgd:momentum=0.0+sparse_embedding": "label_table",
}
"""What is about a DiT's own parts -> the part."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    cases = {name: Case(spec) for name, spec in RUNS.items()}
    return launched_together(cases, tmp_path_factory.mktemp("publics"))


@pytest.mark.parametrize("name", RUNS)
def test_a_family_trains_on_two_processes_as_it_does_alone(name, results, train_here):
    row = results[name]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert [check for check in row.audit if not check.ok] == []
    assert {part.name for part in parse(row.spec.recipe).strategies} <= set(row.evidence)
    run, log = train_here(miniature(row.spec.model, families.alone(row.spec.recipe)), 2)
    assert row.losses[:2] == pytest.approx(log.all_losses(run), rel=families.NEAR)
    assert row.grad_norms[:2] == pytest.approx(log.all_norms(), rel=families.NEAR)


def test_every_sharding_and_adapter_has_been_tried():
    recipes = {spec.recipe for spec in RUNS.values()}
    assert recipes == {"zero3+checkpoint", *OTHERS}


# ---- all of them, on record ----


def test_every_family_is_on_record_under_every_kind_of_strategy():
    cells = families.kept()["cells"]
    of = {(cell["model"], cell["recipe"]) for cell in cells}
    assert of == {(name, text) for name in MINIATURES for text in families.RECIPES.values()}
    for cell in cells:
        assert cell["status"] == Status.OK and not cell["failed_checks"], cell
        assert {part.name for part in parse(cell["recipe"]).strategies} <= set(cell["evidence"])
        assert len(cell["one"]) == 4 and families.apart(cell) < families.NEAR, cell
        assert cell["one"][0] != cell["one"][1], "it learned nothing"


def test_the_page_shows_what_is_on_record():
    page = families.PAGE.read_text(encoding="utf-8")
    assert "\n".join(families.table(families.kept())) + "\n" in page


def test_a_cell_that_failed_shows_in_the_table():
    record = families.kept()
    first, second, third, *_ = record["cells"]
    first["status"], second["failed_checks"] = "failed", ["micro batch"]
    third["two"] = [2 * value for value in third["one"]]
    row = families.table(record)[2]
    assert row.startswith("| `flux-dev` | failed | void | 1e+00 |")


# ---- what is about a DiT's own parts ----


@pytest.mark.parametrize("text", FOREIGN)
def test_a_strategy_about_a_dit_s_own_parts_refuses_by_name(text):
    words = resolve(miniature("flux-dev", f"ddp+{text}", processes=2)).refusal
    assert (
        f"flux-dev has no {PARTS[FOREIGN[text]]}" in words and "leave" in words
    ) or "take" in words
