"""The anatomy of real steps: the timeline, the modules, the laws; and the page drawn from them."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import TINY, OnDemand, forget, trained_here

from harness import cli
from harness.memory import memory_breakdown
from harness.memory.dissect import take
from harness.memory.record import MEASURED as CATEGORIES
from harness.report import anatomy
from harness.resolve import resolve
from harness.result import BadResult
from harness.worker.meter import make_meter

SPEC = dataclasses.replace(TINY, model="DiT-T/4", global_batch=4)


def saved_bytes(step: Callable[[], None], module: torch.nn.Module) -> int:
    """Bytes that autograd saves in the forward of one step, by its own hooks, each storage once."""
    weights = {p.untyped_storage()._cdata for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage, in_backward = tensor.untyped_storage(), torch._C._current_graph_task_id() != -1
        if storage._cdata not in weights and not in_backward:
            saved.setdefault(storage._cdata, storage.nbytes())
        return tensor.detach()  # a node that saves its own output would stay alive for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(saved.values())


@pytest.fixture(scope="module")
def taken() -> Iterator[OnDemand]:
    """Recipe -> the breakdown of a real run in this process, and what autograd's hooks count in one
    more step."""

    def go(recipe: str) -> tuple[memory_breakdown.MemoryBreakdown, int]:
        spec = dataclasses.replace(SPEC, recipe=recipe)
        run = trained_here(spec, 2)
        run.meter = make_meter(torch.device("cpu"))
        return take(run), saved_bytes(run.step, run.module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.memory.dissect.taking.SIZE", {"cpu": 256})
        patch.setattr("harness.memory.dissect.taking.COPY_BYTES", {"cpu": 2**22})
        yield OnDemand(go)
    forget()


@pytest.fixture
def plain(taken) -> memory_breakdown.MemoryBreakdown:
    return taken["single"][0]


def test_a_step_is_followed_from_end_to_end(plain):
    line = plain.timeline
    assert [phase for _, phase in line.marks] == ["forward", "backward", "optimizer", "end"]
    assert line.op == sorted(line.op) and len(line.op) > 50
    assert set(line.bytes) == set(CATEGORIES)
    totals = [sum(v) for v in zip(*line.bytes.values(), strict=True)]
    assert max(totals) == line.peak_bytes > totals[-1]
    trainable = 4 * resolve(SPEC).subject.survey.sizes.total
    # Without accumulation gradients grow through backward: all are there at its end, none before.
    grads = dict(zip(line.op, line.bytes["gradients"], strict=True))
    begin = dict((phase, op) for op, phase in line.marks)
    assert max(v for op, v in grads.items() if op < begin["backward"]) == 0
    assert max(grads.values()) == pytest.approx(trainable, rel=0.01)
    assert line.bytes["optimizer_state"][0] == pytest.approx(2 * trainable, rel=0.01)


def test_the_activations_of_a_module_are_its_outputs(plain):
    made = {row.module: row.made for row in plain.kept}
    batch, tokens, hidden, depth = 4, plain.tokens, plain.hidden, plain.depth
    # A known module: fc1's output is one float32 tensor of four times the width a block.
    assert made["blocks.*.mlp.fc1"] == 4 * batch * tokens * 4 * hidden * depth
    assert plain.kept == sorted(plain.kept, key=lambda r: -r.made)


@pytest.mark.parametrize("recipe", ["single", "single+checkpoint"])
def test_the_trace_and_autograd_count_the_same_activations(taken, recipe):
    """The batch and the model's output, of its two halves, are alive without being saved."""
    breakdown, saved = taken[recipe]
    made = sum(kept.made for kept in breakdown.kept)  # alive when backward begins, by the trace
    unsaved = 2 * 4 * 4 * 32 * 32 * 4
    assert max(abs(made - saved) - unsaved, 0) < 0.03 * max(made, saved)


def test_the_products_of_forward_are_the_closed_form_s(plain):
    """Operations are counted one by one; a DiT's survey has the sum in closed form."""
    products = ("addmm", "mm", "bmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu")
    counted = sum(c.flops for c in plain.ops if c.phase == "forward" and c.op in products)
    assert counted == pytest.approx(4 * resolve(SPEC).subject.survey.flops, rel=0.01)
    assert plain.peak_flops > 1e8 and plain.bandwidth > 1e8


# -- the page --


def test_the_page_stands_alone_and_its_charts_are_drawings(plain, tmp_path):
    plain.write(tmp_path / "anatomy.json")
    again = memory_breakdown.load(tmp_path / "anatomy.json")
    assert again == plain
    assert anatomy.write(again, tmp_path) == [tmp_path / "anatomy.html"]
    page = (tmp_path / "anatomy.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for words in ("blocks.*.mlp.fc1", "Roofline", "peak"):
        assert words in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawings) == 2
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
