"""Claims: the verdict that known numbers must give, and rows that are not there."""

from __future__ import annotations

import pytest

from harness.report import build
from harness.report.data import units
from harness.report.data.rows import SuiteHead
from harness.report.stories import claims
from harness.report.stories.claim_rules import BATCHES, DEEP, DEPTHS, LARGE, SMALL, TOKENS
from harness.report.stories.claim_verdicts import HALF, MUCH, Verdict, change
from harness.report.stories.claims import CLAIMS
from harness.result import Status
from harness.suite import file as suite_file
from harness.suite import matrix
from tests.made.results import STATE, gone, row


def finding(words: str, *results):
    """What the one claim that contains ``words`` finds in these rows."""
    (claim,) = [c for c in CLAIMS if words in c.says]
    report = build(list(results), [], SuiteHead(reference="single"))
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
    ("large", "small", "state", "wanted", "said"),
    [
        (300.0, 30.0, STATE, Verdict.HOLDS, "-62%"),
        (300.0, 100.0, STATE, Verdict.ONLY, "-62%"),
        (990.0, 124.0, STATE, Verdict.NOT, "-1%"),
        (1000.0, 30.0, STATE, Verdict.ONLY, "unchanged"),
    ],
)
def test_a_saving_is_judged_with_a_large_and_a_small_batch(large, small, state, wanted, said):
    found = finding(
        "gradient checkpointing", *two_batches("single+checkpoint", large, small, state)
    )
    assert found.verdict is wanted
    assert (wanted is Verdict.ONLY) == bool(found.condition)
    assert f"peak {said} at batch {LARGE}," in found.numbers


@pytest.mark.parametrize(
    ("large", "small", "condition"),
    [
        (1000.0, 60.0, "activations outweigh all else: 89% of the peak (batch {}), not 33% ({})"),
        # The large batch is not so large: nothing may be said to outweigh anything.
        (90.0, 0.0, "activations are 43% of the peak (batch {}), not 0% ({})"),
        (1000.0, 125.0, "activations are 89% of the peak (batch {}), not 51% ({})"),
        (120.12, 0.0, "activations outweigh all else: 50.02% of the peak (batch {}), not 0% ({})"),
    ],
)
def test_a_condition_says_what_the_rows_weighed(large, small, condition):
    plain = [row("single", large), row("single", small, global_batch=SMALL)]
    saves = [row("single+checkpoint", 0.0, state=1.0), row("single+checkpoint", small,
             global_batch=SMALL)]  # fmt: skip
    found = finding("gradient checkpointing", *plain, *saves)
    assert (found.verdict, found.condition) == (Verdict.ONLY, condition.format(LARGE, SMALL))


def test_what_saves_of_the_state_holds_where_activations_do_not_outweigh_it():
    rows = two_batches("single+lora", 1000.0, 0.0, state=0.2 * STATE)
    rows[1] = row("single", 60.0, global_batch=SMALL)
    found = finding("LoRA", *rows)
    assert found.verdict is Verdict.ONLY
    shares = f"33% of the peak (batch {SMALL}), not 89% ({LARGE})"
    assert found.condition == f"activations do not outweigh all else: {shares}"


@pytest.mark.parametrize(
    ("fraction", "limits", "text"),
    [
        (-0.497, (-0.5,), "-49.7%"),
        (-0.4996, (-0.5,), "-49.96%"),
        (-0.5, (-0.5,), "-50%"),
        (-0.497, (-0.45,), "-50%"),
        (0.0204, (0.02,), "+2.04%"),
        (-0.004, (-0.05,), "unchanged"),
    ],
)
def test_a_number_stays_on_its_side_of_a_threshold(fraction, limits, text):
    assert change(fraction, *limits) == text


def test_mixed_precision_is_judged_at_much_and_at_half():
    third = two_batches("single+bf16", 1120 * 0.67 - STATE, 245 * 0.67 - STATE)
    assert MUCH < 0.33 < HALF
    assert finding("mixed precision saves much", *third).verdict is Verdict.HOLDS
    assert finding("mixed precision halves", *third).verdict is Verdict.NOT


def test_pure_bf16_is_judged_with_and_without_the_float32_average():
    """20 bytes a parameter become 12, for 4 of both are the average; without it, 16 become 8."""
    bare, pure = "single+ema:place=none", "single+bf16_pure+ema:place=none"
    rows = two_batches("single+bf16_pure", 600.0, 75.0, state=0.6 * STATE)
    for batch, beyond in ((LARGE, 1000.0), (SMALL, 125.0)):
        rows.append(row(bare, beyond, state=0.8 * STATE, global_batch=batch))
        rows.append(row(pure, beyond / 2, state=0.4 * STATE, global_batch=batch))
    found = finding("pure bf16", *rows)
    assert found.verdict is Verdict.ONLY
    assert found.condition == "no float32 average of the weights is kept"
    assert f"peak -40% at batch {LARGE}, -40% at batch {SMALL}" in found.numbers
    assert f"without one peak -50% at batch {LARGE}, -50% at batch {SMALL}" in found.numbers


def test_half_is_half():
    almost = two_batches("single+bf16", 500.0, 62.0, STATE)
    whole = two_batches("single+bf16", 490.0, 60.0, STATE / 2)
    assert finding("mixed precision halves", *almost).verdict is Verdict.NOT
    assert finding("mixed precision halves", *whole).verdict is Verdict.HOLDS


def test_masks_cost_and_removed_parts_save():
    masks, removed = row("single+prune", 1030.0), row("single+prune_structured", 700.0, state=90.0)
    found = finding("pruning", row("single", 1000.0), masks, removed)
    assert (found.verdict, found.condition) == (Verdict.ONLY, "it is done with parts removed")
    assert "+3% with masks" in found.numbers and "-29% with parts removed" in found.numbers


def test_accumulation_and_batches():
    rows = [row("single", 1000.0), row("single+accumulate:steps=4", 600.0)]
    assert finding("gradient accumulation", *rows).verdict is Verdict.HOLDS
    rows = [row("single", 1000.0), row("single", 125.0, global_batch=SMALL)]
    assert finding("smaller batches", *rows).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("beyond", "wanted", "condition"),
    [
        ((1000.0, 500.0, 125.0), Verdict.HOLDS, ""),
        ((1000.0, 500.0, 60.0), Verdict.ONLY, "the batch is large: 32 or 16, not 2"),
        ((180.0, 90.0, 0.0), Verdict.ONLY, "the batch is large: 32, not 16 or 2"),
        ((90.0, 45.0, 0.0), Verdict.NOT, ""),
    ],
)
def test_activations_fill_the_memory_from_a_batch_on(beyond, wanted, condition):
    sizes = zip(BATCHES, beyond, strict=True)
    rows = [row("single", size, global_batch=batch) for batch, size in sizes]
    found = finding("activations, not weights", *rows)
    assert (found.verdict, found.condition) == (wanted, condition)


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


def on_gpu(result, device_gib: float):
    """A row of a GPU that counts so much as used, whatever torch's allocator saw."""
    result.meter = "cuda"
    for peak in result.ranks[0].phases.values():
        peak.process = int(device_gib * units.GIB)
    return result


def test_pages_are_not_judged_by_what_the_allocator_never_counts():
    """Managed memory is outside the allocator: its peak falls though every page is on the GPU."""
    rows = [row("single", 1000.0), row("single+adam8bit", 1000.0)]
    rows.append(row("single+paged_adam8bit", 500.0))
    found = finding("paged", *(on_gpu(one, 2.5) for one in rows))
    assert found.verdict is Verdict.OPEN and "no page had to leave" in found.numbers
    assert "2.50 GiB in use with pages, 2.50 GiB without" in found.numbers


@pytest.mark.parametrize("survives", [True, False])
def test_pages_avoid_running_out_only_where_the_same_without_them_did(survives):
    full = {"processes": 1, "global_batch": LARGE}
    recipe = "single+paged_adam8bit"
    ran_out = gone(recipe, Status.GPU_OOM, "no room", None, **full)
    pages = row(recipe, 900.0) if survives else ran_out
    rest = gone("single+adam8bit", Status.GPU_OOM, "no room", None, **full)
    found = finding("paged", row("single+sgd", 900.0), rest, pages)
    assert found.verdict is (Verdict.HOLDS if survives else Verdict.NOT)
    assert "single+adam8bit ran out of memory" in found.numbers


def test_what_was_not_measured_stays_open_and_says_why():
    missing = gone("single+paged_adam8bit", Status.UNSUPPORTED, "paging needs CUDA", "use a GPU",
                   processes=1, global_batch=LARGE)  # fmt: skip
    found = finding("paged", row("single", 1000.0), row("single+adam8bit", 900.0), missing)
    assert found.verdict is Verdict.OPEN
    assert found.numbers == "single+paged_adam8bit is unsupported: paging needs CUDA"
    nothing = finding("LoRA", row("single", 1000.0))
    assert nothing.numbers == "single+lora is not among the results"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_claim_without_its_rows_in_the_suite(device):
    """The suite's rows alone decide every claim, but for pages: there both rows fit."""
    suite = suite_file.load_suite("claims", device)
    wire = {"wire_bytes": 50, "dense_bytes": 100}
    facts = {"compress": wire, "topk": wire, "checkpoint": {"block_forwards": 2.0}}
    fields = ("model", "data", "global_batch", "processes", "device")
    rows = [
        row(spec.recipe, 100.0, evidence=facts, **{name: getattr(spec, name) for name in fields})
        for spec in matrix.specs(suite, {}, gpus=2, gpu_bytes=2**36)
    ]
    report = build(rows, [], SuiteHead(reference="single"))
    undecided = [(c.says, f) for c, f in claims.judge(report) if f.verdict is Verdict.OPEN]
    assert [says for says, _ in undecided] == ["paged optimizers avoid running out of memory"]
    assert "both fit" in undecided[0][1].numbers


def test_the_order_of_files_decides_nothing():
    """The reference recipe is in several groups; the largest is the suite's own."""
    rows = [*two_batches("single+lora", 300.0, 30.0), row("single+checkpoint", 500.0)]
    rows.append(row("single", 5.0, model=DEEP.format(4)))
    said = [
        [(claim.says, f.verdict, f.numbers) for claim, f in claims.judge(report)]
        for order in (rows, rows[::-1])
        for report in [build(list(order), [], SuiteHead(reference="single"))]
    ]
    assert said[0] == said[1] and any("LoRA" in s and v is Verdict.ONLY for s, v, _ in said[0])
