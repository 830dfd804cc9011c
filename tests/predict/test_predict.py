"""Prediction without torch's help: the allocator's rules, fits, plans and bad input."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.json_files import BadFile
from harness.memory.record import (
    CATEGORIES,
    Record,
    Storage,
    as_measured,
    peak,
    phase_peaks,
)
from harness.planner import eager, overhead, pool, uncertainty, verdict
from harness.planner.plan.answer import answer, check_line
from harness.planner.plan.table import short_notes
from harness.planner.speed import rates, roofline
from harness.planner.tracing.allocator import Allocator, replay
from harness.prediction import Work, kept, load
from harness.system import cards
from strategies.base import pinned_block
from tests.made.predictions import GIB, MIB, asked, made_up, prediction

# ---- the allocator ----


def test_pinned_blocks_are_powers_of_two():
    assert [pinned_block(size) for size in (0, 1, 4096, 4097)] == [0, 1, 4096, 8192]


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


def test_under_a_limit_cache_is_returned_before_it_fails():
    events = [(1, 0, 40 * MIB), (-1, 0, 40 * MIB), (1, 1, 60 * MIB)]
    assert replay(events).reserved == 100 * MIB
    emptied = [*events[:2], (0, 0, 0), events[2]]
    assert replay(emptied).reserved == 60 * MIB, "an emptied pool gives its free segments back"
    assert replay(events, limit=64 * MIB).fits
    assert not replay(events, limit=59 * MIB).fits


# ---- peaks ----


def test_the_peak_names_its_instant_and_what_lived():
    """Weights of 100, an activation of 50 kept for backward, a temporary of 70 freed in forward,
    and a bucket of 30, which a run's own trace calls gradients or workspace."""
    blocks = [
        Storage(100, "device", "prepare", "a", "x:1", "parameters"),
        Storage(50, "device", "forward", "b", "x:2", None, "backward"),
        Storage(70, "device", "forward", "c", "x:3", None, "forward"),
        Storage(999, "host", "forward", "d", "x:4"),
        Storage(30, "device", "prepare", "e", "x:5", "buckets"),
    ]
    events = [(1, 0), (1, 4), (1, 1), (1, 2), (1, 3), (-1, 2), (-1, 1)]
    record = Record(blocks, events, [(0, "prepare"), (2, "forward"), (6, "backward")])
    found = peak(record, "device")
    assert (found.bytes, found.phase, found.op, found.site) == (250, "forward", "c", "x:3")
    lived = {"parameters": 100, "activations": 50, "temporaries": 70, "buckets": 30}
    assert found.categories == {**dict.fromkeys(CATEGORIES, 0), **lived}
    for kind, gradients, workspace in (("gradients", 30, 70), ("workspace", 0, 100)):
        run = as_measured(found, kind)
        assert (run.gradients, run.workspace, run.total) == (gradients, workspace, 250)
    assert phase_peaks(record, "device") == {"prepare": 130, "forward": 250, "backward": 130}
    assert (peak(record, "host").bytes, peak(record, "nowhere").bytes) == (999, 0)


# ---- cards, time and fits ----


SHARE = uncertainty.shares()["one GPU"].share


@pytest.mark.parametrize(("times", "wanted"), [
    (1 / (1 + SHARE) - 0.01, "fits"), (1 / (1 + SHARE) + 0.01, "tight"),
    (1 / (1 - SHARE) - 0.01, "tight"), (1 / (1 - SHARE) + 0.01, "no"),
])  # fmt: skip
def test_a_prediction_against_a_card(times, wanted):
    """It fits where the upper end of its range does, and does not where the lower end does not."""
    card = cards.of_size(24 * GIB)
    beside = overhead.fixed_overhead(card, 8).total
    size = int(times * 24 * GIB) - beside
    found = verdict.judge(asked("ddp"), prediction(size / GIB, least=size), card)
    assert found.verdict == wanted and found.fits == (wanted == "fits")
    assert found.need_bytes == size + beside and found.fits == (found.most_bytes <= 24 * GIB)
    assert found.most_bytes == int((1 + SHARE) * found.need_bytes)
    assert found.margin_bytes == 24 * GIB - found.need_bytes


def test_less_cache_is_no_more_than_tight_and_what_stays_beside_is_certain():
    """The allocator may give its cache back; the sizes of encoders are known."""
    card = cards.of_size(24 * GIB)
    need = 24 / (1 - SHARE) + 1
    kept = verdict.judge(asked("ddp"), prediction(need, least=20 * GIB), card)
    assert kept.verdict == "tight" and kept.may_fit
    beside = dataclasses.replace(card, beside=19 * GIB)
    alone, more = (verdict.judge(asked("ddp"), prediction(2), one) for one in (card, beside))
    assert more.fits and more.spread_bytes == alone.spread_bytes


@pytest.mark.parametrize(("on_gpu", "on_host", "wanted"), [
    (10, 2, "fits"), (10, 7.9, "tight"), (10, 12, "host"), (23, 12, "host"), (40, 12, "no"),
])  # fmt: skip
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


SLOW = [dataclasses.replace(prediction(1).work[0], flops=10**14)]


def test_a_plan_never_answers_with_what_the_host_has_no_room_for():
    card = dataclasses.replace(cards.find("RTX-4090"), host_memory=64 * GIB)
    short = verdict.judge(asked("zero3_offload"), prediction(4, host=prediction(30).peak), card)
    some = {"host": prediction(1).peak}
    fits = verdict.judge(asked("zero3"), prediction(12, work=SLOW, **some), card)
    large = verdict.judge(asked("ddp"), prediction(30, **some), card)
    assert verdict.fastest([short, fits, large]) is fits
    assert verdict.fastest([short, large]) is None
    assert verdict.nearest([short, large]) is large, "a GPU lacks less than the host does"
    assert "240.0 GiB of host memory, of 64.0" in answer([short])[0]


@pytest.mark.parametrize(("card", "processes", "gib"), [("RTX-4090", 2, 128),
                                                        ("H100-80GB", 16, 2048)])  # fmt: skip
def test_a_host_nobody_named_is_assumed_by_the_kind_of_card(card, processes, gib):
    found = cards.find(card)
    assert found.host_bytes(processes) == gib * GIB
    assert dataclasses.replace(found, host_memory=GIB).host_bytes(processes) == GIB


def test_a_faster_recipe_that_may_fit_is_named_and_is_not_the_answer():
    card = cards.of_size(24 * GIB)
    close = verdict.judge(asked("ddp"), prediction(22), card)
    roomy = verdict.judge(asked("zero3"), prediction(12, work=SLOW), card)
    assert close.verdict == "tight" and verdict.fastest([close, roomy]) is roomy
    text = answer([close, roomy])
    assert text[0] == "Fastest predicted to fit: zero3"
    assert any(line.startswith("  faster, and may fit: ddp") for line in text)
    step = re.search("at least ([\\d.]+) s, usually up to ([\\d.]+) s", "\n".join(text))
    assert float(step[1]) < roomy.seconds.total < float(step[2]), "the range holds its middle"
    assert answer([close])[0].startswith("None is sure to fit. Fastest that may: ddp")


@pytest.mark.parametrize(("model", "kernel"), [("flux-dev", "cudnn"), ("flux-dev", "flash"),
                                               ("DiT-XL/2", "cudnn")])  # fmt: skip
def test_a_plan_for_flux_warns_of_the_kernel_in_which_it_failed(model, kernel):
    row = asked("single+bf16", model=model, objective="flow")
    fits = [verdict.judge(row, prediction(1, attention=[kernel]), cards.find("H200"))]
    warned = any("attend:kernel=flash" in one for one in short_notes(fits))
    assert warned == (model == "flux-dev" and kernel == "cudnn")


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
    ("NVIDIA GeForce RTX 4070 Laptop GPU", None),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None), ("NVIDIA H200 NVL", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("cpu", None),
])  # fmt: skip
def test_a_card_is_known_by_its_device_s_name_and_no_other_is_taken_for_it(device, name):
    card = cards.named(device)
    assert (card and card.name) == name


def test_a_card_without_a_unit_computes_in_float32():
    card = cards.find("V100-32GB")
    assert card.peaks["bfloat16"] is card.peaks["tf32"] is None
    assert card.flops("bfloat16") == card.flops("float32", tf32=True) == 15.7e12
    assert card.flops("float16") == 125e12
    assert cards.find("A100-80GB").flops("float32", tf32=True) == 156e12


@pytest.mark.parametrize(("name", "size", "dtype", "measured"), [
    ("RTX-A6000", 8192, "bfloat16", 95e12), ("A40", 8192, "bfloat16", 110.6e12),
    ("RTX-3060", 2048, "bfloat16", 23.7e12), ("RTX-4060-Ti-16GB", 8192, "bfloat16", 43.6e12),
    ("RTX-4090", 8192, "bfloat16", 161e12), ("RTX-5070", 4096, "bfloat16", 64.8e12),
    ("RTX-PRO-6000", 2048, "bfloat16", 288.7e12), ("L4", 8192, "bfloat16", 59.4e12),
    ("L40S", 8192, "bfloat16", 269e12), ("V100-16GB", 8192, "float16", 97.4e12),
    ("A100-80GB", 8192, "bfloat16", 230e12), ("A40", 2048, "tf32", 43.8e12),
    ("H100-80GB", 4096, "bfloat16", 789e12), ("H100-PCIe", 8192, "bfloat16", 496e12),
    ("B200-180GB", 8192, "bfloat16", 1696e12), ("MI300X-192GB", 8192, "bfloat16", 668e12),
])  # fmt: skip
def test_a_square_product_takes_as_long_as_public_benchmarks_of_the_card(
    name, size, dtype, measured
):
    given = {"flops": 2 * size**3, "bytes": 3 * size**2 * (4 if dtype == "tf32" else 2)}
    square = Work(phase="forward", kind="product", dtype="bfloat16", count=1, **given)
    found = rates.rates(cards.find(name), 1).product(dtype, depth=roofline.depth(square))
    assert found == pytest.approx(measured, rel=0.09)


# ---- keeping and failing ----


def test_a_prediction_is_read_back_as_it_was_written(tmp_path: Path):
    many = Work(phase="forward", kind="attention", dtype="", flops=10**22, bytes=0, count=1)
    found = dataclasses.replace(prediction(3), work=[many])  # more than 64 bits count
    found.write(tmp_path / "p.json")
    assert load(tmp_path / "p.json") == found
    assert kept(tmp_path / "none.json") is None
    (tmp_path / "p.json").write_text('{"schema": 99}')
    assert kept(tmp_path / "p.json") is None
    with pytest.raises(BadFile, match="schema 99"):
        load(tmp_path / "p.json")


def test_a_worker_that_fails_is_no_prediction_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    row = asked("ddp")
    found = pool.predict_all([row], tmp_path)[0]
    assert (found.method, found.fault, found.bytes) == ("none", "", None)
    assert found.reason == "the predicting process ended with exit code 1"
    monkeypatch.setattr(sys, "executable", "/nowhere")
    found = pool.predict_all([row], tmp_path)[0]
    assert "could not be started" in found.reason and "/nowhere" in found.fault
    assert list(tmp_path.iterdir()) == []  # a failure is not kept


def test_one_worker_answers_what_is_asked_while_it_stands(monkeypatch, tmp_path):
    """Of both kinds of card at once; where it has ended another begins."""
    begun: list[pool.Worker] = []

    class Noted(pool.Worker):
        def __init__(self) -> None:
            begun.append(self)
            super().__init__()

    monkeypatch.setattr(pool, "Worker", Noted)
    small = {"model": "DiT-T/4", "processes": 1, "global_batch": 2}
    plain, half = asked("single", **small), asked("single+bf16", **small)
    with pool.kept_workers():
        kinds = [pool.predict_all([half], tmp_path, kind=kind)[0] for kind in overhead.WIDEST]
        (found,) = pool.predict_all([plain], tmp_path)
        assert len(begun) == 1 and [one.attention for one in kinds] == [["flash"], ["cudnn"]]
        begun[0].end()
        (again,) = pool.predict_all([plain], tmp_path / "other")
        assert len(begun) == 2 and again.steady == found.steady is not None
    assert not begun[1].runs


# ---- the command line ----

L4 = "--gpu L4"
FLUX = f"{L4} --model flux-dev"
REFUSED = {
    "--gpu RTX-3060,RTX-3060,RTX-4060-Ti-8GB":
        "give --gpus 3 --gpu RTX-4060-Ti-8GB, or without the smallest --gpus 2 --gpu RTX-3060",
    "--gpu-memory '24GiB, 12GiB'": "give --gpus 2 --gpu-memory 12GiB",
    f"{L4} --host-memory lots": "host-memory is 'lots'; write a size",
    "--cpu --host-memory 64GiB": "host-memory is 64GiB, but --cpu plans for",
    "": "one of the arguments --gpu --gpu-memory --cpu is required",
    f"{L4} --gpu-memory 24GiB": "not allowed with argument",
    f"{L4} --gpus 0": "give --gpus at least 1",
    f"{L4} --gpus 8 --global-batch 12": "use 8 or 16",
    f"{L4} --model depth=0": "depth is '0'; a whole number from 1",
    f"{L4} --model widht=1152": "no size 'widht'; did you mean 'width'",
    f"{L4} --model meta-llama/Llama-3-8B": "./run.sh list models",
    f"{L4} --recipes lora+bf16 --gpus 4": "fsdp2+lora+bf16",
    f"{L4} --recipes zero2_offload+adamw:impl=foreach": "the engine's own CPU Adam",
    f"{L4} --resolution 250": "multiples of 16",
    f"{FLUX} --resolution 64,huge": "resolution has 'huge'; write pixels, as 512,1024",
    f"{L4} --resolution 256,512": "--resolution 512",
    f"{L4} --check": "--check takes one recipe, and none is named; give --recipes RECIPE",
    f"{L4} --advise --recipes ddp zero2": "--advise takes one recipe, and 2 are named",
    f"{L4} --check --advise --recipes ddp": "exclude each other; leave one out",
    f"{L4} --explain --largest batch": "leave one out",
    f"{L4} --gpus 1 8 --check --recipes ddp": "give --gpus one number",
    f"{L4} --gpus 16 --nodes 3": "give --gpus 15",
    "--cpu --recipes ddp --nodes 2": "--cpu is one machine without them; leave out both",
    f"{FLUX} --largest frames": "takes one number of frames only",
    f"{FLUX} --recipes zero3+bf16 --largest resident": "no block of zero3+bf16",
    f"{FLUX} --phases lod": "phases is 'lod'; did you mean 'load'?",
    f"{FLUX} --phases load:fp8": "phases is load:fp8; did you mean 'fp32'?",
    f"{L4} --model sana-1.6b --phases validate": "which VAE model sana-1.6b has",
}  # fmt: skip
"""Words of a plan -> a part of its one line."""


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_starts_nothing(words, capsys, monkeypatch):
    monkeypatch.setattr(pool, "predict_all", lambda *a, **k: pytest.fail("something was started"))
    try:
        code = cli.main(["plan", *shlex.split(words)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    caught = capsys.readouterr()
    assert code == 2 and REFUSED[words] in caught.err
    assert len(caught.err.strip().splitlines()) == 1


def test_a_plan_end_to_end(capsys, monkeypatch, tmp_path):
    sizes = iter((5, 10, 15))
    made_up(monkeypatch, lambda row: next(sizes))
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
    made_up(monkeypatch, lambda row: 5 if "shards" in row.launch.traits else 20)
    file = tmp_path / "plan.json"
    words = ["--gpus", "8", "--gpu-memory", "12GiB", "--recipes", "ddp", "ddp+bf16", "--explain"]
    assert cli.main(["plan", *words, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "fits instead" not in text and "Predicted to fit instead, of " in text
    assert "ddp+bf16: 20.00 GiB of tensors, in forward at op" in text
    found = json.loads(file.read_text())
    assert {row["processes"] for row in found["tried"]} == {8}
    able = [row["recipe"] for row in found["tried"] if row["verdict"] == "fits"]
    assert able and all("zero" in name or "fsdp2" in name for name in able)


# ---- compiled rows: the eager row's prediction, with a note and a wide lower end ----

RTX = cards.find("RTX-4090")
PAIR = "ddp+bf16", "ddp+bf16+compile"


def made(size: float) -> object:
    """A step of GiB, half of which stays between steps, and of products and elementwise work."""
    product = prediction(1).work[0]
    wide = {"kind": "memory", "dtype": "", "flops": 0, "bytes": 10**9, "count": 900}
    work = [dataclasses.replace(product, flops=10**13, count=9),
            dataclasses.replace(product, **wide)]  # fmt: skip
    found = prediction(size, work=work)
    return dataclasses.replace(found, between=found.reserved // 2)


def judged(size: float) -> list[verdict.Fit]:
    rows = [asked(recipe) for recipe in PAIR]
    return [verdict.judge(row, eager.told(row, made(size)), RTX) for row in rows]


def test_a_compiled_row_is_found_where_its_eager_row_was_kept(tmp_path):
    plain, row = (asked(recipe) for recipe in PAIR)
    pool._keep(made(5), pool.path_of(plain, tmp_path))
    (found,) = pool.predict_all([row], tmp_path)
    assert found.recipe == str(row.recipe) and found.notes[0] == eager.NOTE
    assert found.reserved == 5 * GIB


def test_its_figures_are_the_eager_row_s_and_its_lower_ends_are_lower():
    plain, compiled = judged(10)
    assert compiled.need_bytes == plain.need_bytes and compiled.most_bytes >= plain.most_bytes
    assert compiled.seconds.total == plain.seconds.total
    assert compiled.seconds.high == plain.seconds.high
    assert compiled.seconds.low < plain.seconds.low < plain.seconds.total
    assert compiled.low_bytes < 0.6 * compiled.need_bytes < plain.low_bytes


def test_the_note_stands_near_the_verdict_and_below_the_table():
    _, compiled = judged(10)
    assert f"  {eager.NOTE}" in answer([compiled]) and eager.NOTE in check_line(compiled, None)
    assert any(eager.NOTE in note for note in short_notes([compiled]))
    graphs = asked("ddp+bf16+compile:mode=reduce-overhead")
    assert "pool of its CUDA graphs is not counted" in eager.note_of(graphs)
