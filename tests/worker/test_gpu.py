"""A GPU's meter, kernels and limit; every recipe there is for ``./run.sh run --suite check``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import launched

from harness.planner.overhead import ORDERS, choose, preferred
from harness.resolve import resolve
from harness.result import Status
from harness.spec import Spec
from harness.system.machine import examine
from harness.system.requirements import obstacle
from harness.worker.environment import attention
from harness.worker.meter import CudaMeter
from strategies.activations.offload_activations import Host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return examine(tmp_path_factory.mktemp("results"))


@pytest.mark.thorough
def test_what_zero_resets_while_it_is_made_is_not_lost(here, tmp_path):
    """Its ``prepare`` holds weights, master and a clone: more than what stands when it is over."""
    spec = Spec(recipe="zero2", model="DiT-B/4", data="synthetic", global_batch=2, steps=1,
                device="cuda")  # fmt: skip
    if lack := obstacle(resolve(spec), here):
        pytest.skip(lack.text)
    row = launched(spec, tmp_path)
    weights = 4 * row.parameters
    assert row.ranks[0].phases["prepare"].allocated > 2 * weights


def test_an_average_in_host_memory_is_staged_through_pinned_buffers(tmp_path):
    from strategies.step.ema import Staging

    source = torch.arange(2.0**20, device="cuda")
    staging = Staging(source.device, source.dtype, 2**16)
    assert all(buffer.is_pinned() for buffer in staging.buffers)
    assert torch.cat([p.clone() for p in staging.read(source)]).equal(source.cpu())


def test_the_meter_counts_tensors():
    meter = CudaMeter(torch.device("cuda", 0))
    meter.enter("a")
    kept = torch.ones(64 * 2**18, device="cuda")
    meter.enter("b")
    del kept
    meter.close()
    assert meter.phases["a"].allocated >= 64 * 2**20
    assert meter.phases["b"].allocated >= 64 * 2**20  # it was there when b began


def test_torch_takes_the_kernels_of_attention_that_predictions_take():
    kind = preferred(torch.cuda.get_device_capability())
    if kind == "cudnn" and (torch.backends.cudnn.version() or 0) <= 91500:
        kind = "flash"  # the wheels of CUDA 12: what a plan says of them
    for dtype, backend in attention(torch.device("cuda", 0)).items():
        assert backend.lower().startswith(choose(kind, dtype, 64, False, ORDERS[kind])), dtype


def squares(blocks: Any, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """32 operations, each of which keeps a tensor as large as ``x``."""
    for _ in range(16):
        x = (x * x).tanh()
    return x


def test_offloaded_activations_leave_the_device_and_come_back_as_they_were():
    """Copies go on beside what computes: none is read, or its memory another's, too early."""
    peaks, gradients = {}, {}
    for name, runner in (("plain", squares), ("host", Host(squares))):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        x = torch.linspace(0, 2, 16 * 2**18, device="cuda", requires_grad=True)
        runner([torch.nn.Identity()], x, x.detach()).sum().backward()
        # Active, not allocated: with what waits for another stream. Nothing has waited for the GPU.
        peaks[name] = torch.cuda.memory_stats()["active_bytes.all.peak"]
        gradients[name] = x.grad.cpu()
        del x
    assert peaks["host"] < peaks["plain"] - 64 * 2**20
    assert gradients["host"].equal(gradients["plain"]) and gradients["plain"].any()


def test_a_limit_is_an_ordinary_out_of_memory(tmp_path):
    spec = Spec(
        recipe="single", model="DiT-S/2", data="synthetic", global_batch=64, steps=1, device="cuda"
    )
    row = launched(spec, tmp_path, "--memory-limit", str(256 * 2**20))
    assert row.status is Status.GPU_OOM, f"{row.status} {row.reason}"
