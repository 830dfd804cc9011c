"""Where tensors are kept, told by an engine's lists on a CPU and by devices on a GPU."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, OnDemand, launchable, living
from conftest import traced as traced_apart

from harness.memory.traced_step import trace_step
from harness.memory.tracer import BY_ENGINE, Tracer
from harness.worker.loop import optimizer_step
from strategies.inventory import AllocationScope, TensorInventory

RECIPES = ("zero2_offload", "zero3_offload+bf16", "ddp+ema:place=cpu")
OFTEN = {*RECIPES} - {"zero3_offload+bf16"}
MIB = 2**20
LARGEST = 4 * 1001 * 128
"""Bytes of the largest gradient: the table of labels."""


class Library:
    """Sends a tensor out of host memory through a buffer on the device, as a GPU would."""

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        return torch.cat([shard], out=torch.empty_like(shard))

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)


MAKERS = [
    AllocationScope(Library, "gather", "gathered", place="device"),
    AllocationScope(Library, "out", "", (), "host"),
]


def followed(work, *hosted: torch.Tensor):
    """The tracer of ``work`` in forward, with these tensors in host memory."""
    tracer = Tracer({"cpu": "device"})
    for tensor in hosted:
        tracer.see(tensor, "before")
    tracer.keep_on("host", hosted)
    tracer.enter("forward")
    with tracer.watching(MAKERS), tracer:
        kept = work()
    return tracer, kept


def by_size(tracer: Tracer) -> dict[int, str]:
    """Size in floats -> pool, of tensors that an op of the work made."""
    return {s.size // 4: s.pool for s in tracer.record.storages if s.phase == "forward"}


def test_what_is_made_of_host_tensors_alone_is_there_too():
    host, device = torch.ones(64), torch.ones(48)

    def work():
        return host[:32] * 2, device[:16] + 1, torch.zeros(8), host[:4].sum()

    tracer, _ = followed(work, host)
    # A view of what was not seen before is seen with it.
    assert by_size(tracer) == {32: "host", 16: "device", 48: "device", 8: "device", 1: "host"}
    assert not tracer.places.joined


def test_a_method_that_moves_names_the_place():
    host, device = torch.ones(64), torch.ones(48)
    tracer, _ = followed(lambda: (Library().out(device), Library().gather(host)), host)
    assert by_size(tracer)[48] == "host"
    gathered = [s for s in tracer.record.storages if s.category == "gathered"]
    # The buffer, and the copy on the device that a CPU leaves out.
    assert [(s.size, s.pool) for s in gathered] == [(256, "device"), (256, "device")]
    assert sum(s.freed_in is not None for s in gathered) == 1
    assert not tracer.places.joined


def traced(train_here, recipe: str, monkeypatch=None, lie=None):
    left = living()
    run = train_here(TINY.__class__(recipe=recipe, model="DiT-T/4", global_batch=8), 2)
    if lie:
        engine, held = type(run.engine), run.engine.held(run)
        wrong = TensorInventory(held.tensors, host=tuple(lie(run)))
        monkeypatch.setattr(engine, "held", lambda self, run: wrong)
    step = run.optimizer_steps
    held = [*vars(run.feed.dataset).values(), *left]
    return trace_step(run, "cpu", lambda: optimizer_step(run, step), held)


def test_an_average_in_host_memory_leaves_the_device(train_here):
    plain, moved = (traced(train_here, f"single{part}") for part in ("", "+ema:place=cpu"))
    assert plain.host is None and plain.placed_by == moved.placed_by == BY_ENGINE
    assert (moved.ema, moved.host.ema) == (0, plain.ema)
    assert moved.total == pytest.approx(plain.total - plain.ema, rel=0.01)
    assert moved.everywhere == pytest.approx(plain.everywhere, rel=0.01)


def test_activations_in_host_memory_leave_the_device(train_here):
    plain, moved = (traced(train_here, f"single{part}") for part in ("", "+offload_activations"))
    assert moved.host.activations > 0.5 * plain.activations
    assert moved.beyond_state < 0.7 * plain.beyond_state
    assert moved.placed_by == BY_ENGINE


def test_weights_said_to_be_in_host_memory_save_nothing(train_here, monkeypatch):
    true = traced(train_here, "single")
    said = traced(train_here, "single", monkeypatch, lambda t: list(t.module.parameters()))
    assert said.placed_by.startswith("unknown") and said.host is None
    assert said.total == pytest.approx(true.total, rel=0.01)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> OnDemand:
    """Recipe -> device -> what ``tests.children.traced`` found."""
    spec = {"model": "DiT-T/8", "global_batch": 8, "processes": 2, "data": "synthetic"}

    def look(recipe: str) -> dict[str, dict]:
        cases = [{**spec, "recipe": recipe, "device": device} for device in ("cpu", "cuda")]
        found = traced_apart("placed", cases, tmp_path_factory.mktemp("placed"))
        return dict(zip(("cpu", "cuda"), found, strict=True))

    return OnDemand(look)


@pytest.mark.parametrize("recipe", launchable(RECIPES, OFTEN))
def test_the_engine_s_lists_name_the_tensors_that_a_gpu_would_have_in_host_memory(recipe, places):
    count, wrong = places[recipe]["cuda"]["engine"]
    assert count >= 6 and wrong == []


@pytest.mark.parametrize(("words", "sign"), [("weights too", "host: ["), ("nothing", "device: [")])
@pytest.mark.parametrize("recipe", launchable(RECIPES[:2], OFTEN))
def test_lists_that_are_wrong_are_noticed(recipe, words, sign, places):
    _, wrong = places[recipe]["cuda"][words]
    assert any(line.startswith(sign) for line in wrong)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("recipe", launchable(RECIPES, OFTEN))
def test_a_cpu_s_places_hold_what_a_gpu_s_do(recipe, place, places):
    """By lists and rules on the one, by devices on the other; kernels' scratch differs, and so may
    a gradient that DeepSpeed copies to the device to convert it there."""
    here, there = (places[recipe][device][place] for device in ("cpu", "cuda"))
    assert there["total"] > MIB / 4
    for name in ("parameters", "optimizer_state", "ema"):
        # A GPU's average in host memory is fed through two small pinned buffers (``staging``).
        slack = MIB if (name, place) == ("ema", "host") else 0
        assert here[name] == pytest.approx(there[name], rel=0.01, abs=MIB / 64 + slack), name
    assert abs(here["gradients"] - there["gradients"]) <= 1.01 * LARGEST
