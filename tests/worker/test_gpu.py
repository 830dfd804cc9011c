"""Where there is a GPU: its meter against known tensors, its kernels, and a limit. Whether every
recipe runs there is for ``tests/calibrate/test_check_on_gpu.py``."""

from __future__ import annotations

import pytest
import torch
from conftest import launched

from harness.predict.attention import ORDERS, choose, preferred
from harness.result import Status
from harness.spec import Spec
from harness.worker.environment import attention
from harness.worker.meter import CudaMeter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


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


def test_offloaded_activations_leave_the_device():
    from strategies.activations.host import Host

    def run(blocks, x, c):
        for _ in range(8):
            x = (x * x).tanh()
        return x

    peaks = {}
    for name, runner in (("plain", run), ("host", Host(run))):
        x = torch.ones(16 * 2**18, device="cuda", requires_grad=True)
        out = runner(None, x, x.detach())
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.memory_allocated()
        out.sum().backward()
        assert x.grad.isfinite().all()
        del out, x
    assert peaks["host"] < peaks["plain"] - 32 * 2**20


def test_a_limit_is_an_ordinary_out_of_memory(tmp_path):
    spec = Spec(
        recipe="single", model="DiT-S/2", data="synthetic", global_batch=64, steps=1, device="cuda"
    )
    row = launched(spec, tmp_path, "--memory-limit", str(256 * 2**20))
    assert row.status is Status.GPU_OOM, f"{row.status} {row.reason}"
