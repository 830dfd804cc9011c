"""Each family of public models in miniature on two processes: it trains as alone, with evidence,
and as the record has it (``tests.made.families``).

The record has every family under every kind of strategy. Here each family runs under one kind, the
kinds in turn. Unlike ones also run under checkpoints with ZeRO-3, which ask the most of a foreign
module: its weights are gathered once more for what is recomputed. ``test_publics_staged`` has
stages.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator

import pytest
from conftest import Case, forget, launched_together, trained_here

from harness import ROOT
from harness.resolve import resolve
from harness.result import Result, Status
from strategies import parse
from strategies.subject import PARTS
from tests.made import families
from tests.made.publics import MINIATURES, miniature

pytestmark = pytest.mark.thorough

EACH = {(name, recipe): head for name in MINIATURES for head, recipe in families.RECIPES.items()}
"""Model and recipe -> the column of the page."""
IN_TURN = [*zip(MINIATURES, itertools.cycle(families.RECIPES.values()), strict=False)]
UNLIKE = ("flux-dev", "wan2.1-1.3b", "z-image", "sana-1.6b", "mochi")
"""Two groups of blocks; a video; refiners; linear attention; trained rotary frequencies."""
AT_ONCE = [
    *((name, "zero3+checkpoint") for name in UNLIKE),
    ("qwen-image", "zero2+lora"),  # weights that get no gradient
    ("sd3.5-medium", "zero3+lora:targets=attention"),  # a block that attends twice
]
"""Model and recipe of several kinds."""
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
def results(tmp_path_factory) -> dict[str, Result]:
    base = tmp_path_factory.mktemp("families")
    runs = sorted((*IN_TURN, *AT_ONCE), key=lambda run: [*MINIATURES].index(run[0]))
    return launched_together({" ".join(run): Case(families.spec(*run)) for run in runs}, base)


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str, str], list[float]]]:
    """Losses and gradient norms of a model and a recipe of one process, each trained once."""
    yield functools.cache(functools.partial(families.of_one, trained_here))
    forget()


def recorded() -> dict[tuple[str, str], dict]:
    """Model and recipe -> the cell."""
    return {(cell["model"], cell["recipe"]): cell for cell in families.kept()["cells"]}


def hold(cell: dict) -> None:
    """What is claimed of a family under a recipe."""
    assert cell["status"] == Status.OK, cell["reason"]
    assert cell["failed_checks"] == []
    assert {part.name for part in parse(cell["recipe"]).strategies} <= set(cell["evidence"])
    assert len(cell["two"]) == len(cell["one"]) == 2 * families.STEPS
    assert families.apart(cell) < families.NEAR, cell
    assert cell["one"][0] != cell["one"][1], "it learned nothing"


@pytest.mark.parametrize(("model", "recipe"), [*IN_TURN, *AT_ONCE])
def test_a_family_trains_on_two_processes_as_it_does_alone(model, recipe, results, alone):
    row = results[f"{model} {recipe}"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert row.spec.processes == len(row.ranks) == 2
    kept = recorded().get((model, recipe))
    found = families.cell(row, kept["one"] if kept else alone(model, families.alone(recipe)))
    hold(found)
    if kept:
        assert found["evidence"] == kept["evidence"]
        assert found["two"] == pytest.approx(kept["two"], rel=families.NEAR)


def test_every_family_is_on_record_under_every_kind_of_strategy():
    assert set(recorded()) == set(EACH)
    for cell in recorded().values():
        hold(cell)


def test_the_record_was_made_with_the_libraries_that_are_pinned():
    """A line of ``pyproject.toml`` that changes asks for ``python -m tests.made.families``."""
    pins = dict(re.findall(r'"([a-z]+)==([0-9.]+)"', (ROOT / "pyproject.toml").read_text()))
    made_with = families.kept()["made_with"]
    assert sorted(made_with) == sorted(families.LIBRARIES)
    assert {name: made.partition("+")[0] for name, made in made_with.items()} == {
        name: pins[name] for name in families.LIBRARIES
    }


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


@pytest.mark.parametrize("text", FOREIGN)
def test_a_strategy_about_a_dit_s_own_parts_refuses_by_name(text):
    words = str(resolve(miniature("flux-dev", f"ddp+{text}", processes=2)).refusal)
    assert (
        f"flux-dev has no {PARTS[FOREIGN[text]]}" in words and "leave" in words
    ) or "take" in words
