"""Prediction without torch's help: the allocator's rules, fits, plans and bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.json_files import BadFile
from harness.memory.record import (
    CATEGORIES,
    Instant,
    Record,
    Storage,
    as_measured,
    peak,
    phase_peaks,
)
from harness.planner import overhead, pool, uncertainty, verdict
from harness.planner import pool as workers
from harness.planner.plan.answer import answer, check_line
from harness.planner.plan.table import notes, short_notes
from harness.planner.speed import rates, roofline
from harness.planner.tracing.allocator import Allocator, replay
from harness.prediction import Prediction, Work, kept, load
from harness.resolve import resolve
from harness.spec import Spec
from harness.system import cards
from strategies import CATALOG, parse
from strategies.base import pinned_block
from strategies.inventory import AllocationScope
from tests.made.predictions import GIB, MIB, asked, prediction
from tests.made.publics import miniature

# ---- the allocator ----

# sizes allocated in order -> (allocated, reserved), by hand from the rules in allocator.py
BY_HAND = {
    "one byte takes 512 of a 2 MiB segment": ([1], (512, 2 * MIB)),
    "1 MiB is still small": ([MIB], (MIB, 2 * MIB)),
    "two of 1 MiB share a segment": ([MIB, MIB], (2 * MIB, 2 * MIB)),
    "above 1 MiB a 20 MiB segment": ([MIB + 1], (MIB + 512, 20 * MIB)),
    "10 MiB has a segment of its own": ([10 * MIB], (10 * MIB, 10 * MIB)),
    "large ones round up to 2 MiB, and keep the rest": ([21 * MIB], (22 * MIB, 22 * MIB)),
    "a rest above 1 MiB is split off": ([18 * MIB // 2, 8 * MIB], (17 * MIB, 20 * MIB)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_segments_by_hand(name):
    sizes, expected = BY_HAND[name]
    used = replay([(1, i, size) for i, size in enumerate(sizes)])
    assert (used.allocated, used.reserved) == expected


def test_freed_neighbours_merge_and_are_found_again():
    a = Allocator()
    first, second, third = (a.allocate(4 * MIB) for _ in range(3))
    assert a.reserved == 20 * MIB
    a.release(first)
    a.release(third)
    a.release(second)
    a.allocate(19 * MIB)  # the whole segment again; the rest of 1 MiB stays with it
    assert a.reserved == 20 * MIB and a.allocated == 20 * MIB


@pytest.mark.parametrize(
    ("size", "taken"),
    [(0, 0), (1, 1), (3, 4), (4096, 4096), (4097, 8192), (9 * MIB, 16 * MIB), (GIB, GIB)],
)
def test_pinned_blocks_are_powers_of_two(size, taken):
    assert pinned_block(size) == taken


class Copier:
    """A library that copies to host memory."""

    def out(self):
        import torch

        return torch.empty(9 * MIB // 4)


@pytest.mark.parametrize(("pools", "taken"), [
    ({"meta": "device", "cpu": "host"}, 16 * MIB), ({"cpu": "device"}, 9 * MIB),
])  # fmt: skip
def test_what_is_offloaded_takes_whole_pinned_blocks_on_a_gpu_s_host(pools, taken):
    from harness.planner.tracing.trace import StoragelessTracer

    tracer = StoragelessTracer(pools)
    with tracer.watching([AllocationScope(Copier, "out", "", place="host", pinned=True)]), tracer:
        kept = Copier().out()
    assert [(s.pool, s.size) for s in tracer.record.storages] == [("host", taken)] and kept.numel()


def test_an_engine_s_books_pin_a_tensor_and_let_go_of_it():
    import torch

    from harness.planner.tracing.trace import StoragelessTracer

    tracer = StoragelessTracer({"meta": "device", "cpu": "host"})
    with tracer:
        kept = torch.empty(5000)
        tracer.pin(kept[:10])
        assert [s.size for s in tracer.record.storages] == [32768]
        tracer.pin(kept, False)
    assert [s.size for s in tracer.record.storages] == [20000]


def test_the_best_fit_is_the_smallest_that_holds_it():
    a = Allocator()
    large, small = a.allocate(40 * MIB), a.allocate(30 * MIB)
    a.release(large)
    a.release(small)
    assert a.allocate(29 * MIB).address == small.address
    assert a.reserved == 70 * MIB


def test_expandable_segments_grow_by_what_is_missing():
    a = Allocator(expandable=True)
    held = a.allocate(30 * MIB)
    assert a.reserved == 40 * MIB
    a.allocate(15 * MIB)  # 10 MiB are left behind it: one more granule of 20
    assert a.reserved == 60 * MIB and a.allocated == 45 * MIB
    a.release(held)
    a.allocate(30 * MIB)
    assert a.reserved == 60 * MIB
    a.allocate(512)  # small ones have a range of their own
    assert a.reserved == 62 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_streams_have_memory_of_their_own(expandable):
    """What one stream frees, another cannot take; its own takes it again."""
    freed = [(1, 0, 30 * MIB, 0), (-1, 0, 30 * MIB, 0)]
    same = replay([*freed, (1, 1, 30 * MIB, 0)], expandable=expandable)
    other = replay([*freed, (1, 1, 30 * MIB, 1)], expandable=expandable)
    assert other.reserved == 2 * same.reserved and other.allocated == same.allocated


def test_a_full_card_returns_the_cache_of_every_stream():
    events = [(1, 0, 40 * MIB, 1), (-1, 0, 40 * MIB, 1), (1, 1, 60 * MIB, 0)]
    assert replay(events, limit=64 * MIB).fits


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["lora", "qlora"])
def test_fsdp2_cuts_adapters_and_the_16_bit_weights_beside_them(part, tmp_path):
    """Of a float32 adapter a rank holds two bytes more in the weight and in each moment."""
    texts = (f"fsdp2+bf16_pure+{part}", f"fsdp2+bf16_pure+{part}:dtype=fp32")
    rows = [resolve(Spec(recipe=text, model="DiT-T/4", data="synthetic", global_batch=4,
                         processes=2, device="cuda", ema=0.0)) for text in texts]  # fmt: skip
    found, floats = pool.predict_all(rows, tmp_path, jobs=1)
    assert (found.method, floats.method) == ("trace", "trace"), found.fault
    subject = rows[0].subject
    layers = [subject.make().get_submodule(name) for name in subject.linears]
    elements = sum(8 * (layer.in_features + layer.out_features) for layer in layers)
    assert floats.between - found.between == (2 + 2 * 2) * elements / 2
    if part == "lora":
        assert found.steady.categories["parameters"] == pytest.approx(subject.parameters, rel=0.1)


def test_fsdp2_multiplies_4_bit_weights_on_the_device(tmp_path):
    """A trace moves their scales there, or bitsandbytes' products would be the host's."""
    rows = [resolve(Spec(recipe=f"fsdp2+bf16_pure+{part}", model="DiT-T/4:depth=2", processes=2,
                         data="synthetic", global_batch=4, device="cuda", ema=0.0))
            for part in ("lora", "qlora")]  # fmt: skip
    plain, packed = (
        sum(w.flops * w.count for w in found.work if (w.phase, w.kind) == ("forward", "product"))
        for found in pool.predict_all(rows, tmp_path, jobs=1)
    )
    assert packed == plain > 0


def test_under_a_limit_cache_is_returned_before_it_fails():
    events = [(1, 0, 40 * MIB), (-1, 0, 40 * MIB), (1, 1, 60 * MIB)]
    assert replay(events).reserved == 100 * MIB
    assert replay(events, limit=64 * MIB).fits
    assert not replay(events, limit=59 * MIB).fits


# ---- peaks ----


def record() -> Record:
    """Weights of 100, an activation of 50 kept for backward, a temporary of 70 freed in forward."""
    blocks = [
        Storage(100, "device", "prepare", "a", "x:1", "parameters"),
        Storage(50, "device", "forward", "b", "x:2", None, "backward"),
        Storage(70, "device", "forward", "c", "x:3", None, "forward"),
        Storage(999, "host", "forward", "d", "x:4"),
    ]
    events = [(1, 0), (1, 1), (1, 2), (1, 3), (-1, 2), (-1, 1)]
    return Record(blocks, events, [(0, "prepare"), (1, "forward"), (5, "backward")])


def test_the_peak_names_its_instant_and_what_lived():
    found = peak(record(), "device")
    assert (found.bytes, found.phase, found.op, found.site) == (220, "forward", "c", "x:3")
    assert found.categories["parameters"] == 100 and found.categories["activations"] == 50
    assert found.categories["temporaries"] == 70 and set(found.categories) == set(CATEGORIES)
    assert as_measured(found, "workspace").total == 220
    assert as_measured(found, "workspace").workspace == 70
    assert phase_peaks(record(), "device") == {"prepare": 100, "forward": 220, "backward": 100}
    assert peak(record(), "host").bytes == 999
    assert peak(record(), "nowhere").bytes == 0


@pytest.mark.parametrize(("deepspeed", "gradients", "workspace"), [(True, 8, 1), (False, 3, 6)])
def test_buckets_are_what_a_run_s_own_trace_calls_them(deepspeed, gradients, workspace):
    sums = {**dict.fromkeys(CATEGORIES, 0), "gradients": 3, "buckets": 5, "temporaries": 1}
    instant = Instant(bytes=9, phase="backward", op="", site="", categories=sums, held=[])
    found = as_measured(instant, "gradients" if deepspeed else "workspace")
    assert (found.gradients, found.workspace, found.total) == (gradients, workspace, 9)


# ---- cards, time and fits ----


SHARE = uncertainty.shares()["one GPU"].share


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        (1 / (1 + SHARE) - 0.01, "fits"),
        (1 / (1 + SHARE) + 0.01, "tight"),
        (1 / (1 - SHARE) - 0.01, "tight"),
        (1 / (1 - SHARE) + 0.01, "no"),
    ],
)
def test_a_prediction_against_a_card(times, wanted):
    """It fits where the upper end of its range does, and does not where the lower end does not."""
    card = cards.of_size(24 * GIB)
    beside = overhead.fixed_overhead(card, 8).total
    size = int(times * 24 * GIB) - beside
    found = verdict.judge(asked("ddp"), prediction(size / GIB, least=size), card)
    assert found.verdict == wanted and found.fits == (wanted == "fits")
    assert found.need_bytes == size + beside
    assert found.most_bytes == int((1 + SHARE) * found.need_bytes)
    assert found.fits == (found.room_bytes >= 0)
    assert found.margin_bytes == 24 * GIB - found.need_bytes
    assert found.host_bytes == 8 * found.prediction.host.bytes


def test_less_cache_is_no_more_than_tight_and_what_stays_beside_is_certain():
    """The allocator may give its cache back; the sizes of encoders are known."""
    card = cards.of_size(24 * GIB)
    need = 24 / (1 - SHARE) + 1
    kept = verdict.judge(asked("ddp"), prediction(need, least=20 * GIB), card)
    assert kept.verdict == "tight" and kept.may_fit
    beside = dataclasses.replace(card, beside=19 * GIB)
    alone, more = (verdict.judge(asked("ddp"), prediction(2), one) for one in (card, beside))
    assert more.fits and more.spread_bytes == alone.spread_bytes


@pytest.mark.parametrize(
    ("on_gpu", "on_host", "wanted"),
    [(10, 2, "fits"), (10, 7.9, "tight"), (10, 12, "host"), (23, 12, "host"), (40, 12, "no")],
)
def test_only_the_host_may_be_short(on_gpu, on_host, wanted):
    """Eight ranks of a machine with 64 GiB."""
    card = dataclasses.replace(cards.of_size(24 * GIB), host_memory=64 * GIB)
    host = prediction(on_host).peak
    found = verdict.judge(asked("zero3_offload"), prediction(on_gpu, host=host), card)
    assert found.verdict == wanted and found.host_memory == 64 * GIB
    assert found.tight_in == ("host" if wanted == "tight" else "")
    assert found.host_bytes == 8 * host.bytes


def test_a_memory_that_host_and_device_share_holds_both_needs():
    spark, card = cards.find("DGX Spark"), cards.of_size(cards.find("DGX-Spark").memory_bytes)
    row, found = asked("zero3_offload"), prediction(85, host=prediction(76).peak)
    apart, shared = verdict.judge(row, found, card), verdict.judge(row, found, spark)
    assert apart.may_fit and shared.verdict == "no" and shared.host_bytes is None
    assert shared.need_bytes == apart.need_bytes + apart.host_bytes  # one process a node
    assert spark.host_bytes(1) == spark.memory_bytes and "times unknown" in spark.words
    assert cards.find("RX 7900 XTX").unmeasured and cards.find("MI355X").unmeasured
    assert not cards.find("RTX 4090 Laptop GPU").unmeasured


def test_a_plan_never_answers_with_what_the_host_has_no_room_for():
    card = dataclasses.replace(cards.find("RTX-4090"), host_memory=64 * GIB)
    slow = [dataclasses.replace(prediction(1).work[0], flops=10**14)]
    short = verdict.judge(asked("zero3_offload"), prediction(4, host=prediction(30).peak), card)
    some = {"host": prediction(1).peak}
    fits = verdict.judge(asked("zero3"), prediction(12, work=slow, **some), card)
    large = verdict.judge(asked("ddp"), prediction(30, **some), card)
    assert verdict.fastest([short, fits, large]) is fits
    assert verdict.nearest([short, large]) is large, "a GPU lacks less than the host does"
    assert verdict.fastest([short, large]) is None
    text = answer([short])[0]
    assert "240.0 GiB of host memory, of 64.0" in text and "than a GPU has" not in text
    assert check_line(short, None).startswith("does not fit") and "host memory" in check_line(
        short, None
    )


@pytest.mark.parametrize(
    ("card", "processes", "gib"),
    [("RTX-4090", 1, 64), ("RTX-4090", 2, 128), ("A100-80GB", 1, 256), ("H100-80GB", 16, 2048)],
)
def test_a_host_nobody_named_is_assumed_by_the_kind_of_card(card, processes, gib):
    found = cards.find(card)
    assert found.host_bytes(processes) == gib * GIB
    assert dataclasses.replace(found, host_memory=GIB).host_bytes(processes) == GIB


@pytest.mark.parametrize(("gib", "host"), [(12, 64), (24, 64), (80, 256)])
def test_the_host_of_a_card_known_by_its_memory(gib, host):
    assert cards.of_size(gib * GIB).host_bytes(1) == host * GIB


def test_a_faster_recipe_that_may_fit_is_named_and_is_not_the_answer():
    card = cards.of_size(24 * GIB)
    slow = [dataclasses.replace(prediction(1).work[0], flops=10**14)]
    close = verdict.judge(asked("ddp"), prediction(22), card)
    roomy = verdict.judge(asked("zero3"), prediction(12, work=slow), card)
    assert close.verdict == "tight" and verdict.fastest([close, roomy]) is roomy
    text = answer([close, roomy])
    assert text[0] == "Fastest predicted to fit: zero3" and "of 24.0 GiB" in text[1]
    assert any(line.startswith("  faster, and may fit: ddp") for line in text)
    step = re.search("at least ([\\d.]+) s, usually up to ([\\d.]+) s", "\n".join(text))
    assert float(step[1]) < roomy.seconds.total < float(step[2]), "the range holds its middle"
    assert answer([close])[0].startswith("None is sure to fit. Fastest that may: ddp")
    assert check_line(close, None).startswith("tight on the GPU: ")


def test_without_a_prediction_there_is_no_verdict():
    card = cards.of_size(24 * GIB)
    none = Prediction(recipe="ddp", device="cuda", method="none")
    assert verdict.judge(asked("ddp"), none, card).verdict == "unknown"


def test_time_is_the_slower_of_flops_and_bytes():
    card = cards.find("A100-80GB")
    busy = Work(phase="forward", kind="product", dtype="bfloat16", flops=10**12, bytes=1, count=3)
    wide = dataclasses.replace(busy, kind="memory", flops=0, bytes=2 * 10**9, count=1)
    tiny = dataclasses.replace(wide, bytes=8)
    assert roofline.seconds([busy], card, 1).compute == pytest.approx(3e12 / (0.74 * 312e12))
    assert roofline.seconds([wide], card, 1).compute == pytest.approx(2e9 / (0.8 * 2039e9))
    assert roofline.seconds([tiny], card, 1).compute == pytest.approx(rates.LAUNCH)
    sent = dataclasses.replace(wide, kind="collective")
    alone = roofline.seconds([sent], card, 1).communication
    assert alone < 1e-4 < roofline.seconds([sent], card, 8).communication
    both = roofline.seconds([busy, sent], card, 8)
    assert both.total == pytest.approx(both.compute + both.communication)
    assert both.low < 0.8 * both.total and both.high > 1.5 * both.total


@pytest.mark.parametrize(
    ("device", "switch", "dtype"),
    [("meta", True, "tf32"), ("meta", False, "float32"), ("cpu", True, "float32")],
)
def test_a_gpu_s_float32_convolutions_are_tf32_unless_a_recipe_says_no(
    device, switch, dtype, monkeypatch
):
    """As a VAE's are, which encodes images beside a training in 16 bits."""
    import torch

    from harness.planner.tracing.trace import Counter

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", switch)
    x, weight = (torch.empty(2, 4, 8, 8, device=device) for _ in range(2))
    counter, convolution = Counter(device, "cpu"), torch.ops.aten.convolution.default
    given = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    counter.see("forward", convolution, given, convolution(*given))
    counter.see("forward", torch.ops.aten.mm.default, (x[0, 0], x[0, 0]), x[0, 0] @ x[0, 0])
    assert [work.dtype for work in counter.work()] == [dtype, "float32"]
    card = cards.find("A100-80GB")
    assert rates.rates(card, 1).product("tf32") == rates.rates(card, 1).product("float32", True)


def test_the_host_issues_each_operation_and_may_be_slow():
    card, count = cards.find("H100-80GB"), 10_000
    small = Work(phase="forward", kind="memory", dtype="", flops=0, bytes=8, count=count)
    found = roofline.seconds([small], card, 1)
    assert found.compute == pytest.approx(count * rates.LAUNCH)
    assert found.total == pytest.approx(count * rates.ISSUE)
    reach = uncertainty.reach()
    ends = (reach.low * found.total, reach.high * found.total)
    assert (found.low, found.high) == pytest.approx(ends)
    large = dataclasses.replace(small, kind="product", dtype="bfloat16", flops=10**12)
    hidden = roofline.seconds([large], card, 1)
    assert hidden.overhead == 0, "the device is the later"
    ends = (reach.low * hidden.total, reach.high * hidden.total)
    assert (hidden.low, hidden.high) == pytest.approx(ends)
    fits = [
        verdict.judge(row, prediction(1, work=work), card)
        for row in (asked("single"), resolve(miniature("flux-dev", "single")))
        for work in ([small], [large])
    ]
    assert [fit.seconds.total for fit in fits] == pytest.approx([found.total, hidden.total] * 2)
    said = [[note for note in notes([fit]) if "This floor is" in note] for fit in fits]
    assert [len(some) for some in said] == [1, 0, 1, 0] and "10,000" in said[0][0]


def test_the_host_issues_copies_too():
    """Weights in host memory are no way to spare the host's time."""
    card, count = cards.find("H100-80GB"), 10_000
    small = Work(phase="forward", kind="memory", dtype="", flops=0, bytes=8, count=count)
    for kind in ("transfer", "streamed"):
        copied = roofline.seconds([small, dataclasses.replace(small, kind=kind)], card, 1)
        assert copied.total == pytest.approx(2 * count * rates.ISSUE)


def test_a_step_that_recomputes_may_have_a_slower_host():
    """Recomputation runs an attention's forward again in backward; its backward has more FLOPs."""
    card, count = cards.find("H100-80GB"), 10_000
    first = Work(phase="forward", kind="attention", dtype="", flops=2, bytes=8, count=count)
    twice = dataclasses.replace(first, phase="backward", flops=5)
    again = dataclasses.replace(first, phase="backward")
    kept, recomputed = (
        roofline.seconds(work, card, 1) for work in ([first, twice], [first, again])
    )
    assert kept.slowest == recomputed.slowest == pytest.approx(2 * count * rates.RECOMPUTING)
    assert kept.total == pytest.approx(2 * count * rates.ISSUE)
    assert recomputed.total == pytest.approx(3 * count * rates.ISSUE), "what is recomputed, twice"
    half = dataclasses.replace(again, count=count // 2)
    assert roofline.again([first, half]) == 0.5


def test_a_plan_for_flux_warns_of_the_kernel_in_which_it_failed():
    card = cards.find("H200")

    def warned(kernel: str, **model: str) -> list[bool]:
        row = asked("single+bf16", **model)
        fits = [verdict.judge(row, prediction(1, attention=[kernel]), card)]
        return [
            any("attend:kernel=flash" in o for o in told(fits)) for told in (notes, short_notes)
        ]

    flux = {"model": "flux-dev", "objective": "flow"}
    assert warned("cudnn", **flux) == [True, True]
    assert warned("flash", **flux) == warned("cudnn") == [False, False]


def test_a_collective_is_as_fast_as_the_links_between_its_ranks():
    card = cards.find("A100-80GB")
    everyone = Work(phase="forward", kind="collective", dtype="", flops=0, bytes=8 * 10**9, count=2)
    within = dataclasses.replace(everyone, group=8)
    across = dataclasses.replace(everyone, group=8, stride=8, bytes=10**9)
    assert roofline.sent([everyone], 64) == (0, 2 * 8 * 10**9 * 63 // 64)
    assert roofline.sent([within, across], 64) == (14 * 10**9, 2 * 10**9 * 7 // 8)
    slow, fast = (roofline.seconds([one], card, 64).communication for one in (everyone, within))
    assert slow > 1.4 * fast, "a network is slower than NVLink"
    assert roofline.seconds([within], card, 64) == roofline.seconds([everyone], card, 8)


def test_cards_are_found_however_they_are_spelled():
    assert cards.find("a100-80gb") is cards.find("A100 80GB")
    assert cards.find("h200").name == "H200-141GB"
    for name, card in cards.table().items():
        assert card.name == name and card.memory_bytes < 300 * GIB < card.bandwidth * 2e3
    assert cards.parse_bytes("24GiB") == cards.parse_bytes("24") == 24 * GIB
    assert cards.parse_bytes("80GB") == 80 * 10**9


@pytest.mark.parametrize("name", cards.table())
def test_every_card_is_found_by_the_name_it_calls_itself(name):
    card = cards.table()[name]
    assert cards.named(card.device, card.memory_bytes).name == name


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX-4070-Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_a_card_is_known_by_its_device_s_name_and_no_other_is_taken_for_it(device, name):
    card = cards.named(device)
    assert (card and card.name) == name


def test_a_card_without_a_unit_computes_in_float32():
    card = cards.find("V100-32GB")
    assert card.peaks["bfloat16"] is card.peaks["tf32"] is None
    assert card.flops("bfloat16") == card.flops("float32", tf32=True) == 15.7e12
    assert card.flops("float16") == 125e12
    assert cards.find("A100-80GB").flops("float32", tf32=True) == 156e12


def product(tokens: int, width: int, out: int, size: int = 2) -> Work:
    """A product of ``tokens`` rows, each of ``size`` bytes a number."""
    moved = size * (tokens * width + width * out + tokens * out)
    dtype = "bfloat16" if size == 2 else "float32"
    flops = 2 * tokens * width * out
    return Work(phase="forward", kind="product", dtype=dtype, flops=flops, bytes=moved, count=1)


def test_products_on_hopper_are_as_fast_as_their_shapes_were_measured():
    """H100 and H200: shapes of DiT-XL's blocks, squares of 4,096 and more, and in between."""
    hopper, ampere = (rates.rates(cards.find(name), 1) for name in ("H200-141GB", "A100-80GB"))
    small, square = product(8192, 1152, 1152), product(4096, 4096, 4096)
    assert roofline.depth(small) < rates.SLENDER and roofline.depth(square) == rates.WIDE + 1 / 3
    for dtype, tf32, most, ends in [
        ("bfloat16", True, 989e12, (0.64, 0.78)),
        ("float32", True, 494e12, (0.55, 0.79)),
        ("float32", False, 67e12, (0.69, 0.76)),
    ]:
        found = [hopper.product(dtype, tf32, roofline.depth(w)) for w in (small, square)]
        assert found == pytest.approx([share * most for share in ends])
        between = hopper.product(dtype, tf32, 1000.0)
        assert found[0] < between < found[1]
    ends = [ampere.product("bfloat16", depth=one) for one in (10, 1e4)]
    assert ends == pytest.approx([0.60 * 312e12, 0.74 * 312e12])
    wide = product(4096, 4096, 4096, size=4)
    assert roofline.depth(wide) == roofline.depth(square), "operands moved, and not bytes"
    with_tf32 = roofline.seconds([wide], cards.find("H200-141GB"), 1, "single+tf32").compute
    assert with_tf32 == pytest.approx(wide.flops / (0.79 * 494e12))


@pytest.mark.parametrize(
    ("name", "size", "dtype", "measured"),
    [
        ("RTX-A6000", 8192, "bfloat16", 95e12),  # mli/transformers-benchmarks
        ("A40", 8192, "bfloat16", 110.6e12),  # zzc0721/torch-performance-test-data, issue 185
        ("RTX-3060", 2048, "bfloat16", 23.7e12),  # issue 131
        ("RTX-4060-Ti-16GB", 8192, "bfloat16", 43.6e12),  # issue 130
        ("RTX-4090", 8192, "bfloat16", 161e12),  # qhduan/transformers-benchmarks
        ("RTX-5070", 4096, "bfloat16", 64.8e12),  # issue 149
        ("RTX-PRO-6000", 2048, "bfloat16", 288.7e12),  # issue 160
        ("L4", 8192, "bfloat16", 59.4e12),  # issue 120
        ("L40S", 8192, "bfloat16", 269e12),  # database.md
        ("V100-16GB", 8192, "float16", 97.4e12),  # issue 140
        ("A100-80GB", 8192, "bfloat16", 230e12),  # mli/transformers-benchmarks
        ("A40", 2048, "tf32", 43.8e12),  # issue 185
        ("H100-80GB", 4096, "bfloat16", 789e12),  # issue 79; a measurement of this project's own
        ("H100-PCIe", 8192, "bfloat16", 496e12),  # database.md
        ("B200-180GB", 8192, "bfloat16", 1696e12),  # database.md
        ("MI300X-192GB", 8192, "bfloat16", 668e12),  # stas00/ml-engineering
    ],
)
def test_a_square_product_takes_as_long_as_public_benchmarks_of_the_card(
    name, size, dtype, measured
):
    card, square = cards.find(name), product(size, size, size)
    found = rates.rates(card, 1).product(dtype, depth=roofline.depth(square))
    assert found == pytest.approx(measured, rel=0.09)
    other = dataclasses.replace(card, products={}, attention={})
    if name in ("RTX-A6000", "RTX-4060-Ti-16GB", "L4", "MI300X-192GB"):
        before = rates.rates(other, 1).product(dtype, depth=roofline.depth(square))
        assert before != pytest.approx(measured, rel=0.2), "one share for every card"


def test_every_card_is_of_a_family_that_says_where_its_shares_come_from():
    table = json.loads(cards.TABLE.read_text("utf-8"))
    for row in table["gpus"]:
        family = table["families"][row["family"]]
        assert family["range"] and family["attention_source"]
        assert row.get("products_source") or "products" not in row, row["name"]
        found = cards.find(row["name"])
        for shares in found.products.values():
            assert all(0.3 < share < 1.2 for share in shares), row["name"]


def test_attention_is_never_faster_than_its_products():
    """An RTX A6000 keeps its clock in short benchmarks of attention alone."""
    slow, fast = cards.find("RTX-A6000"), cards.find("A40")
    assert dict(slow.attention_shares("bfloat16"))[4096] == slow.product_shares("bfloat16")[1]
    assert dict(fast.attention_shares("bfloat16"))[4096] == 0.69


def test_float32_attention_has_no_rate_of_tf32():
    work = Work(phase="forward", kind="attention", dtype="float32", flops=10**12, bytes=1, count=1)
    for card, rate in (("H200-141GB", 0.54 * 67e12), ("A100-80GB", 0.6 * 19.5e12)):
        plain, tf32 = (
            roofline.seconds([work], cards.find(card), 1, one) for one in ("single", "single+tf32")
        )
        assert plain.compute == tf32.compute == pytest.approx(1e12 / rate)


# ---- keeping and failing ----


def test_a_prediction_is_read_back_as_it_was_written(tmp_path: Path):
    found = prediction(3)
    found.write(tmp_path / "p.json")
    assert load(tmp_path / "p.json") == found
    assert kept(tmp_path / "none.json") is None
    (tmp_path / "p.json").write_text('{"schema": 99}')
    assert kept(tmp_path / "p.json") is None
    with pytest.raises(BadFile, match="schema 99"):
        load(tmp_path / "p.json")


def test_a_step_may_have_more_operations_than_64_bits_count(tmp_path: Path):
    """Attention of Flux at 100000x100000 pixels has 10^22."""
    many = Work(phase="forward", kind="attention", dtype="", flops=10**22, bytes=0, count=1)
    found = dataclasses.replace(prediction(3), work=[many])
    found.write(tmp_path / "p.json")
    assert load(tmp_path / "p.json") == found


def test_a_prediction_that_cannot_be_read_back_has_a_reason(monkeypatch, tmp_path):
    def ended(run: pool.Run):
        run.out(0).write_text("9" * 50)
        yield 0

    monkeypatch.setattr(pool.Run, "ended", ended)
    (found,) = pool.predict_all([asked("ddp")], tmp_path)
    assert found.method == "none" and "an integer of 50 digits" in found.reason


def test_a_worker_that_fails_is_no_prediction_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    row = asked("ddp")
    found = pool.predict_all([row], tmp_path)[0]
    assert (found.method, found.fault, found.bytes) == ("none", "", None)
    assert found.reason == "the predicting process ended with exit code 1"
    monkeypatch.setattr(sys, "executable", "/nowhere")
    found = pool.predict_all([row], tmp_path)[0]
    assert (
        found.reason == "the predicting process could not be started" and "/nowhere" in found.fault
    )
    assert list(tmp_path.iterdir()) == []  # a failure is not kept


def test_one_worker_answers_what_is_asked_while_it_stands(monkeypatch, tmp_path):
    """Of both kinds of card at once; where it has ended another begins."""
    begun: list[workers.Worker] = []

    class Noted(workers.Worker):
        def __init__(self) -> None:
            begun.append(self)
            super().__init__()

    monkeypatch.setattr(workers, "Worker", Noted)
    small = {"model": "DiT-T/4", "processes": 1, "global_batch": 2}
    plain, half = asked("single", **small), asked("single+bf16", **small)
    with workers.kept_workers():
        flash, cudnn = (pool.predict_all([half], tmp_path, kind=k)[0] for k in overhead.WIDEST)
        (found,) = pool.predict_all([plain], tmp_path)
        assert len(begun) == 1 and begun[0].runs
        assert (flash.attention, cudnn.attention) == (["flash"], ["cudnn"])
        begun[0].end()
        (again,) = pool.predict_all([plain], tmp_path / "other")
        assert len(begun) == 2 and again.steady == found.steady is not None
    assert not begun[1].runs


def test_a_kept_prediction_starts_no_process(monkeypatch, tmp_path):
    row = asked("ddp")
    prediction(3).write(pool.path_of(row, tmp_path))
    monkeypatch.setattr(pool, "Run", lambda *given: pytest.fail("a process was started"))
    told: list[int] = []
    assert pool.predict_all([row], tmp_path, done=lambda i, p: told.append(i)) == [prediction(3)]
    assert told == [0]


@pytest.mark.parametrize("text", overhead.LIMITS)
def test_a_limit_is_of_a_part_that_recipes_can_have(text):
    kind = CATALOG[text.partition(":")[0]]
    part = parse(f"ddp+{text}").in_slot(kind.slot)
    assert str(part) == text
    assert part.name in overhead.why([part], "Error") and "Error" not in overhead.why(
        [part], "Error"
    )


# ---- the command line ----

BAD = {
    "gpu": (["--gpu", "H100"], "is several cards; one of H100"),
    "gpu unknown": (["--gpu", "A1000"], "./run.sh list cards"),
    "gpu of a longer name": (["--gpu", "H20"], "unknown gpu 'H20'"),
    "gpu of another make": (["--gpu", "L40"], "--gpu-memory 48GiB"),
    "unequal gpus": (
        ["--gpu", "RTX-3060,RTX-3060,RTX-4060-Ti-8GB"],
        "give --gpus 3 --gpu RTX-4060-Ti-8GB, or without the smallest --gpus 2 --gpu RTX-3060",
    ),
    "unequal memory": (["--gpu-memory", "24GiB, 12GiB"], "give --gpus 2 --gpu-memory 12GiB"),
    "equal gpus": (["--gpu", "L4,L4"], "decides; give --gpus 2 --gpu L4"),
    "memory": (["--gpu-memory", "lots"], "gpu-memory is 'lots'; write a size as in 24GiB"),
    "host memory": (
        ["--gpu", "L4", "--host-memory", "lots"],
        "host-memory is 'lots'; write a size",
    ),
    "no host": (["--cpu", "--host-memory", "64GiB"], "host-memory is 64GiB, but --cpu plans for"),
    "no card": ([], "one of the arguments --gpu --gpu-memory --cpu is required"),
    "model": (["--gpu", "L4", "--model", "DiT-XXL/2"], "did you mean 'DiT-XL/2'"),
    "size": (["--gpu", "L4", "--model", "depth=0"], "depth is '0'; a whole number from 1"),
    "size key": (["--gpu", "L4", "--model", "dept=2"], "no size 'dept'; did you mean 'depth'"),
    "heads": (["--gpu", "L4", "--model", "width=1153"], "width is 1153; it must divide by heads"),
    "width": (["--gpu", "L4", "--model", "widht=1152"], "no size 'widht'; did you mean 'width'"),
    "gpus": (["--gpu", "L4", "--gpus", "0"], "give --gpus at least 1"),
    "batch": (["--gpu", "L4", "--gpus", "8", "--global-batch", "12"], "use 8 or 16"),
    "resolution": (["--gpu", "L4", "--resolution", "250"], "multiples of 16"),
    "recipe": (["--gpu", "L4", "--recipes", "zeor3"], "did you mean 'zero3'"),
    "refused": (
        ["--gpu", "L4", "--recipes", "zero2_offload+adamw:impl=foreach"],
        "an offloaded optimizer is the engine's own CPU Adam",
    ),
    "suite": (["--gpu", "L4", "--suite", "defalt"], "did you mean 'default'"),
    "explain": (["--gpu", "L4", "--explain", "--largest", "batch"], "leave one out"),
    "both": (["--gpu", "L4", "--gpu-memory", "24GiB"], "not allowed with argument"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_starts_nothing(case, capsys, monkeypatch):
    monkeypatch.setattr(pool, "predict_all", lambda *a, **k: pytest.fail("something was started"))
    words, said = BAD[case]
    try:
        code = cli.main(["plan", *words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    caught = capsys.readouterr()
    assert code == 2 and said in caught.err and len(caught.err.strip().splitlines()) == 1


def test_a_plan_end_to_end(capsys, monkeypatch, tmp_path):
    def predict_all(rows, folder, *, done, **more):
        found = [prediction(5 * (i + 1)) for i, _ in enumerate(rows)]
        for index, one in enumerate(found):
            done(index, one)
        return found

    monkeypatch.setattr(pool, "predict_all", predict_all)
    file = tmp_path / "plan.json"
    words = ["--gpus", "8", "--gpu-memory", "12GiB", "--recipes", "ddp", "zero2", "zero3+bf16"]
    assert cli.main(["plan", *words, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "Fastest predicted to fit: ddp" in text and "8 x 12.0 GiB (speed assumed:" in text
    rows = json.loads(file.read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["fits", "tight", "no"]
    for row in rows:
        assert row["need_high_bytes"] - row["need_bytes"] == row["need_spread_bytes"] > 0
        assert row["uncertainty"]["rows"] == uncertainty.shares()[row["uncertainty"]["kind"]].rows
    assert {row["host_memory_node"] for row in rows} == {8 * 64 * GIB}


def test_a_plan_that_fits_nothing_predicts_what_else_would(capsys, monkeypatch, tmp_path):
    def predict_all(rows, folder, **more):
        return [prediction(5 if "shards" in row.launch.traits else 20) for row in rows]

    monkeypatch.setattr(pool, "predict_all", predict_all)
    file = tmp_path / "plan.json"
    words = ["--gpus", "8", "--gpu-memory", "12GiB", "--recipes", "ddp", "ddp+bf16", "--explain"]
    assert cli.main(["plan", *words, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "None fits; trying changes" in text
    assert "fits instead" not in text and "Predicted to fit instead, of " in text
    assert "ddp+bf16: 20.00 GiB of tensors, in forward at op" in text
    found = json.loads(file.read_text())
    assert {row["processes"] for row in found["tried"]} == {8}
    able = [row["recipe"] for row in found["tried"] if row["verdict"] == "fits"]
    assert able == ["zero1", "zero2", "zero3"] and found["tried_on_more_gpus"] == []


def test_a_suite_s_impossible_rows_are_lines_of_the_plan(capsys, monkeypatch):
    """Global batch 8 on 8 GPUs leaves nothing to accumulate: two rows of the suite cannot be."""
    monkeypatch.setattr(
        pool, "predict_all", lambda rows, folder, **more: [prediction(5) for _ in rows]
    )
    words = ["--gpu", "L4", "--gpus", "8", "--global-batch", "8", "--suite", "default"]
    assert cli.main(["plan", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "refused ddp+accumulate:steps=4: global_batch 8 does not divide" in text


# ---- collectives beside the computation ----


def phase(name: str, kind: str, size: int) -> Work:
    return Work(phase=name, kind=kind, dtype="", flops=0, bytes=size, count=1)


def test_an_overlapped_collective_hides_behind_its_own_phase_alone():
    card = cards.find("A100-80GB")
    computed = [phase("forward", "memory", 80 * GIB), phase("backward", "memory", 160 * GIB)]

    def communication(*more: Work) -> float:
        return roofline.seconds([*computed, *more], card, 8).communication

    ahead, behind = phase("forward", "overlapped", GIB), phase("backward", "overlapped", GIB)
    assert communication(ahead) == communication(ahead, behind) == 0
    assert communication(phase("forward", "collective", GIB)) > 0, "waited for"
    late = phase("optimizer", "collective", GIB)
    assert communication(ahead, late) == communication(late) > 0
    much = phase("forward", "overlapped", 400 * GIB)
    assert communication(much) == communication(much, behind) > communication(late)


def test_collectives_of_a_phase_that_overlaps_are_counted_so():
    import torch

    from harness.planner.tracing.trace import Counter

    class AllReduce:
        namespace = "c10d"
        _schema = type("Schema", (), {"name": "c10d::allreduce_"})

    counter = Counter("meta", "cpu", frozenset({"backward"}))
    for name in ("forward", "backward"):
        counter.see(name, AllReduce, [torch.empty(8, device="meta")], None)
    assert {(w.phase, w.kind, w.bytes) for w in counter.work()} == {
        ("forward", "collective", 64), ("backward", "overlapped", 64),
    }  # fmt: skip

    class Gather:
        namespace = "c10d"
        _schema = type("Schema", (), {"name": "c10d::_allgather_base_"})

    counter = Counter("meta", "cpu")
    whole, part = torch.empty(8, device="meta"), torch.empty(2, device="meta")
    counter.see("forward", Gather, [whole, part], (whole, None))
    assert [w.bytes for w in counter.work()] == [32], "what is gathered, without what was given"
    counter = Counter("meta", "cpu", frozenset({"backward"}), neighbours=(0, 1))
    counter.see("backward", AllReduce, [torch.empty(8, device="meta")], None)
    assert [w.kind for w in counter.work()] == ["collective"], "who shares weights waits"
