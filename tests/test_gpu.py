"""Where there is a GPU: real runs on one, and its meter against known tensors."""

from __future__ import annotations

import pytest
import torch
from conftest import launched

from harness.meter import CudaMeter
from harness.result import Status
from harness.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RECIPES = [
    "single", "single+bf16", "single+tf32", "single+checkpoint", "ddp", "zero2", "zero3",
    "zero3_offload",
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_one_gpu_with_evidence(recipe, tmp_path):
    spec = Spec(
        recipe=recipe, model="DiT-T/4", data="synthetic", global_batch=8, steps=3, device="cuda"
    )
    row = launched(spec, tmp_path)
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert row.meter == "cuda" and row.ranks[0].phases["steady"].reserved > 0


def test_the_meter_counts_tensors():
    meter = CudaMeter(torch.device("cuda", 0))
    meter.enter("a")
    kept = torch.ones(64 * 2**18, device="cuda")
    meter.enter("b")
    del kept
    meter.close()
    assert meter.phases["a"].allocated >= 64 * 2**20
    assert meter.phases["b"].allocated >= 64 * 2**20  # it was there when b began
