"""The table of effects: which rows it pairs, and why it says that a part showed or did not."""

from __future__ import annotations

import dataclasses

from harness.report import build
from harness.report.data.effects import effects, why
from harness.report.data.rows import SuiteHead
from tests.made.results import MIB, done, gpu_set

PLAIN = (30, 2, 60, 30, 160, 40)
"""MiB of parameters, gradients, optimizer state, average, activations, workspace: half of the peak
is activations."""


def paired(*results):
    """(part, what it took the place of, base) of every pair."""
    group = build(list(results), [], SuiteHead(reference="ddp")).groups[0]
    return [(e.part, e.replaced, e.base.label) for e in effects(group)]


def reason(after, before=PLAIN, *, more=lambda result: None, device="cpu") -> str:
    """Why adding checkpoint took plain training from ``before`` to ``after``."""
    pairs = {"ddp": before, "ddp+checkpoint": after}
    rows = [done(recipe, 1.0, parts, device=device) for recipe, parts in pairs.items()]
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


def test_where_the_meter_says_another_change_than_the_tensors_both_are_told():
    def heap(result):
        for rank in result.ranks:
            for peak in rank.phases.values():
                peak.allocated += 150 * MIB

    said = reason((30, 25, 60, 30, 10, 40), more=heap, device="cuda")
    assert said.endswith("; the step's tensors alone: -39.4 %")
    assert "alone" not in reason((30, 25, 60, 30, 10, 40), more=heap), "there they are the peak"


def test_a_row_that_was_not_traced_has_no_reason():
    def untraced(result):
        result.ranks = [dataclasses.replace(rank, categories=None) for rank in result.ranks]

    assert reason(PLAIN, more=untraced) is None
