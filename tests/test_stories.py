"""Stories of suites: the verdict that known numbers must give, and rows that are not there."""

from __future__ import annotations

import dataclasses
import re

import pytest
from test_report_data import done, gone

from harness import matrix, suite_file
from harness.report import build, claims, stories, units
from harness.report.claims import CLAIMS, DEEP, DEPTHS, LARGE, SMALL, TOKENS, Verdict
from harness.report.rows import Suite
from harness.result import Status
from strategies import parse

STATE = 120.0
"""MiB of parameters, gradients, optimizer state and average, in the rows built here."""


def row(recipe: str, beyond: float, *, state: float = STATE, evidence: dict | None = None, **spec):
    """A measured row of so many MiB of state, and MiB beyond it."""
    parts = (state * 0.2, state * 0.2, state * 0.4, state * 0.2, beyond, 0.0)
    spec = {"global_batch": LARGE, "processes": 1, **spec}
    result = done(parse(recipe).text, 1.0, parts, **spec)
    result.evidence |= evidence or {}
    return result


def finding(words: str, *results):
    """What the one claim that contains ``words`` finds in these rows."""
    (claim,) = [c for c in CLAIMS if words in c.says]
    report = build(list(results), [], Suite(reference="single"))
    return dict((c.says, f) for c, f in claims.judge(report))[claim.says]


def two_batches(recipe: str, large: float, small: float, state: float = STATE):
    """Rows of ``single`` (1000 and 125 MiB beyond the state) and of ``recipe``."""
    return [
        row("single", 1000.0),
        row("single", 125.0, global_batch=SMALL),
        row(recipe, large, state=state),
        row(recipe, small, state=state, global_batch=SMALL),
    ]


@pytest.mark.parametrize(
    ("large", "small", "state", "wanted"),
    [
        (300.0, 30.0, STATE, Verdict.HOLDS),
        (300.0, 100.0, STATE, Verdict.ONLY),
        (990.0, 124.0, STATE, Verdict.NOT),
        (1000.0, 30.0, STATE, Verdict.ONLY),
    ],
)
def test_a_saving_is_judged_with_a_large_and_a_small_batch(large, small, state, wanted):
    found = finding(
        "gradient checkpointing", *two_batches("single+checkpoint", large, small, state)
    )
    assert found.verdict is wanted
    assert (wanted is Verdict.ONLY) == bool(found.condition)
    saved = round(100 * (1 - (large + state) / 1120))
    assert (f"-{saved}%" if saved else "unchanged") in found.numbers or saved == 1


def test_half_is_half():
    almost = two_batches("single+bf16", 500.0, 62.0, STATE)
    whole = two_batches("single+bf16", 490.0, 60.0, STATE / 2)
    assert finding("mixed precision halves", *almost).verdict is Verdict.NOT
    assert finding("mixed precision halves", *whole).verdict is Verdict.HOLDS


def test_masks_cost_and_removed_parts_save():
    masks, removed = row("single+prune", 1030.0), row("single+prune_structured", 700.0, state=90.0)
    found = finding("pruning", row("single", 1000.0), masks, removed)
    assert found.verdict is Verdict.ONLY and "really removed" in found.condition
    assert "+3% with masks" in found.numbers and "-29% with parts removed" in found.numbers


def test_accumulation_and_batches():
    rows = [row("single", 1000.0), row("single+accumulate:steps=4", 600.0)]
    assert finding("gradient accumulation", *rows).verdict is Verdict.HOLDS
    rows = [row("single", 1000.0), row("single", 125.0, global_batch=SMALL)]
    assert finding("smaller batches", *rows).verdict is Verdict.HOLDS
    filled = finding("activations, not weights", *rows)
    assert filled.verdict is Verdict.HOLDS and "89%" in filled.numbers and "51%" in filled.numbers
    rows[1] = row("single", 60.0, global_batch=SMALL)
    assert finding("activations, not weights", *rows).verdict is Verdict.ONLY


def test_a_graph_that_is_kept():
    base, retain = row("single", 1000.0), row("single+backward:call=retain_graph", 1100.0)
    grad = row("single+backward:call=autograd_grad", 1001.0)
    found = finding("retain_graph=True", base, retain, grad)
    assert (found.verdict, found.condition) == (Verdict.ONLY, "it is retain_graph")


def test_compression_is_of_the_wire_and_not_of_memory():
    facts = {"wire_bytes": 50, "dense_bytes": 100}
    wire = {"compress": facts, "topk": facts}
    kinds = [
        row(f"ddp+{part}", 1000.0, evidence=wire, processes=2)
        for part in ("compress:kind=fp16", "compress:kind=powersgd", "topk")
    ]
    found = finding("compressing or sparsifying", row("ddp", 1000.0, processes=2), *kinds)
    assert found.verdict is Verdict.NOT and "on the wire x0.5" in found.numbers


@pytest.mark.parametrize(("power", "wanted"), [(0.5, Verdict.HOLDS), (0.9, Verdict.NOT)])
def test_the_power_of_depth(power, wanted):
    facts = {"checkpoint": {"block_forwards": 2.0}}
    rows = [row("single", 1000.0)]
    for depth in DEPTHS:
        spec = {"model": DEEP.format(depth)}
        rows.append(row("single", 10.0 * depth, **spec))
        root = row("single+checkpoint:every=sqrt", 10.0 * depth**power, evidence=facts, **spec)
        rows.append(root)
    found = finding("sqrt(L)", *rows)
    assert found.verdict is wanted
    assert f"power 1.00 plain, {power:.2f} with sqrt" in found.numbers


def test_the_power_of_tokens():
    rows = [row("single", 1000.0)]
    for model, tokens in TOKENS.items():
        rows.append(row("single", tokens / 8, model=model, global_batch=2))
        rows.append(row("single+attend", tokens**2 / 1024, model=model, global_batch=2))
    found = finding("linear in the number of tokens", *rows)
    assert found.verdict is Verdict.HOLDS and "power 2.00 with the full" in found.numbers
    assert ", 1.00 with torch's fused" in found.numbers


def test_what_was_not_measured_stays_open_and_says_why():
    missing = gone("single+paged_adam8bit", Status.UNSUPPORTED, "paging needs CUDA", "use a GPU",
                   processes=1)  # fmt: skip
    found = finding("paged", row("single", 1000.0), row("single+adam8bit", 900.0), missing)
    assert found.verdict is Verdict.OPEN
    assert found.numbers == "single+paged_adam8bit is unsupported: paging needs CUDA"
    nothing = finding("LoRA", row("single", 1000.0))
    assert nothing.numbers == "single+lora is not among the results"


def test_no_claim_without_its_rows_in_the_suite():
    """Every recipe that a rule asks for is a row of the suite, on both devices."""
    for device in ("cpu", "cuda"):
        suite = suite_file.load_suite("claims", device)
        recipes = {spec.recipe for spec in matrix.specs(suite, {}, gpus=2, gpu_bytes=2**36)}
        report = build([row("single", 1000.0)], [], Suite(reference="single"))
        for claim, found in claims.judge(report):
            if found.verdict is Verdict.OPEN:
                (name,) = re.findall(r"^(\S+) is not among", found.numbers)
                assert name in recipes, claim.says


def test_the_ladder_compares_each_rung_with_the_one_above():
    order = ("single", "single+bf16", "single+bf16+checkpoint", "single+bf16+lora")
    results = [
        row("single", 880.0),
        row("single+bf16", 380.0, parity="by design"),
        gone("single+bf16+checkpoint", Status.GPU_OOM, "no room", None, processes=1),
        row("single+bf16+lora", 130.0, parity="by design"),
    ]
    suite = Suite(reference="single", story="ladder", order=order)
    (grid,) = stories.told(build(results, [], suite))
    assert [line[0] for line in grid.lines] == [
        "single", "+ bf16", "+ single+bf16+checkpoint", "+ lora",
    ]  # fmt: skip
    assert grid.lines[1][2:4] == ["-50.0 %", "-50.0 %"]
    assert grid.lines[3][2:4] == ["-50.0 %", "-75.0 %"]
    assert "single+bf16+checkpoint is gpu_oom: no room" in grid.lines[2]


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
    suite = Suite(reference="single", story="each", order=order)
    (grid,) = stories.told(build(results, [], suite))
    assert [line[0] for line in grid.lines] == list(order)
    assert [line[4] for line in grid.lines] == [units.NONE, "-50.0 %", units.NONE, units.NONE]
    assert float(grid.lines[2][6]) > 0, "speed is known of a row that was not traced"
    assert grid.lines[3][7] == "single+fp8 is unsupported: no such unit"


def test_the_published_table_stands_beside_the_measured_one():
    suite = suite_file.load_suite("fast_dit_table", "cpu")
    order = tuple(r.recipe for r in suite.rows)
    results = [row(r, 100.0, data="vae_small:256") for r in order[:3]]
    results.append(row(order[3], 50.0, data="synthetic"))
    told = Suite(reference=order[0], story="fast_dit", order=order)
    (grid,) = stories.told(build(results, [], told))
    assert [line[3:5] for line in grid.lines] == [
        ["out of memory", "out of memory"], ["0.43", "44045"], ["0.56", "40461"], ["0.84", "27485"],
    ]  # fmt: skip
    assert [line[2] for line in grid.lines] == ["no", "no", "no", "yes"]
    assert len({line[6] for line in grid.lines[:3]}) == 1 and grid.lines[3][6] != grid.lines[2][6]


@pytest.mark.parametrize("name", sorted(suite_file.known_suites()))
def test_a_suites_story_is_known(name):
    suite = suite_file.load_suite(name, "cpu")
    assert suite.story in ("", *stories.STORIES)
    assert dataclasses.asdict(suite)["name"] == name


def test_the_order_of_files_decides_nothing():
    """The reference recipe is in several groups; the largest is the suite's own."""
    rows = [*two_batches("single+lora", 300.0, 30.0), row("single+checkpoint", 500.0)]
    rows.append(row("single", 5.0, model=DEEP.format(4)))
    said = [
        [(claim.says, f.verdict, f.numbers) for claim, f in claims.judge(report)]
        for order in (rows, rows[::-1])
        for report in [build(list(order), [], Suite(reference="single"))]
    ]
    assert said[0] == said[1] and any("LoRA" in s and v is Verdict.ONLY for s, v, _ in said[0])


def test_depth_tells_memory_and_counted_work_of_each_regime():
    nothing, rows = "single+checkpoint:keep=nothing", []
    for depth in (4, 16):
        spec = {"model": DEEP.format(depth)}
        facts = {"checkpoint": {"block_forwards": (depth + 3) / 2}}
        rows += [row("single", 10.0 * depth, **spec), row(nothing, 14.0, evidence=facts, **spec)]
    suite = Suite(reference="single", story="depth", order=("single", nothing))
    report = build(rows, [], suite)
    (grid,) = stories.told(report)
    plain, none = (dict(zip(grid.heads, line, strict=True)) for line in grid.lines)
    assert plain["Added by a block MiB"] == "10.00" and plain["Memory ~ L^"] == "1.00"
    assert plain["Forwards a block"] == "1.00" and none["Forwards a block"] == "3.50 to 9.50"
    assert none["Memory ~ L^"] == "0.00" and none["Forward work ~ L^"] == "1.72"
    pictures, keys = stories.drawn(report)
    assert len(pictures) == 3 and [name for name, *_ in keys] == ["single", nothing]
    assert all(f">{depth}</text>" in picture for *_, picture in pictures for depth in (4, 16))
