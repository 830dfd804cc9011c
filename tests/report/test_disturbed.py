"""Which steps are marked as disturbed, and rows on several nodes: the network, and its pauses."""

from __future__ import annotations

import dataclasses

import pytest

from harness import void
from harness.report import build
from harness.report.figures import derive, floor
from harness.report.figures.floor import Step
from harness.report.figures.numbers import numbers
from harness.report.rendering import pages
from harness.result import Status, StepUsage
from tests.made.results import cpu_set

# A second on two cores, all of it the run's own work.
QUIET = Step(seconds=1.0, cpu=1.9, forced=12, busy=1.95, cores=2)


@pytest.mark.parametrize(("step", "marked"), [
    ({}, False), ({"busy": 1.99, "cpu": 1.2}, True), ({"busy": 1.4, "cpu": 0.7}, False),
    ({"busy": 1.6, "cpu": 1.2}, True), ({"busy": 1.99, "cpu": 1.85}, False), ({"busy": 0.0}, False),
    ({"cores": 0}, False),
])  # fmt: skip
def test_others_are_in_the_way_where_they_hold_cores_that_the_run_could_use(step, marked):
    assert floor.others_in_the_way(QUIET._replace(**step)) is marked


@pytest.mark.parametrize(("step", "marked"), [
    ({}, False), ({"seconds": 1.05, "cpu": 1.3}, False), ({"seconds": 1.5, "cpu": 2.85}, False),
    ({"seconds": 1.5, "cpu": 1.9}, True), ({"seconds": 1.5, "cpu": 2.85, "forced": 200}, True),
    ({"seconds": 1.5, "cpu": 2.85, "forced": 40}, False),
])  # fmt: skip
def test_a_step_waited_where_it_is_longer_without_more_work(step, marked):
    assert floor.waited(QUIET._replace(**step), QUIET) is marked


def two_ranks():
    """Three steps of two ranks; in the second the other rank waits for the slow one."""
    row = cpu_set()["ddp"]
    seconds = [[1.0, 1.4, 1.0], [0.9, 2.0, 1.0]]
    common = {"voluntary_switches": [0] * 3, "busy_seconds": [0.0] * 3, "cores": 2}
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


def test_nodes_with_other_devices_make_a_row_void():
    row = cpu_set()["ddp"]
    ranks = [dataclasses.replace(r, device=d) for r, d in zip(row.ranks, "AB", strict=True)]
    assert void.settle(dataclasses.replace(row, ranks=[row.ranks[0]] * 2)).status is Status.OK
    mixed = void.settle(dataclasses.replace(row, ranks=ranks))
    assert mixed.status is Status.VOID and mixed.reason == "mixed nodes (A, B): no comparable times"


@pytest.mark.parametrize(("seconds", "count"), [
    ([0.05, 0.05, 8.2, 0.05], 1), ([0.05, 0.05, 0.4, 0.05], 0), ([1.0] * 4, 0),
    ([2.0, 2.0, 9.5, 2.0], 1), ([2.0, 2.0, 6.5, 2.0], 0),
])  # fmt: skip
def test_a_step_far_above_the_median_is_a_pause(seconds, count):
    row = cpu_set()["ddp"]
    ranks = [dataclasses.replace(r, step_seconds=seconds, step_usage=None) for r in row.ranks]
    row = dataclasses.replace(row, spec=dataclasses.replace(row.spec, nodes=2), ranks=ranks)
    assert derive.paused_steps(row) == count
    text = pages.render_markdown(build([row], []))
    assert ("Network paused?" in text) is bool(count) is ("network paused?" in text)
