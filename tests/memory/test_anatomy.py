"""The anatomy of real steps: the timeline, the modules, the laws; and the page drawn from them."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from conftest import TINY, living, settle

from harness import cli
from harness.memory import memory_breakdown
from harness.memory.dissect import take
from harness.memory.dissect.timeline import Stack, alike
from harness.memory.record import MEASURED as CATEGORIES
from harness.report import anatomy
from harness.resolve import resolve
from harness.result import BadResult
from harness.subjects.dit import presets
from harness.worker.meter import make_meter
from harness.worker.passes import Bench
from harness.worker.status import Reporter

PORTRAITS: dict[str, memory_breakdown.MemoryBreakdown] = {}
STRANGERS: dict[str, int] = {}
"""Bytes that lived in this process already: a trace counts what other tests have left, too."""
SPEC = dataclasses.replace(TINY, model="DiT-T/4", global_batch=4)


def tensor_bytes() -> int:
    tensors = [t for t in living() if not t.is_sparse and t.is_cpu]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.fixture
def taken(train_here, monkeypatch):
    """``taken(recipe) -> MemoryBreakdown`` of a real run in this process."""
    monkeypatch.setattr("harness.memory.dissect.taking.SIZE", {"cpu": 256})
    monkeypatch.setattr("harness.memory.dissect.taking.COPY_BYTES", {"cpu": 2**22})

    def go(recipe: str) -> memory_breakdown.MemoryBreakdown:
        if recipe not in PORTRAITS:
            spec = dataclasses.replace(SPEC, recipe=recipe)
            settle()  # what it keeps from the collector is not seen by the trace either
            STRANGERS[recipe] = tensor_bytes()
            run, log = train_here(spec, 2)
            bench = Bench(
                resolved=resolve(spec),
                folder=Path("unused"),
                reporter=Reporter(Path("unused"), 0),
                meter=make_meter(torch.device("cpu")),
                run=run,
                log=log,
            )
            PORTRAITS[recipe] = take(bench.resolved, run.trained, bench.look())
        return PORTRAITS[recipe]

    return go


@pytest.fixture
def plain(taken) -> memory_breakdown.MemoryBreakdown:
    return taken("single")


def test_a_step_is_followed_from_end_to_end(plain):
    line = plain.timeline
    assert [phase for _, phase in line.marks] == ["forward", "backward", "optimizer", "end"]
    assert line.op == sorted(line.op) and len(line.op) > 50
    assert set(line.bytes) == set(CATEGORIES)
    totals = [sum(v) for v in zip(*line.bytes.values(), strict=True)]
    assert max(totals) == line.peak_bytes > totals[-1]
    trainable = 4 * presets.trainable_count(presets.PRESETS["DiT-T/4"], classes=10)
    # Without accumulation gradients grow through backward: all are there at its end, none before.
    grads = dict(zip(line.op, line.bytes["gradients"], strict=True))
    begin = dict((phase, op) for op, phase in line.marks)
    assert max(v for op, v in grads.items() if op < begin["backward"]) == 0
    assert max(grads.values()) == pytest.approx(trainable, rel=0.01)
    assert line.bytes["optimizer_state"][0] == pytest.approx(2 * trainable, rel=0.01)


def test_looking_changes_nothing_and_the_peak_is_explained(plain):
    assert plain.timeline.peak_bytes == pytest.approx(plain.step_peak_bytes, rel=0.005)
    assert sum(lump.bytes for lump in plain.lumps) > 0.9 * plain.timeline.peak_bytes
    assert plain.timeline.peak_phase in ("forward", "backward")
    assert plain.timeline.peak_maker


def test_both_counts_of_the_activations_agree(plain):
    assert anatomy.agrees(plain) and plain.unsaved == 2 * 4 * 4 * 32 * 32 * 4
    assert not anatomy.agrees(dataclasses.replace(plain, saved_total=plain.saved_total * 9 // 10))
    made = {row.module: row.made for row in plain.kept}
    batch, tokens, hidden, depth = 4, plain.tokens, plain.hidden, plain.depth
    # A known module: fc1's output is one float32 tensor of four times the width a block.
    assert made["blocks.*.mlp.fc1"] == 4 * batch * tokens * 4 * hidden * depth
    assert plain.kept == sorted(plain.kept, key=lambda r: -max(r.made, r.saved))


def test_recomputing_keeps_less_and_the_counts_still_agree(taken, plain):
    less = taken("single+checkpoint")
    assert less.made_total < 0.4 * plain.made_total
    assert anatomy.agrees(less)


def test_a_tensor_that_is_kept_alive_unsaved_is_noticed(plain):
    more = [dataclasses.replace(row, made=2 * row.made) for row in plain.kept]
    answers = {q: a for q, a, _ in anatomy.sentences(plain)}
    assert answers["Two counts of the activations"].startswith("agree")
    answers = {q: a for q, a, _ in anatomy.sentences(dataclasses.replace(plain, kept=more))}
    assert answers["Two counts of the activations"].startswith("DISAGREE")


def test_inference_keeps_no_activations(plain):
    line = plain.inference
    assert max(line.bytes["gradients"]) == 0 and max(line.bytes["activations"]) < 2**20
    assert line.peak_bytes < plain.timeline.peak_bytes
    alone, trainable = plain.inference_alone, presets.PRESETS["DiT-T/4"]
    assert set(alone) == {"parameters", "activations", "workspace"}
    weights = 4 * presets.trainable_count(trainable, classes=10)
    ours = sum(alone.values()) - STRANGERS["single"]
    assert weights < ours < 2 * weights < line.peak_bytes


def test_the_products_of_forward_are_the_closed_form_s(plain):
    """Operations are counted one by one; presets has the sum in closed form."""
    products = ("addmm", "mm", "bmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")
    counted = sum(c.flops for c in plain.ops if c.phase == "forward" and c.op in products)
    shape = presets.PRESETS["DiT-T/4"]
    assert counted == pytest.approx(presets.forward_flops(shape, batch=4), rel=0.01)
    assert plain.peak_flops > 1e8 and plain.bandwidth > 1e8


def test_counting_what_is_saved_keeps_nothing_alive():
    """A hook that hands an output back as it is ties a knot that no collector unties."""
    import gc
    import weakref

    from harness.memory.dissect.timeline import saving

    module = torch.nn.Linear(4, 4)
    with saving(Stack(module), set()) as saved:
        out = module(torch.ones(2, 4)).exp()
    assert len(saved) >= 2
    storage = weakref.ref(out.untyped_storage())
    seen = weakref.ref(out)
    del out
    gc.collect()
    assert seen() is None and storage() is None


def test_modules_are_named_in_backward_too():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    stack, seen = Stack(module), []
    with stack.watching():
        out = module(torch.ones(2, 4))
        out.grad_fn.register_prehook(lambda grads: seen.append(stack.now()))
        out.sum().backward()
    assert seen == ["1"] and alike("blocks.3.mlp.fc1") == "blocks.*.mlp.fc1"


# -- the page --


def test_the_page_stands_alone_and_its_charts_are_drawings(plain, tmp_path):
    plain.write(tmp_path / "anatomy.json")
    again = memory_breakdown.load(tmp_path / "anatomy.json")
    assert again == plain
    assert anatomy.write(again, tmp_path) == [tmp_path / "anatomy.html"]
    page = (tmp_path / "anatomy.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for words in ("blocks.*.mlp.fc1", "Roofline", "peak", "agree within"):
        assert words in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 3
    for drawing in drawings:
        assert ET.fromstring(drawing).tag.endswith("svg")
        assert not any(word in drawing for word in ("nan", "inf,"))


def test_another_file_is_no_anatomy(tmp_path):
    path = tmp_path / "anatomy.json"
    for text in ("{", '{"schema": 99}', '{"schema": 1}'):
        path.write_text(text)
        with pytest.raises(BadResult, match=r"anatomy\.json"):
            memory_breakdown.load(path)


def test_the_command_is_the_real_worker_s(capsys, tmp_path):
    assert (
        cli.main(["anatomy", "zero2", "--device", "cpu", "--dry-run", "--out", str(tmp_path)]) == 0
    )
    line = capsys.readouterr().out
    assert "-m harness.train --recipe zero2" in line and line.rstrip().endswith("--anatomy")
