"""Which steps are marked as disturbed: each rule fires for its own cause, and for no other."""

from __future__ import annotations

import dataclasses

import pytest

from harness.report.figures import floor
from harness.report.figures.floor import Step
from harness.report.figures.numbers import numbers
from harness.result import StepUsage
from tests.made.results import cpu_set

# A second on two cores, all of it the run's own work.
QUIET = Step(seconds=1.0, cpu=1.9, forced=12, busy=1.95, cores=2)


@pytest.mark.parametrize(
    ("step", "marked"),
    [
        ({}, False),
        ({"busy": 1.99, "cpu": 1.2}, True),  # others had four tenths of the machine
        ({"busy": 1.4, "cpu": 0.7}, False),  # as much, on cores that the run left idle
        ({"busy": 1.6, "cpu": 1.2}, True),  # its other rank waited meanwhile
        ({"busy": 1.99, "cpu": 1.85}, False),  # less than a tick is nobody's
        ({"busy": 0.0}, False),  # the kernel does not tell
        ({"cores": 0}, False),
    ],
)
def test_others_are_in_the_way_where_they_hold_cores_that_the_run_could_use(step, marked):
    assert floor.others_in_the_way(QUIET._replace(**step)) is marked


@pytest.mark.parametrize(
    ("step", "marked"),
    [
        ({}, False),
        ({"seconds": 1.05, "cpu": 1.3}, False),  # hardly longer: nothing to explain
        ({"seconds": 1.5, "cpu": 2.85}, False),  # longer by as much work of its own
        ({"seconds": 1.5, "cpu": 1.9}, True),  # the same work took longer
        ({"seconds": 1.5, "cpu": 2.85, "forced": 200}, True),  # it span while it waited
        ({"seconds": 1.5, "cpu": 2.85, "forced": 40}, False),
    ],
)
def test_a_step_waited_where_it_is_longer_without_more_work(step, marked):
    assert floor.waited(QUIET._replace(**step), QUIET) is marked


def usage(cpu: list[float], forced: list[int]) -> StepUsage:
    zeros = [0] * len(cpu)
    return StepUsage(
        cpu_seconds=cpu, voluntary_switches=zeros, forced_switches=forced,
        minor_faults=[5, 7, 9], busy_seconds=[0.0] * len(cpu), cores=2,
    )  # fmt: skip


def two_ranks():
    """Three steps of two ranks; in the second the other rank waits for the slow one."""
    row = cpu_set()["ddp"]
    seconds = [[1.0, 1.4, 1.0], [0.9, 2.0, 1.0]]
    uses = [usage([0.9, 0.5, 0.9], [5, 5, 5]), usage([0.9, 0.9, 0.95], [5, 90, 5])]
    ranks = [
        dataclasses.replace(rank, step_seconds=s, step_usage=u)
        for rank, s, u in zip(row.ranks, seconds, uses, strict=True)
    ]
    return dataclasses.replace(row, ranks=ranks)


def test_the_steps_of_all_ranks_are_judged_together():
    row = two_ranks()
    assert floor.disturbed(row) == [False, True, False]
    assert floor.cpu_seconds(row) == pytest.approx([1.8, 1.4, 1.85])
    assert floor.minor_faults(row) == [10, 14, 18]
    found = numbers([row, row])
    assert found.disturbed_steps == 2 and found.timed_steps == 6
    assert found.step_cpu_seconds_median == pytest.approx(1.8)


def test_a_result_older_than_the_counts_is_not_called_quiet():
    row = two_ranks()
    old = [dataclasses.replace(row.ranks[0], step_usage=None), row.ranks[1]]
    older = dataclasses.replace(row, ranks=old)
    assert floor.disturbed(older) is None
    assert (
        numbers([older]).disturbed_steps is None and numbers([row, older]).disturbed_steps is None
    )
