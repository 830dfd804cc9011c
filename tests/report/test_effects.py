"""The table of effects: which rows it pairs, and why it says that a part showed or did not."""

from __future__ import annotations

import dataclasses

import pytest

from harness.report import build
from harness.report.data.effect_reasons import why
from harness.report.data.effects import effects
from harness.report.data.rows import SuiteHead
from harness.report.rendering.tables import group_grids
from tests.made.results import MIB, cpu_set, done, gpu_set

PLAIN = (30, 2, 60, 30, 160, 40)
"""MiB of parameters, gradients, optimizer state, average, activations, workspace: half of the peak
is activations."""
WEIGHTS = (130, 120, 250, 130, 30, 20)
"""The same where hardly any of it is."""


def paired(*results):
    """(part, what it took the place of, base) of every pair."""
    group = build(list(results), [], SuiteHead(reference="ddp")).groups[0]
    return [(e.part, e.replaced, e.base.label) for e in effects(group)]


def reason(after, before=PLAIN, *, more=lambda result: None) -> str:
    """Why adding checkpoint took plain training from ``before`` to ``after``."""
    rows = [done("ddp", 1.0, before), done("ddp+checkpoint", 1.2, after)]
    for result in rows:
        # The made meter's peak lies above the tensors; here it is to count them alone.
        for rank in result.ranks:
            held = rank.categories.total
            rank.phases = {
                p: dataclasses.replace(k, allocated=held) for p, k in rank.phases.items()
            }
    more(rows[1])
    (effect,) = effects(build(rows, [], SuiteHead(reference="ddp")).groups[0])
    return why(effect)


# ---- which rows are paired ----


def test_rows_that_differ_in_one_part_are_paired():
    found = paired(*gpu_set().values())
    assert ("bf16", "", "ddp") in found and ("checkpoint", "", "ddp") in found
    assert ("zero2", "ddp", "ddp+bf16") in found
    assert len(found) == 4, "the offloaded row's sharding is held against zero2's"


def test_effects_are_not_of_other_processes():
    results = [done("ddp", 1.0, PLAIN), done("ddp+checkpoint", 1.0, PLAIN)]
    assert len(paired(*results)) == 1
    results[0].spec = dataclasses.replace(results[0].spec, processes=1)
    assert paired(*results) == []


def test_a_stage_is_held_against_the_one_below_and_an_offload_against_its_own_stage():
    rows = [
        *("ddp", "zero1", "zero2", "zero3"),
        *("zero2_offload", "zero3_offload", "zero3+checkpoint"),
    ]
    assert [pair[:2] for pair in paired(*(done(name, 1.0, PLAIN) for name in rows))] == [
        ("zero1", "ddp"),
        ("zero2", "zero1"),
        ("zero2_offload", "zero2"),
        ("zero3", "zero2"),
        ("zero3_offload", "zero3"),
        ("checkpoint", ""),
    ]


def test_what_no_stage_lies_below_is_held_against_the_reference():
    rows = [done(name, 1.0, PLAIN) for name in ("ddp", "zero3_offload", "fsdp2")]
    assert paired(*rows) == [
        ("fsdp2", "ddp", "ddp"),
        ("zero3_offload", "ddp", "ddp"),
    ]


# ---- why ----


def test_a_saving_says_what_the_peak_was_made_of_before_and_after():
    said = reason((30, 25, 60, 30, 10, 40))
    assert said == "saves: activations 50 % -> 3 %, gradients 1 % -> 8 %"


def test_what_does_not_show_says_what_the_peak_is_instead():
    said = reason((130, 145, 250, 130, 5, 20), WEIGHTS)
    assert said == (
        "did not show: the peak is optimizer state 37 %, parameters 19 %, EMA 19 %; "
        "what changed cancels: gradients 18 % -> 21 %, activations 4 % -> 1 %; "
        "away from the peak activations and temporaries went 50.00 -> 25.00 MiB at most"
    )


def test_what_does_nothing_says_nothing_more():
    assert reason(PLAIN) == (
        "did not show: the peak is activations 50 %, optimizer state 19 %, workspace 12 %"
    )


def test_what_it_saves_elsewhere_than_at_the_peak_is_said():
    """The peak is all of the state; the activations that are saved lived at another instant."""

    def earlier(result):
        for rank in result.ranks:
            rank.categories.beyond_state = 10 * MIB

    said = reason(PLAIN, more=earlier)
    assert said.endswith("away from the peak activations and temporaries went 200.0 -> 10.0 MiB "
                         "at most")  # fmt: skip


def test_a_cost_and_a_peak_that_moved():
    def in_optimizer(result):
        for rank in result.ranks:
            rank.categories.phase = "optimizer"

    said = reason((30, 32, 60, 30, 0, 200), more=in_optimizer)
    assert said == (
        "costs: activations 50 % -> 0 %, workspace 12 % -> 62 %, gradients 1 % -> 10 %; "
        "the peak moved from backward to optimizer"
    )


def test_where_the_meter_says_another_change_than_the_tensors_both_are_told():
    def heap(result):
        for rank in result.ranks:
            for peak in rank.phases.values():
                peak.allocated += 150 * MIB

    said = reason((30, 25, 60, 30, 10, 40), more=heap)
    assert said.endswith("; the step's tensors alone: -39.4 %")


def test_a_row_that_was_not_traced_has_no_reason():
    def untraced(result):
        result.ranks = [dataclasses.replace(rank, categories=None) for rank in result.ranks]

    assert reason(PLAIN, more=untraced) is None


@pytest.mark.parametrize("made", [cpu_set, gpu_set])
def test_every_pair_of_traced_rows_has_a_reason_in_the_report(made):
    grid = group_grids(build(list(made().values()), [], SuiteHead(reference="ddp")).groups[0])
    assert grid["effects"].heads[-1] == "Why"
    assert all(line[-1].startswith(("saves", "costs", "did not")) for line in
               grid["effects"].lines)  # fmt: skip
