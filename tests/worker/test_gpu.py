"""Where there is a GPU: real runs on one, and its meter against known tensors."""

from __future__ import annotations

import pytest
import torch
from conftest import launched

from harness.predict.attention import ORDERS, choose, preferred
from harness.resolve import resolve
from harness.result import Status
from harness.spec import Spec
from harness.system.machine import examine
from harness.system.requirements import obstacle
from harness.worker.environment import attention
from harness.worker.meter import CudaMeter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# DiT-S: the moments of a smaller model are not large enough to be paged.
RECIPES = [
    "single", "single+bf16", "single+tf32", "single+checkpoint", "ddp", "zero2", "zero3",
    "zero2_offload", "single+adam8bit", "single+adam8bit:lib=torchao", "single+adam4bit",
    "single+paged_adam8bit", "single+offload_adamw", "single+adafactor", "single+muon+bf16",
    "single+optimizer_in_backward+adam8bit", "single+lora+adam8bit+checkpoint", "single+dora",
    "single+qlora+bf16", "single+difffit", "single+controlnet", "single+prune+bf16",
    "single+prune_structured+bf16", "single+bf16+sparse24", "zero3+lora", "zero2+adam8bit+bf16",
    "ddp+compress:kind=fp16", "ddp+compress:kind=powersgd", "ddp+topk", "ddp+onebit_adam",
    "single+sgd:momentum=0.0+sparse_embedding",
    "zero3_offload", "single+fp16", "zero2+fp16", "single+bf16_pure+adamw_bf16", "zero2+bf16_pure",
    "single+fp8", "single+attend", "single+attend:kernel=efficient",
    "single+bf16+attend:kernel=flash", "single+bf16+attend:kernel=cudnn",
    "single+bf16+attend:kernel=flex", "single+attend:kernel=math",
    "single+checkpoint:keep=products",
    "single+checkpoint:keep=nested", "single+checkpoint:keep=nothing",
    "single+bf16_pure+adamw_bf16:write=kahan", "ddp+compress:kind=bf16",
    "single+offload_activations", "single+checkpoint+offload_activations:what=checkpoints",
    "single+compile", "single+compile:scope=model", "single+compile:budget=0.5",
    "single+compile+checkpoint+bf16", "zero2+compile+bf16",
]  # fmt: skip
SEVERAL = {
    2: ["fsdp2", "fsdp2:reshard=off", "fsdp2+bf16+checkpoint+accumulate", "fsdp2+fp16",
        "fsdp2_offload+bf16", "fsdp2+compile", "fsdp2+adam8bit:lib=torchao+checkpoint"],
    4: ["hsdp", "hsdp+bf16", "fsdp2:reshard=2"],
}  # fmt: skip
"""Recipes of engines that need several GPUs, by how many."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return examine(tmp_path_factory.mktemp("results"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_one_gpu_with_evidence(recipe, here, tmp_path):
    spec = Spec(
        recipe=recipe, model="DiT-S/4", data="synthetic", global_batch=8, steps=3, device="cuda"
    )
    if lack := obstacle(resolve(spec), here):
        pytest.skip(lack.reason)
    row = launched(spec, tmp_path)
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert row.meter == "cuda" and row.ranks[0].phases["steady"].reserved > 0


@pytest.mark.parametrize(
    ("processes", "recipe"), [(n, recipe) for n, recipes in SEVERAL.items() for recipe in recipes]
)
def test_a_recipe_runs_on_several_gpus_with_evidence(processes, recipe, here, tmp_path):
    spec = Spec(
        recipe=recipe, model="DiT-S/4", data="synthetic", global_batch=8, steps=3, device="cuda",
        processes=processes,
    )  # fmt: skip
    if lack := obstacle(resolve(spec), here):
        pytest.skip(lack.reason)
    row = launched(spec, tmp_path)
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"


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
