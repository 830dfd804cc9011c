"""Compressed gradients, on one replica of DDP in this process: bytes counted, evidence lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import SUBJECT
from torch.nn.parallel import DistributedDataParallel

from harness.memory.traced_step import register_living
from harness.memory.tracer import Tracer
from strategies import initial, parse
from strategies.base import NotInForce, Settings
from strategies.communication import compress, topk
from strategies.communication.compress import Compress
from strategies.communication.topk import TopK
from strategies.engine import TrainingRun

LAUNCH = parse("ddp").launch("cpu", 1, SUBJECT)


def dense(self, run):
    """torch's own all-reduce, counted."""
    hooks, _, counted = compress.counted_hooks()
    return compress.Compression(run, lambda bucket: hooks.allreduce_hook(None, bucket), counted)


class Forgetful(topk.TopKHook):
    """Keeps nothing back."""

    def _largest(self, place, gradient):
        kept, where = super()._largest(place, gradient)
        self.left[place] = torch.zeros_like(gradient)
        return kept, where


LOST = {
    "no hook at all": (Compress(), lambda *_: None),
    "dense for fp16": (Compress(kind="fp16"), dense),
    "bf16 for fp16": (Compress(kind="fp16"), lambda _, t: compress.cast(t, "bf16")),
    "dense for powersgd": (Compress(kind="powersgd"), dense),
    "another rank": (Compress(kind="powersgd"), lambda _, t: compress.PowerSgd(t, 2)),
    "no top-k hook": (TopK(), lambda *_: None),
    "dense for top-k": (TopK(), dense),
    "more is sent": (TopK(), lambda _, t: topk.TopKHook(t, 0.02)),
    "the rest is forgotten": (TopK(), lambda _, t: Forgetful(t, 0.01)),
}
"""What happened instead -> (strategy, its ``attach``)."""


@pytest.fixture
def group(tmp_path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def trained_with(strategy, steps: int = 4) -> TrainingRun:
    """A tiny DiT under DDP with ``strategy``'s hook, trained for some steps by plain SGD."""
    module = initial.build(SUBJECT, 0, "awake").eval()  # no label is withheld
    ddp = DistributedDataParallel(module)
    make = getattr(strategy, "make_optimizer", lambda *_: None)
    weights = [p for p in module.parameters() if p.requires_grad]
    optimizer = make(weights, Settings(), LAUNCH) or torch.optim.SGD(weights, lr=0.1)
    run = TrainingRun(
        accelerator=SimpleNamespace(num_processes=1, scaler=None),
        model=ddp,
        module=module,
        optimizer=optimizer,
        launch=LAUNCH,
        settings=Settings(),
        attached={},
    )
    attached = strategy.attach(run)
    if attached is not None:
        run.attached[strategy.name] = attached
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x_BCHW = torch.randn(2, 4, 32, 32, generator=generator)
        index_B = torch.tensor([3, 7])
        ddp(x_BCHW, index_B, index_B).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for kept in run.attached.values():
            kept.after_step()
        run.optimizer_steps += 1
    return run


@pytest.mark.parametrize(
    ("strategy", "low", "high"),
    [
        (Compress(kind="fp16"), 0.5, 0.5),
        (Compress(kind="powersgd", rank=1), 0.01, 0.05),
        (TopK(keep=0.1), 0.2, 0.201),
    ],
    ids=str,
)
def test_bytes_on_the_wire_are_counted(strategy, low, high, group):
    facts = strategy.evidence(trained_with(strategy))
    assert low <= facts["wire_bytes"] / facts["dense_bytes"] <= high


@pytest.mark.parametrize("strategy", [Compress(), TopK()], ids=str)
def test_buckets_that_a_hook_was_given_are_counted_once(strategy, group):
    """By DDP's books, and not again where Python still holds a tensor of one."""
    run = trained_with(strategy)
    run.accelerator.device = torch.device("cpu")
    held = run.engine.held(run)
    found = Tracer({"cpu": "device"})
    register_living(found, run)
    buckets = [s.size for s in found.record.storages if s.category == "buckets"]
    assert held.hidden > 0 and buckets == [held.hidden]
    assert held.seen and not held.seen & found._live.keys()


def test_what_top_k_keeps_back_and_what_it_sends_is_the_whole_gradient(group):
    run = trained_with(TopK(keep=0.1), steps=1)
    exact = trained_with(SimpleNamespace(name="none", attach=lambda _: None), steps=1)
    hook = run.attached["topk"]
    start = trained_with(SimpleNamespace(name="none", attach=lambda _: None), steps=0)
    parts = (m.module.parameters() for m in (run, exact, start))
    for i, (sparse, dense, first) in enumerate(zip(*parts, strict=True)):
        if sparse.requires_grad:
            sent, full = (first - sparse) / 0.1, (first - dense) / 0.1
            whole = sent + hook.left[i].view_as(sent)
            torch.testing.assert_close(whole, full, rtol=1e-4, atol=1e-5)


def test_what_is_kept_back_survives_a_resume(group, tmp_path):
    for strategy in (TopK(), Compress(kind="powersgd")):
        hook = trained_with(strategy).attached[strategy.name]
        torch.save(hook.state_dict(), tmp_path / "kept.pt")
        again = trained_with(strategy, steps=0).attached[strategy.name]
        again.load_state_dict(torch.load(tmp_path / "kept.pt", weights_only=True))
        kept = list(hook.tensors())
        assert any(tensor.any() for tensor in kept), strategy
        for mine, saved in zip(kept, again.tensors(), strict=True):
            assert torch.equal(mine, saved)


@pytest.mark.parametrize("case", LOST)
def test_evidence_is_lost_when_the_hook_is_another(case, group, monkeypatch):
    strategy, attach = LOST[case]
    monkeypatch.setattr(type(strategy), "attach", attach)
    run = trained_with(strategy)
    with pytest.raises(NotInForce):
        strategy.evidence(run)


def test_the_dense_steps_before_powersgd_prove_nothing(group):
    strategy = Compress(kind="powersgd")
    with pytest.raises(NotInForce, match="first 2 steps are dense"):
        strategy.evidence(trained_with(strategy, steps=2))
    assert strategy.evidence(trained_with(strategy, steps=3))["wire_bytes"] > 0
