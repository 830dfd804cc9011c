"""Weights and optimizer state in host memory in a prediction: where they are, and their copies.

Streamed blocks: two of them on the device, all on the host. torchao's optimizer: a real one, run on
a CPU, says what a GPU's host would hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch
from conftest import predictions

from harness.planner.uncertainty import class_of
from harness.prediction import read
from harness.resolve import resolve
from harness.spec import Spec
from strategies.base import pinned_block

pytestmark = pytest.mark.thorough

SPEC = Spec(recipe="", model="DiT-S/4:depth=8", data="synthetic", global_batch=2, device="cuda")
BLOCK = 4 * (4 * 384**2 + 2 * 4 * 384**2 + 6 * 384**2)
"""Bytes of a block's matrices in float32; its biases are less than a hundredth of that."""


def copied(found, phase: str, kind: str = "streamed") -> int:
    done = [w for w in found["work"] if (w["kind"], w["phase"]) == (kind, phase)]
    return sum(w["count"] * w["bytes"] for w in done)


def test_the_device_holds_two_of_the_streamed_blocks(tmp_path):
    recipes = ["lora", "block_swap:blocks=6+lora", "block_swap:blocks=8", "bf16+cast+lora",
               "block_swap:blocks=8+adafactor+optimizer_in_backward"]  # fmt: skip
    specs = [dataclasses.replace(SPEC, recipe=f"single+{r}", grad_clip=0.0) for r in recipes]
    cases = [dataclasses.asdict(spec) for spec in specs]
    plain, frozen, trained, cast, fused = predictions(cases, tmp_path)
    for found in (plain, frozen, trained, cast, fused):
        assert found["method"] == "trace", found["reason"]

    def weights(found) -> int:
        return found["steady"]["categories"]["parameters"]

    assert weights(plain) - weights(frozen) == pytest.approx((6 - 2) * BLOCK, rel=0.02)
    held, least = (found["host_steady"]["bytes"] for found in (frozen, plain))
    assert held - least == pytest.approx(6 * BLOCK, rel=0.05)
    assert copied(plain, "forward") == 0
    # The last of them waits on the device for backward to come.
    assert copied(frozen, "forward") == pytest.approx(6 * BLOCK, rel=0.02)
    assert copied(frozen, "backward") == pytest.approx(5 * BLOCK, rel=0.02)
    # What works on tokens, two thirds of a block, takes a byte in the place of four.
    assert weights(plain) - weights(cast) == pytest.approx(8 * BLOCK * 2 / 3 * 3 / 4, rel=0.03)
    # Where they train a gradient leaves for each weight; moments are in host memory.
    assert copied(trained, "backward") == pytest.approx((7 + 8) * BLOCK, rel=0.02)
    host = trained["host_steady"]["categories"]
    assert host["optimizer_state"] == pytest.approx(2 * 8 * BLOCK, rel=0.02)
    assert trained["steady"]["categories"]["optimizer_state"] < 2 * BLOCK
    # Stepped within backward, weights leave in the place of gradients; no state is on the host.
    assert copied(fused, "backward") == pytest.approx((7 + 8) * BLOCK, rel=0.02)
    assert weights(fused) == pytest.approx(weights(trained), rel=0.001)
    assert fused["host_steady"]["bytes"] == pytest.approx(least + 8 * BLOCK, rel=0.02)
    assert 0 < fused["steady"]["categories"]["optimizer_state"] < BLOCK / 10


@contextlib.contextmanager
def host_without_a_gpu():
    """torchao's host optimizer on a CPU: streams do nothing; the sizes of pinned tensors are
    noted, which no CPU can pin."""
    pinned, empty_like = [], torch.empty_like

    def noting(like, *given, pin_memory=False, **more):
        pinned.extend([like.nbytes] if pin_memory else [])
        return empty_like(like, *given, **more)

    with (
        mock.patch.object(torch, "empty_like", noting),
        mock.patch.object(torch.cuda, "Stream", mock.MagicMock),
        mock.patch.object(torch.cuda, "current_stream", mock.MagicMock),
        mock.patch.object(torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
    ):
        yield pinned


def stepped(make, weights: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Copies of ``weights`` after two steps of the optimizer that ``make`` makes of them."""
    own = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = make(own, lr=1e-3)
    for _ in range(2):
        sum((p - 1).square().sum() for p in own).backward()
        optimizer.step()
        optimizer.zero_grad()
    return own, optimizer


def test_an_optimizer_in_host_memory_is_predicted_as_torchao_makes_it(tmp_path):
    pytest.importorskip("torchao")
    from strategies.optimizers.torchao_adamw import HostAdamW

    specs = [dataclasses.replace(SPEC, recipe=f"single+bf16{more}", grad_clip=0.0)
             for more in ("", "+offload_adamw")]  # fmt: skip
    plain, found = predictions([dataclasses.asdict(spec) for spec in specs], tmp_path)
    assert found["method"] == "trace", found["reason"]

    module = resolve(specs[0]).subject.build(0, "awake")
    weights = [p.detach() for p in module.parameters() if p.requires_grad]
    with host_without_a_gpu() as pinned:
        real, optimizer = stepped(HostAdamW, weights)
    plainly, _ = stepped(functools.partial(torch.optim.AdamW, fused=True), weights)
    assert all(map(torch.equal, real, plainly))
    moments = [t for s in optimizer.state.values() for t in s.values()]
    large = [w.nbytes for w in weights if w.numel() >= 4096]
    assert sorted(pinned) == sorted(2 * large), "a copy of each large weight, and of its gradient"

    # The smallest weights' moments stay on the device, less than a thousandth of all.
    host = sum(map(pinned_block, pinned)) + sum(t.nbytes for t in moments)
    assert found["host_steady"]["bytes"] == pytest.approx(host, rel=2e-3)
    saved = plain["between"] - found["between"]
    assert saved == pytest.approx(2 * sum(large), rel=2e-3)
    assert found["steady"]["categories"]["gradients"] == plain["steady"]["categories"]["gradients"]
    # Gradients leave in backward; weights come back while the host steps the next ones.
    for phase in ("backward", "optimizer"):
        assert copied(found, phase) == sum(large) and copied(plain, phase) == 0
    moved = copied(found, "optimizer", "host")
    assert moved == pytest.approx(8 * sum(large), rel=1e-3), "weight, gradient, two moments: twice"
    kinds = [class_of(resolve(spec).launch.traits, read(one))
             for spec, one in zip(specs, (plain, found), strict=True)]  # fmt: skip
    assert kinds == ["one GPU", "offloaded"]
