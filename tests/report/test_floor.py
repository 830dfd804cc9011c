"""The noise floor: by hand, by simulation, and in every format of a report."""

from __future__ import annotations

import dataclasses
import io
import math
import random
import re

import pytest
from rich.console import Console

from harness import void
from harness.report import build
from harness.report.data import lookup
from harness.report.data.answers import answers, fits, front, headline
from harness.report.data.rows import Group, Report, SuiteHead
from harness.report.figures import derive, floor
from harness.report.figures.floor import Step, floor_of, margin
from harness.report.figures.numbers import numbers
from harness.report.rendering import pages, terminal
from harness.report.rendering.tables import ranking
from harness.result import Result, Status, StepUsage
from tests.made.results import FULL, cpu_set, done

QUIET = (0.400, 0.404, 0.396)
"""Seconds a step of three runs of the reference, beside which 20 % shows."""
SAME, SLOWER = "ddp+ema:place=cpu", "ddp+checkpoint"


def steady(recipe: str, seconds: float, repeat: int = 0, **more: object) -> Result:
    """A run of five steps within 0.4 % of each other; their median is ``seconds``."""
    result = done(recipe, 1.0, more.pop("parts", FULL), repeat=repeat, **more)
    for rank in result.ranks:
        rank.step_seconds = [seconds * (1 + 0.001 * i) for i in (-2, -1, 0, 1, 2)]
    return result


def suite(reference: tuple[float, ...], *more: Result) -> list[Result]:
    """The reference measured so, a row that takes as long as its first run, one 20 % longer."""
    runs = [steady("ddp", seconds, repeat=i) for i, seconds in enumerate(reference)]
    others = [steady(SAME, reference[0] * 1.012), steady(SLOWER, reference[0] * 1.2)]
    return [*runs, *others, *more]


def group_of(results: list[Result], place: int = 0) -> Group:
    return build(results, [], SuiteHead(reference="ddp")).groups[place]


def cells(group: Group, head: str) -> dict[str, str]:
    grid = ranking(group)
    return {line[1]: line[grid.heads.index(head)] for line in grid.lines}


def plain_terminal(report: Report) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    terminal.render(report, console)
    return console.export_text()


# ---- the statistic ----


def told_apart(dice: random.Random, ratio: float, runs: float, steps: float, times: int) -> bool:
    """Whether a row that takes ``ratio`` as long is told from the reference, of made noise."""

    def run(scale: float) -> list[float]:
        here = scale * math.exp(dice.gauss(0, runs))
        return [here * math.exp(dice.gauss(0, steps)) for _ in range(5)]

    rows = {"ddp": [run(1.0) for _ in range(times)], "row": [run(ratio)]}
    floor = floor_of(rows, "ddp")
    pooled = [sorted(s for r in row for s in r) for row in rows.values()]
    ours, theirs = (row[len(row) // 2] for row in pooled)
    return abs(math.log(ours / theirs)) > margin(floor, rows["row"], rows["ddp"])


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize(("runs", "steps"), [(0.03, 0.03), (0.05, 0.01), (0.0, 0.05)])
def test_equal_rows_are_told_apart_as_seldom_as_is_said(runs, steps, times):
    dice = random.Random(f"{runs} {steps} {times}")
    wrong = sum(told_apart(dice, 1.0, runs, steps, times) for _ in range(600)) / 600
    assert wrong < 0.075, "5 % and three times its own error in 600 trials"


@pytest.mark.parametrize(("runs", "steps", "least"), [(0.01, 0.02, 0.95), (0.02, 0.02, 0.75)])
def test_a_difference_of_a_fifth_is_found(runs, steps, least):
    dice = random.Random(7)
    assert sum(told_apart(dice, 1.2, runs, steps, 3) for _ in range(300)) / 300 > least


def test_the_margin_by_steps_is_student_s_of_the_median():
    """By hand: equal runs, whose two steps are 10 % apart. The deviation within a run is
    0.1 / sqrt(2) with four degrees of freedom, and each row has four steps."""
    rows = {name: [[1.0, math.exp(0.1)]] * 2 for name in ("ddp", "zero2")}
    found = margin(floor_of(rows, "ddp"), rows["ddp"], rows["zero2"])
    median = math.sqrt(math.pi / 2)
    assert found == pytest.approx(2.776 * median * 0.1 / math.sqrt(2) * math.sqrt(2 / 4), rel=1e-3)


# ---- a report ----


@pytest.mark.parametrize("render", [pages.render_markdown, plain_terminal])
def test_a_busy_machine_has_no_fastest_row_and_no_equal_ones(render):
    """9.67 against 16.05 samples/s under such a noise are no equal speeds."""
    slim = (126, 63, 126, 126, 96, 58)
    runs = [steady("ddp", seconds, repeat=i) for i, seconds in enumerate((1.0, 1.6, 0.9))]
    others = steady(SAME, 16 / 16.05), steady("zero2", 16 / 9.67, parts=slim)
    report = build([*runs, *others], [], SuiteHead(reference="ddp"))
    (group,) = report.groups
    assert group.floor.fraction > 1.1
    assert headline(group).startswith("The machine was too busy to compare speeds: its noise")
    assert "About --steps " in headline(group) and "zero2 needs 22 % less memory" in headline(group)
    found = {answer.question: answer for answer in answers(group)}
    assert found["Fastest"].row is None and found["Best trade"].row is None
    assert not [row for row in group.rows if row.versus.speed_same]
    text = render(report)
    assert not re.search("same speed|as fast as|equally fast|is fastest|at the same", text)


def test_a_reference_that_does_not_repeat_itself_is_told():
    results = suite(QUIET)
    said = "ddp computed something else when it was measured again"
    assert said not in pages.render_markdown(build(results, [], SuiteHead(reference="ddp")))
    last = next(r for r in results if r.spec.repeat == 2)
    last.losses = [loss * 1.001 for loss in last.losses]
    report = build(results, [], SuiteHead(reference="ddp"))
    assert said in pages.render_markdown(report)
    (verdict,) = (r.versus.parity for r in report.groups[0].rows if r.label == SAME)
    assert verdict.startswith("not comparable")


def test_a_ratio_of_which_the_noise_leaves_nothing_is_unknown():
    group = group_of(suite((0.4, 40.0, 0.004)))
    assert cells(group, "x ref")[SLOWER] == "unknown"
    assert not re.search(r"\d+ % of its speed", " ".join(a.text for a in answers(group)))


def test_without_repetitions_ratios_stand_as_measured_and_the_report_says_so():
    group = group_of([r for r in suite(QUIET) if not r.spec.repeat])
    assert cells(group, "x ref") == {"ddp": "-", SAME: "0.99", SLOWER: "0.83"}
    assert cells(group, "#") == {"ddp": "1", SAME: "2", SLOWER: "3"}
    assert lookup.noise_floor(group).startswith("Noise floor unknown: no row was measured twice")


# ---- groups without repetitions ----


def smaller(*seconds: float) -> list[Result]:
    """Rows of another batch, of which none ran twice."""
    return [steady(r, s, global_batch=2) for r, s in zip(("ddp", "zero2"), seconds, strict=True)]


def test_a_group_borrows_the_noise_of_the_first_and_says_so():
    group = group_of(suite(QUIET, *smaller(0.1, 0.101)), 1)
    assert group.unlike and group.floor.source == "DiT-S/4 at batch 16"
    assert cells(group, "x ref")["zero2"] == "0.93-1.05"
    said = lookup.noise_floor(group)
    assert "from another group, because no row of this one was measured twice" in said
    assert "DiT-S/4 at batch 16 ddp was measured 3 times" in said
    control = group_of(suite(QUIET, *smaller(0.1, 0.13)), 1)
    assert cells(control, "x ref")["zero2"] == "0.77"


def test_nothing_is_borrowed_from_another_device():
    others = [steady(r, s, device="cuda") for r, s in (("ddp", 0.1), ("zero2", 0.101))]
    groups = build([*suite(QUIET), *others], [], SuiteHead(reference="ddp")).groups
    assert [group.floor is None for group in groups] == [False, True]


# ---- answers ----


def test_the_fastest_is_named_with_those_that_are_not_told_from_it():
    slim = (126, 63, 126, 126, 96, 58)
    group = group_of(suite(QUIET, steady("zero2", 0.41, parts=slim)))
    found = {answer.question: answer.text for answer in answers(group)}
    close = f"; not told apart from it: {SAME}, zero2"
    assert found["Fastest"].endswith(close)
    zero2 = next(row for row in group.rows if row.label == "zero2")
    least = 100 * lookup.pace(zero2, group.rows[0]).low
    for question in ("Best trade", "Least memory"):
        assert f"than ddp, at {least:.0f} % of its speed or more" in found[question]
    assert fits(front(group)[-1], group) == f"ddp{close}"


# ---- steps that were disturbed, and pauses of a network ----


# A second on two cores, all of it the run's own work.
USUAL = Step(seconds=1.0, cpu=1.9, forced=12, busy=1.95, cores=2)


@pytest.mark.parametrize(("step", "marked"), [
    ({}, False), ({"busy": 1.99, "cpu": 1.2}, True), ({"busy": 1.4, "cpu": 0.7}, False),
    ({"busy": 1.6, "cpu": 1.2}, True), ({"busy": 1.99, "cpu": 1.85}, False), ({"busy": 0.0}, False),
    ({"cores": 0}, False),
])  # fmt: skip
def test_others_are_in_the_way_where_they_hold_cores_that_the_run_could_use(step, marked):
    assert floor.others_in_the_way(USUAL._replace(**step)) is marked


@pytest.mark.parametrize(("step", "marked"), [
    ({}, False), ({"seconds": 1.05, "cpu": 1.3}, False), ({"seconds": 1.5, "cpu": 2.85}, False),
    ({"seconds": 1.5, "cpu": 1.9}, True), ({"seconds": 1.5, "cpu": 2.85, "forced": 200}, True),
    ({"seconds": 1.5, "cpu": 2.85, "forced": 40}, False),
])  # fmt: skip
def test_a_step_waited_where_it_is_longer_without_more_work(step, marked):
    assert floor.waited(USUAL._replace(**step), USUAL) is marked


def two_ranks():
    """Three steps of two ranks; in the second the other rank waits for the slow one."""
    row = cpu_set()["ddp"]
    seconds = [[1.0, 1.4, 1.0], [0.9, 2.0, 1.0]]
    common = {"busy_seconds": [0.0] * 3, "cores": 2}
    uses = [
        StepUsage(cpu_seconds=cpu, forced_switches=forced, minor_faults=[5, 7, 9], **common)
        for cpu, forced in (([0.9, 0.5, 0.9], [5, 5, 5]), ([0.9, 0.9, 0.95], [5, 90, 5]))
    ]
    ranks = [
        dataclasses.replace(rank, step_seconds=s, step_usage=u)
        for rank, s, u in zip(row.ranks, seconds, uses, strict=True)
    ]
    return dataclasses.replace(row, ranks=ranks)


def test_the_steps_of_all_ranks_are_judged_together():
    row = two_ranks()
    assert floor.disturbed(row) == [False, True, False]
    found = numbers([row, row])
    assert found.disturbed_steps == 2 and found.timed_steps == 6


def test_a_result_older_than_the_counts_is_not_called_quiet():
    row = two_ranks()
    old = [dataclasses.replace(row.ranks[0], step_usage=None), row.ranks[1]]
    older = dataclasses.replace(row, ranks=old)
    assert floor.disturbed(older) is None
    assert [numbers(some).disturbed_steps for some in ([older], [row, older])] == [None, None]


# ---- several nodes ----


def on_two():
    """A made row as if on two nodes."""
    row = cpu_set()["ddp"]
    return dataclasses.replace(row, spec=dataclasses.replace(row.spec, nodes=2))


def test_nodes_with_other_devices_make_a_row_void():
    row = on_two()
    ranks = [dataclasses.replace(r, device=d) for r, d in zip(row.ranks, "AB", strict=True)]
    assert void.settle(dataclasses.replace(row, ranks=[row.ranks[0]] * 2)).status is Status.OK
    mixed = void.settle(dataclasses.replace(row, ranks=ranks))
    assert mixed.status is Status.VOID and mixed.reason == "mixed nodes (A, B): no comparable times"


@pytest.mark.parametrize(("seconds", "count"), [
    ([0.05, 0.05, 8.2, 0.05], 1), ([0.05, 0.05, 0.4, 0.05], 0), ([1.0] * 4, 0),
    ([2.0, 2.0, 9.5, 2.0], 1), ([2.0, 2.0, 6.5, 2.0], 0),
])  # fmt: skip
def test_a_step_far_above_the_median_is_a_pause(seconds, count):
    ranks = [dataclasses.replace(r, step_seconds=seconds, step_usage=None) for r in on_two().ranks]
    row = dataclasses.replace(on_two(), ranks=ranks)
    assert derive.paused_steps(row) == count
    text = pages.render_markdown(build([row], []))
    assert ("Network paused?" in text) is bool(count) is ("network paused?" in text)
