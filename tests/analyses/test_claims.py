"""Claims: the verdict that known numbers must give, and rows that are not there."""

from __future__ import annotations

import pytest

from harness.analyses import claims
from harness.analyses.claim_rules import DEEP, DEPTHS, TOKENS
from harness.analyses.claim_sweeps import BATCHES, HALF, LARGE, MUCH, Verdict, change
from harness.analyses.claims import CLAIMS
from harness.report import build
from harness.report.data.lookup import Rows
from harness.report.data.rows import SuiteHead
from harness.report.figures import units
from harness.result import Status
from harness.suite import file as suite_file
from harness.suite import matrix
from tests.made.results import STATE, gone, row


def finding(words: str, *results):
    """What the one claim that contains ``words`` finds in these rows."""
    (claim,) = [c for c in CLAIMS if words in c.says]
    report = build(list(results), [], SuiteHead(reference="single"))
    return dict((c.says, f) for c, f in claims.judged(CLAIMS, Rows(report)))[claim.says]


def plain(batch: int) -> float:
    """MiB that plain training holds beyond its state: 30 a sample."""
    return 30.0 * batch


def over_batches(recipe: str, beyond, state: float = STATE, base: str = "single", **spec):
    """Rows of ``base`` and of ``recipe`` at every batch; ``beyond``: batch -> MiB."""
    rows = [row(base, plain(b), global_batch=b, **spec) for b in BATCHES]
    return rows + [row(recipe, beyond(b), state=state, global_batch=b, **spec) for b in BATCHES]


def test_a_saving_that_begins_between_two_points_says_about_where_and_between_which():
    """Of 120 + 30 b a sixth of 30 b stays: a quarter is saved from b = 2 on, a half from 8 on."""
    rows = over_batches("single+checkpoint", lambda b: plain(b) / 6)
    found = finding("gradient checkpointing", *rows)
    # 25 b = (120 + 30 b) / 4 at b = 120 / 70.
    assert (found.verdict, found.condition) == (
        Verdict.ONLY,
        "from batch 1.71, between 1 (20% activations) and 2 (33% activations), on",
    )
    assert "peak -17% at batch 1, -74% at batch 32" in found.numbers
    assert "limit for large batches -83% (+-0.0)" in found.numbers


def test_a_saving_that_never_comes_does_not_hold_here_and_says_what_it_tends_to():
    found = finding("mixed precision saves much", *over_batches("single+bf16", lambda b: 26.0 * b))
    assert (found.verdict, found.condition) == (Verdict.NOT, "")
    assert found.verdict.value == "does not hold here"
    assert "limit for large batches -13% (+-0.0); speed" in found.numbers


def test_a_saving_at_every_batch_holds_here():
    found = finding("LoRA", *over_batches("single+lora", lambda b: 5.0 * b, state=0.1 * STATE))
    assert (found.verdict, found.condition) == (Verdict.HOLDS, "at every batch from 1 to 32")


def test_a_saving_of_the_state_ends_where_activations_outweigh_it():
    """30 b + 24 of 30 b + 120: half is saved up to b = 2.4, and nothing in the limit."""
    found = finding("LoRA", *over_batches("single+lora", plain, state=0.2 * STATE))
    where = "up to batch 2.4, between 2 (33% activations) and 4 (50% activations)"
    assert (found.verdict, found.condition) == (Verdict.ONLY, where)
    assert "limit for large batches unchanged (+-0.0); speed" in found.numbers


def test_a_noisy_sweep_says_every_stretch_and_how_far_its_limit_is_known():
    kept = {1: 30.0, 2: 5.0, 4: 120.0, 8: 40.0, 16: 80.0, 32: 480.0}
    found = finding("gradient checkpointing", *over_batches("single+checkpoint", kept.get))
    assert found.verdict is Verdict.ONLY
    assert found.condition == (
        "from batch 1.79, between 1 (20% activations) and 2 (33% activations), "
        "up to batch 2.29, between 2 (33% activations) and 4 (50% activations), "
        "and from batch 5.41, between 4 (50% activations) and 8 (67% activations), on"
    )
    # 1 - 400 / 480 from the last two, 1 - 40 / 240 from the pair before.
    assert "limit for large batches -17% (+-66.7)" in found.numbers


def test_little_to_medium_ends_where_a_half_begins():
    """Of a quarter of the micro batch: 22.5 b of 120 + 30 b are saved, 5 % from b = 0.3 on, a half
    (45 %) from b = 6 on."""
    found = finding(
        "gradient accumulation",
        *over_batches("single+accumulate:steps=4", lambda b: plain(b) / 4),
    )
    where = "up to batch 6, between 4 (50% activations) and 8 (67% activations)"
    assert (found.verdict, found.condition) == (Verdict.ONLY, where)
    assert "limit for large batches -75% (+-0.0)" in found.numbers
    more = over_batches("single+accumulate:steps=4", lambda b: 0.2 * plain(b), 0.2 * STATE)
    found = finding("gradient accumulation", *more)
    assert (found.verdict, found.condition) == (Verdict.NOT, "as it saves more")
    less = over_batches("single+accumulate:steps=4", lambda b: 18.0 * b)
    assert finding("gradient accumulation", *less).condition == "at every batch from 1 to 32"


def test_a_batch_that_ran_out_of_memory_is_left_out_and_named():
    rows = [
        r
        for r in over_batches("single+checkpoint", lambda b: plain(b) / 6)
        if r.spec.recipe != "single" or r.spec.global_batch != LARGE
    ]
    rows.append(gone("single", Status.GPU_OOM, "no room", None, processes=1, global_batch=LARGE))
    found = finding("gradient checkpointing", *rows)
    assert found.verdict is Verdict.ONLY and "-67% at batch 16" in found.numbers
    assert "batch 32 is missing: single is gpu_oom: no room" in found.numbers


def test_one_batch_alone_is_said_to_be_one():
    rows = [row("single", 1000.0), row("single+checkpoint", 100.0)]
    found = finding("gradient checkpointing", *rows)
    assert (found.verdict, found.condition) == (
        Verdict.HOLDS, "at batch 32, the one measured",
    )  # fmt: skip
    assert "limit" not in found.numbers


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
    third = over_batches("single+bf16", lambda b: 0.67 * plain(b), state=0.67 * STATE)
    assert MUCH < 0.33 < HALF
    assert finding("mixed precision saves much", *third).verdict is Verdict.HOLDS
    assert finding("mixed precision halves", *third).verdict is Verdict.NOT


def test_pure_bf16_is_judged_with_and_without_the_float32_average():
    """20 bytes a parameter become 12, for 4 of both are the average; without it, 16 become 8."""
    bare, pure = "single+ema:place=none", "single+bf16_pure+ema:place=none"
    rows = over_batches("single+bf16_pure", lambda b: 0.6 * plain(b), state=0.6 * STATE)
    for batch in BATCHES:
        rows.append(row(bare, plain(batch), state=0.8 * STATE, global_batch=batch))
        rows.append(row(pure, plain(batch) / 2, state=0.4 * STATE, global_batch=batch))
    found = finding("pure bf16", *rows)
    assert found.verdict is Verdict.ONLY
    no_average = "where no float32 average of the weights is kept"
    assert found.condition == f"{no_average}, at every batch from 1 to 32"
    assert "peak -40% at batch 1, -40% at batch 32" in found.numbers
    assert "without one peak -50% at batch 1, -50% at batch 32" in found.numbers


def test_half_is_half():
    almost = over_batches("single+bf16", lambda b: 0.56 * plain(b), 0.56 * STATE)
    whole = over_batches("single+bf16", lambda b: plain(b) / 2, STATE / 2)
    assert finding("mixed precision halves", *almost).verdict is Verdict.NOT
    assert finding("mixed precision halves", *whole).verdict is Verdict.HOLDS


def test_masks_cost_and_removed_parts_save():
    rows = over_batches("single+prune", lambda b: plain(b) + 6.0)
    rows += over_batches("single+prune_structured", lambda b: 0.6 * plain(b), 0.6 * STATE)[6:]
    found = finding("pruning", *rows)
    assert found.verdict is Verdict.ONLY
    assert found.condition == "with parts removed at every batch from 1 to 32"
    assert "masks: peak +4% at batch 1" in found.numbers
    assert "parts removed: peak -40% at batch 1" in found.numbers


def test_half_a_batch_saves_ever_more_of_the_peak_but_no_more_than_half():
    rows = [row("single", plain(b), global_batch=b) for b in BATCHES]
    found = finding("smaller batches", *rows)
    # 15 b of 120 + 30 b: a twentieth is saved from b = 120 / 270 on.
    assert (found.verdict, found.condition) == (Verdict.HOLDS, "at every batch from 2 to 32")
    assert "half of a batch: peak -17% at batch 2, -44% at batch 32" in found.numbers
    assert "limit for large batches -50% (+-0.0)" in found.numbers


@pytest.mark.parametrize(
    ("a_sample", "wanted", "condition"),
    [
        (130.0, Verdict.HOLDS, "at every batch from 1 to 32"),
        (30.0, Verdict.ONLY, "from batch 4, 4 (50% activations), on"),
        (
            20.0,
            Verdict.ONLY,
            "from batch 6, between 4 (40% activations) and 8 (57% activations), on",
        ),
        (3.0, Verdict.NOT, ""),
    ],
)
def test_activations_fill_the_memory_from_a_batch_on(a_sample, wanted, condition):
    rows = [row("single", a_sample * b, global_batch=b) for b in BATCHES]
    found = finding("activations, not weights", *rows)
    assert (found.verdict, found.condition) == (wanted, condition)


def test_a_graph_that_is_kept():
    rows = over_batches("single+backward:call=retain_graph", lambda b: 1.2 * plain(b))
    rows += over_batches("single+backward:call=autograd_grad", lambda b: plain(b) + 0.1)[6:]
    found = finding("retain_graph=True", *rows)
    assert found.verdict is Verdict.ONLY
    assert found.condition == "of retain_graph at every batch from 1 to 32"


def test_compression_is_of_the_wire_and_not_of_memory():
    facts = {"wire_bytes": 50, "dense_bytes": 100}
    wire = {"compress": facts, "topk": facts}
    rows = [row("ddp", plain(b), processes=2, global_batch=b) for b in BATCHES]
    for part in ("compress:kind=fp16", "compress:kind=powersgd", "topk"):
        rows += [row(f"ddp+{part}", plain(b), evidence=wire, processes=2, global_batch=b)
                 for b in BATCHES]  # fmt: skip
    found = finding("compressing or sparsifying", *rows)
    assert found.verdict is Verdict.NOT and "topk x0.5" in found.numbers


@pytest.mark.parametrize(
    ("sizes", "wanted", "said"),
    [
        ([10.0 * d**0.5 for d in DEPTHS], Verdict.HOLDS, "0.50 +- "),
        ([10.0 * d**0.9 for d in DEPTHS], Verdict.NOT, "0.90 +- "),
        # Two ends alone would say 0.69; the points between deny that it is known so well.
        ([10.0, 50.0, 12.0, 60.0, 45.5], Verdict.NEAR, "0.6"),
        # A root first and a line at last: the fit alone would say that it holds.
        ([30.0, 34.0, 39.0, 46.0, 66.0], Verdict.NEAR, "0.33 +- "),
    ],
)
def test_the_power_of_depth(sizes, wanted, said):
    facts = {"checkpoint": {"block_forwards": 2.0}}
    rows = [row("single", 1000.0)]
    for depth, size in zip(DEPTHS, sizes, strict=True):
        spec = {"model": DEEP.format(depth)}
        rows.append(row("single", 10.0 * depth, **spec))
        rows.append(row("single+checkpoint:every=sqrt", size, evidence=facts, **spec))
    found = finding("sqrt(L)", *rows)
    assert found.verdict is wanted, found
    assert "power 1.00 +- " in found.numbers and f", {said}" in found.numbers


def token_rows(naive: float, fused: float):
    """Rows whose memory beyond the state grows with tokens to these powers."""
    rows = [row("single", 1000.0)]
    for (model, data), tokens in TOKENS.items():
        spec = {"model": model, "data": data, "global_batch": 2}
        rows.append(row("single", tokens**fused / 8, **spec))
        rows.append(row("single+attend", tokens**naive / 1024, **spec))
    return rows


@pytest.mark.parametrize(("fused", "wanted"), [(1.0, Verdict.HOLDS), (1.3, Verdict.NOT)])
def test_the_power_of_tokens(fused, wanted):
    found = finding("linear in the number of tokens", *token_rows(2.0, fused))
    assert found.verdict is wanted and "power 2.00 +- " in found.numbers
    assert f", {fused:.2f} +- " in found.numbers


def test_from_how_many_tokens_much_is_saved():
    """120 MiB of state; plain against square: 128 against 1024 MiB beyond it at most."""
    found = finding("linear in the number of tokens", *token_rows(2.0, 1.0))
    # 120 + 18 against 120 + 20.25 at 144, 120 + 32 against 120 + 64 at 256, 192 against 444 at 576.
    assert "25% of the peak saved from between 256 and 576 tokens on" in found.numbers
    same = finding("linear in the number of tokens", *token_rows(1.0, 1.0))
    assert "25% of the peak saved nowhere up to 1024 tokens" in same.numbers


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
    undecided = [
        (c.says, f) for c, f in claims.judged(CLAIMS, Rows(report)) if f.verdict is Verdict.OPEN
    ]
    assert [says for says, _ in undecided] == ["paged optimizers avoid running out of memory"]
    assert "both fit" in undecided[0][1].numbers


def test_the_order_of_files_decides_nothing():
    """The reference recipe is in several groups; the largest is the suite's own."""
    rows = over_batches("single+lora", plain, state=0.2 * STATE)
    rows.append(row("single+checkpoint", 500.0))
    rows.append(row("single", 5.0, model=DEEP.format(4)))
    said = [
        [(claim.says, f.verdict, f.numbers) for claim, f in claims.judged(CLAIMS, Rows(report))]
        for order in (rows, rows[::-1])
        for report in [build(list(order), [], SuiteHead(reference="single"))]
    ]
    assert said[0] == said[1] and any("LoRA" in s and v is Verdict.ONLY for s, v, _ in said[0])
