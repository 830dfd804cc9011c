"""Where there is a GPU: its meter against known tensors, its kernels, and a limit. Whether every
recipe runs there is for ``tests/calibrate/test_check_on_gpu.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import launched

from harness.planner.overhead import ORDERS, choose, preferred
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import Spec
from harness.system.machine import examine
from harness.system.requirements import obstacle
from harness.worker.environment import attention
from harness.worker.meter import CudaMeter
from strategies.activations.offload_activations import Host
from strategies.base import pinned_block
from tests.made.offloaded import gradient_of, squares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SEVERAL = {
    2: ["fsdp2", "fsdp2:reshard=off", "fsdp2+bf16+checkpoint+accumulate", "fsdp2+fp16",
        "fsdp2+qlora+bf16", "fsdp2+optimizer_in_backward",
        "fsdp2_offload+bf16", "fsdp2+compile", "fsdp2+checkpoint+compile",
        "fsdp2+adam8bit:lib=torchao+checkpoint"],
    4: ["hsdp", "hsdp+bf16", "fsdp2:reshard=2"],
}  # fmt: skip
"""Recipes of engines that need several GPUs, by how many."""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return examine(tmp_path_factory.mktemp("results"))


def trained(spec: Spec, recipes: Sequence[str], here, folder: Path) -> list[Result]:
    """Return the results of ``spec`` with each recipe; skip the test if one cannot run here."""
    rows = []
    for number, recipe in enumerate(recipes):
        one = dataclasses.replace(spec, recipe=recipe)
        if lack := obstacle(resolve(one), here):
            pytest.skip(lack.text)
        rows.append(launched(one, folder / str(number)))
        assert rows[-1].status is Status.OK, rows[-1].log_tail
    return rows


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


def test_the_history_of_a_rank_names_python_s_lines(tmp_path):
    import pickle

    from harness.worker import loop

    with loop.allocator_history(tmp_path, 0):
        kept = torch.ones(2**20, device="cuda")
    found = pickle.loads((tmp_path / "snapshot.rank0.pickle").read_bytes())
    frames = [f for trace in found["device_traces"][0] for f in trace.get("frames", ())]
    assert kept.numel() and any("test_gpu.py" in frame["filename"] for frame in frames)
    assert not any(frame["filename"].endswith((".cpp", ".so")) for frame in frames)


def test_an_average_in_host_memory_is_staged_through_pinned_buffers(tmp_path):
    from strategies.step.ema import Staging

    source = torch.arange(2.0**20, device="cuda")
    staging = Staging(source.device, source.dtype, 2**16)
    assert all(buffer.is_pinned() for buffer in staging.buffers)
    assert torch.cat([p.clone() for p in staging.read(source)]).equal(source.cpu())


def test_pinned_blocks_are_what_predictions_take_them_for():
    from harness.worker.meter import pinned_bytes

    before = pinned_bytes()
    kept = torch.empty(9 * 2**20, dtype=torch.uint8, pin_memory=True)
    assert kept.is_pinned() and pinned_bytes() - before in (0, pinned_block(kept.nbytes))


def test_a_saved_tensor_of_the_host_stays_there(tmp_path):
    from strategies.activations.offload_activations import Host

    def run(blocks, x, c):
        return x * c  # c lies in host memory, a number that CUDA takes as an argument

    weight = torch.nn.Linear(1, 1, device="cuda")
    x = torch.ones(2**20, device="cuda", requires_grad=True)
    Host(run)([weight], x, torch.tensor(2.0)).sum().backward()
    assert x.grad.eq(2).all()


def test_torch_and_nvidia_smi_name_the_same_cards(here):
    """By identifiers, whatever the order and whichever are visible."""
    told = [card["uuid"] for card in here.probe["gpus"]]
    if any(gpu.uuid for gpu in here.gpus):
        assert all(uuid in gpu.uuid for uuid, gpu in zip(told, here.gpus, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("processes", "recipe"), [(n, recipe) for n, recipes in SEVERAL.items() for recipe in recipes]
)
def test_a_recipe_runs_on_several_gpus_with_evidence(processes, recipe, here, tmp_path):
    spec = Spec(
        recipe=recipe, model="DiT-S/4", data="synthetic", global_batch=8, steps=3, device="cuda",
        processes=processes,
    )  # fmt: skip
    if lack := obstacle(resolve(spec), here):
        pytest.skip(lack.text)
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
    peaks = {}
    for name, runner in (("plain", squares), ("host", Host(squares))):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        gradient = gradient_of(runner, "cuda", 16 * 2**18)
        # Active, not allocated: with what waits for another stream. Nothing has waited for the GPU.
        peaks[name] = torch.cuda.memory_stats()["active_bytes.all.peak"]
        assert gradient.isfinite().all()
        del gradient
    assert peaks["host"] < peaks["plain"] - 64 * 2**20


def test_a_limit_is_an_ordinary_out_of_memory(tmp_path):
    spec = Spec(
        recipe="single", model="DiT-S/2", data="synthetic", global_batch=64, steps=1, device="cuda"
    )
    row = launched(spec, tmp_path, "--memory-limit", str(256 * 2**20))
    assert row.status is Status.GPU_OOM, f"{row.status} {row.reason}"
