"""The table of effects: which rows it pairs."""

from __future__ import annotations

import dataclasses

from harness.report import build
from harness.report.data.effects import effects
from harness.report.data.rows import SuiteHead
from tests.made.results import done, gpu_set

PLAIN = (30, 2, 60, 30, 160, 40)
"""MiB of parameters, gradients, optimizer state, average, activations, workspace: half of the peak
is activations."""


def paired(*results):
    """(part, what it took the place of, base) of every pair."""
    group = build(list(results), [], SuiteHead(reference="ddp")).groups[0]
    return [(e.part, e.replaced, e.base.label) for e in effects(group)]


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
