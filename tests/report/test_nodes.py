"""Rows on several nodes in a report: the network, a pause, whose cores a step's rest was."""

from __future__ import annotations

import dataclasses

import pytest

from harness.report import build
from harness.report.figures import derive, floor
from harness.report.rendering import markdown
from harness.result import Wire
from tests.made.results import cpu_set

WIRE = Wire(backend="gloo", latency_seconds=2e-4, bandwidth=1.25e9, size_bytes=1 << 26)


def on_two(name: str = "ddp", seconds: list[float] | None = None):
    """A made row as if on two nodes; ``seconds`` of its timed steps."""
    row = cpu_set()[name]
    spec = dataclasses.replace(row.spec, nodes=2)
    ranks = row.ranks
    if seconds:
        ranks = [dataclasses.replace(r, step_seconds=seconds, step_usage=None) for r in ranks]
    return dataclasses.replace(row, spec=spec, ranks=ranks, wire=WIRE)


def test_the_network_is_stated_with_the_rows():
    text = markdown.render(build([on_two()], []))
    assert "On 2 nodes; between them 1.25 GB/s, 0.2 ms an all-reduce (gloo)." in text
    alone = markdown.render(build([cpu_set()["ddp"]], []))
    assert "between them" not in alone


PAUSED = [0.05, 0.05, 8.2, 0.05]


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        (PAUSED, 1),
        ([0.05, 0.05, 0.4, 0.05], 0),
        ([1.0] * 4, 0),
        ([2.0, 2.0, 9.5, 2.0], 1),
        ([2.0, 2.0, 6.5, 2.0], 0),
    ],
)
def test_a_step_far_above_the_median_is_a_pause(seconds, count):
    row = on_two(seconds=seconds)
    assert derive.paused_steps(row) == count
    text = markdown.render(build([row], []))
    assert ("Network paused?" in text) is bool(count) is ("network paused?" in text)


def test_one_machine_has_no_network_to_pause():
    row = on_two(seconds=PAUSED)
    row = dataclasses.replace(row, spec=dataclasses.replace(row.spec, nodes=1))
    assert derive.paused_steps(row) == 0


def test_rows_of_one_recipe_on_one_and_two_nodes_are_told_apart():
    report = build([on_two(), cpu_set()["ddp"]], [])
    (group,) = report.groups
    assert {row.label for row in group.rows} == {"ddp x2 on 2 nodes", "ddp x2"}


def test_the_work_of_another_node_is_not_on_this_ones_cores():
    """Each node has two cores and one rank; on this one others hold one of them."""
    row = on_two()
    one = [r.step_usage for r in row.ranks]
    busy = [
        dataclasses.replace(
            use,
            cores=2,
            cpu_seconds=[s for s in row.ranks[0].step_seconds],
            busy_seconds=[2 * s for s in row.ranks[0].step_seconds],
        )
        for use in one
    ]
    ranks = [
        dataclasses.replace(r, step_seconds=row.ranks[0].step_seconds, step_usage=u)
        for r, u in zip(row.ranks, busy, strict=True)
    ]
    apart = dataclasses.replace(row, ranks=ranks)
    together = dataclasses.replace(apart, spec=dataclasses.replace(row.spec, nodes=1))
    assert all(floor.disturbed(apart)) and not any(floor.disturbed(together))
