"""Stories of suites: the tables that known numbers must give, and rows that are not there."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from conftest import SUBJECT

from harness import extensions
from harness.analyses import suites
from harness.analyses.claim_rules import DEEP
from harness.report import build
from harness.report.data.rows import SuiteHead
from harness.report.figures import units
from harness.report.rendering import analyses
from harness.result import Status
from harness.suite import file as suite_file
from harness.suite import matrix
from strategies import parse
from strategies.base import Conflict
from tests.made.results import gone, row


def told(story: str, order, results):
    """The tables of a suite's story."""
    head = SuiteHead(reference=order[0], story=story, order=tuple(order))
    return analyses.tables(build(results, [], head))


def test_the_ladder_compares_each_rung_with_the_one_above():
    order = ("single", "single+bf16", "single+bf16+checkpoint", "single+bf16+lora")
    results = [
        row("single", 880.0),
        row("single+bf16", 380.0, parity="by design"),
        gone("single+bf16+checkpoint", Status.GPU_OOM, "no room", None, processes=1),
        row("single+bf16+lora", 130.0, parity="by design"),
    ]
    (grid,) = told("ladder", order, results)
    assert [line[0] for line in grid.lines] == [
        "single", "+ bf16", "+ single+bf16+checkpoint", "+ lora",
    ]  # fmt: skip
    # A whole run's resident mark stands beside the step's peak, and is not what was saved of.
    assert grid.lines[0][1:3] == ["0.977", "1.04"]
    assert grid.lines[1][3:5] == ["-50.0 %", "-50.0 %"]
    assert grid.lines[3][3:5] == ["-50.0 %", "-75.0 %"]
    assert "single+bf16+checkpoint is gpu_oom: no room" in grid.lines[2]


def test_a_rung_says_what_it_came_in_place_of():
    order = ("single+bf16", "single+bf16_pure")
    results = [row(recipe, 380.0, parity="by design") for recipe in order]
    (grid,) = told("ladder", order, results)
    assert grid.lines[1][0] == "+ bf16_pure (in place of bf16)"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_rung_is_the_one_above_with_one_part_more(device):
    """A part goes only where the new one cannot stand beside it, and comes back nowhere."""
    suite, left = suite_file.load_suite("ladder", device), set()
    recipes = [spec.recipe for spec in matrix.specs(suite, {}, gpus=1, gpu_bytes=2**36)]
    assert recipes[0] == suite.reference == "single"
    for above, recipe in itertools.pairwise(recipes):
        before, after = above.split("+"), recipe.split("+")
        (new,), gone = set(after) - set(before), set(before) - set(after)
        assert len(gone) <= 1 and new not in left, recipe
        assert not gone or cannot_be("+".join([*before, new]), device), f"{recipe}: {gone}"
        left |= gone


def cannot_be(text: str, device: str) -> bool:
    """Whether two parts of a recipe fill one place, or one refuses the other."""
    try:
        recipe = parse(text)
    except Conflict:
        return True
    return bool(recipe.refusal(recipe.launch(device, 1, SUBJECT)))


def test_each_row_stands_against_the_reference_in_the_suite_s_order():
    order = ("single", "single+checkpoint", "single+compile", "single+fp8")
    compiled = row("single+compile", 0.0)
    compiled.ranks = [dataclasses.replace(rank, categories=None) for rank in compiled.ranks]
    results = [
        compiled,
        row("single+checkpoint", 130.0),
        row("single", 380.0),
        gone("single+fp8", Status.UNSUPPORTED, "no such unit", None, processes=1),
    ]
    (grid,) = told("each", order, results)
    assert [line[0] for line in grid.lines] == list(order)
    assert [line[4] for line in grid.lines] == [units.NONE, "-50.0 %", units.NONE, units.NONE]
    assert float(grid.lines[2][6]) > 0, "speed is known of a row that was not traced"
    assert grid.lines[3][7] == "single+fp8 is unsupported: no such unit"


@pytest.mark.parametrize(
    ("shares", "where"),
    [
        ({10: 0.2, 20: 0.3}, "at every vocabulary from 10 on"),
        ({10: 0.0, 2000: 0.3}, "from 2,000 words on, not at 10"),
        ({10: 0.2, 20: 0.0, 3000: 0.3}, "at 10, 3,000 words alone"),
        ({10: 0.2, 20: 0.0}, "at 10 words alone"),
        ({10: 0.09, 2000: -0.1}, "at no vocabulary up to 2,000"),
    ],
)
def test_where_a_loss_saves_is_said_of_no_other_vocabulary(shares, where):
    assert suites.judged(shares) == where


def test_a_loss_that_was_not_traced_stands_once_and_saves_nothing_known():
    untraced = row("single+cross_entropy", 20.0, model="DiT-S/2:tokens=1024")
    for rank in untraced.ranks:
        rank.categories = None
    results = [row("single", 40.0, model="DiT-S/2:tokens=1024"), untraced]
    order = ("single", "single+cross_entropy")
    (grid,) = told("vocabulary", order, results)
    assert [line[1] for line in grid.lines] == [*order]
    assert "nothing to judge it by" in grid.note


def test_the_published_table_stands_beside_the_measured_one():
    suite = suite_file.load_suite("fast_dit_table", "cpu")
    order = tuple(r.recipe for r in suite.rows)
    results = [row(r, 100.0, data="vae_small:256") for r in order[:3]]
    extracted = zip(order[3:6], (50.0, 40.0, 30.0), strict=True)
    results += [row(r, size, data="synthetic") for r, size in extracted]
    grid, careful = told("fast_dit", order, results)
    assert [line[3:5] for line in grid.lines] == [
        ["out of memory", "out of memory"], ["0.43", "44045"], ["0.56", "40461"], ["0.84", "27485"],
    ]  # fmt: skip
    assert [line[2] for line in grid.lines] == ["no", "no", "no", "yes"]
    assert len({line[7] for line in grid.lines[:3]}) == 1 and grid.lines[3][7] != grid.lines[2][7]
    assert [line[0] for line in careful.lines] == list(order[3:])
    assert [line[4] for line in careful.lines] == [units.NONE, "-5.9", "-11.8", units.NONE]
    assert careful.lines[0][3] == grid.lines[3][7] and "is not among" in careful.lines[3][1]


def at(result, seconds: float):
    """The same run with steps of just so long."""
    for rank in result.ranks:
        rank.step_seconds = [seconds] * 4
    return result


@pytest.mark.parametrize(("others", "said"), [((1.0, 1.01), "1.50"), ((1.3, 1.7), "same")])
def test_the_table_of_fast_dit_tells_speeds_beyond_the_noise_alone(others, said):
    """The first row three times: close together, or as far apart as the next row is from it."""
    order = tuple(r.recipe for r in suite_file.load_suite("fast_dit_table", "cpu").rows)
    rows = [at(row(order[0], 100.0, data="vae_small:256"), 1.0)]
    rows += [at(row(order[0], 100.0, data="vae_small:256", repeat=i), seconds)
             for i, seconds in enumerate(others, 1)]  # fmt: skip
    rows.append(at(row(order[1], 100.0, data="vae_small:256"), 1.0 / 1.5))
    grid, _ = told("fast_dit", order, rows)
    place = grid.heads.index("Speed x")
    assert [line[place] for line in grid.lines[:2]] == [units.NONE, said]


@pytest.mark.parametrize(("others", "spread"), [((4.04, 3.96), "0.07"), ((6.0, 2.7), "2.86")])
def test_the_power_of_time_says_how_far_the_noise_lets_it_be_told(others, spread):
    """Twice the blocks, twice the seconds; the deeper one three times, more or less alike."""
    rows = [at(row("single", 10.0, model=DEEP.format(8)), 2.0)]
    rows += [at(row("single", 10.0, model=DEEP.format(16), repeat=i), seconds)
             for i, seconds in enumerate((4.0, *others))]  # fmt: skip
    (grid,) = told("depth", ["single"], rows)
    (cell,) = [line[grid.heads.index("Step time ~ L^")] for line in grid.lines]
    once = told("depth", ["single"], rows[:2])[0].lines[0][-1]
    assert cell == f"1.00 +- {spread}" and once == "1.00"


@pytest.mark.parametrize("name", sorted(suite_file.known_suites()))
def test_a_suites_story_is_known(name):
    suite = suite_file.load_suite(name, "cpu")
    assert suite.story in ("", *extensions.analyses())
    assert dataclasses.asdict(suite)["name"] == name


def test_depth_tells_memory_and_counted_work_of_each_regime():
    nothing, rows = "single+checkpoint:keep=nothing", []
    for depth in (4, 16):
        spec = {"model": DEEP.format(depth)}
        facts = {"checkpoint": {"block_forwards": (depth + 3) / 2}}
        rows += [row("single", 10.0 * depth, **spec), row(nothing, 14.0, evidence=facts, **spec)]
    suite = SuiteHead(reference="single", story="depth", order=("single", nothing))
    report = build(rows, [], suite)
    (grid,) = analyses.tables(report)
    plain, none = (dict(zip(grid.heads, line, strict=True)) for line in grid.lines)
    assert plain["Added by a block MiB"] == "10.00" and plain["Memory ~ L^"] == "1.00"
    assert plain["Forwards a block"] == "1.00" and none["Forwards a block"] == "3.50 to 9.50"
    assert none["Memory ~ L^"] == "0.00" and none["Forward work ~ L^"] == "1.72"
    pictures, keys = analyses.charts(report), analyses.keys(report)
    assert len(pictures) == 3 and [name for name, *_ in keys] == ["single", nothing]
    assert all(f">{depth}</text>" in picture for *_, picture in pictures for depth in (4, 16))


def test_long_tells_memory_and_time_against_tokens():
    rows = []
    for side, length in ((16, 64), (32, 256)):
        spec = {"model": "DiT-T/2", "data": f"synthetic:{side}"}
        rows += [row("single", length, **spec), row("ddp+sp", length / 2, processes=2, **spec)]
    (grid,) = told("long", ["single", "ddp+sp"], rows)
    plain, shared = (dict(zip(grid.heads, line, strict=True)) for line in grid.lines)
    assert plain["Recipe"] == "single" and shared["Processes"] == "2"
    assert (plain["T=256 MiB"], shared["T=256 MiB"]) == ("256.0", "128.0")
    assert plain["Memory ~ T^"] == shared["Memory ~ T^"] == "1.00"
    assert float(plain["T=64 ms"]) > 0 and abs(float(plain["Step time ~ T^"])) < 0.05
