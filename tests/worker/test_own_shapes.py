"""Own modules train whatever the shape of their samples: their evidence is read back too."""

import pytest
from conftest import in_fork

from harness.planner import pool
from harness.resolve import resolve
from harness.result import Status, load
from harness.spec import Spec

MODEL = """
import torch
from torch import nn


def make():
    {layers}
    return model, {{"x": torch.randn(8, {shape})}}, lambda m, batch: m(batch["x"]).pow(2).mean()
"""
VECTORS = "model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))"
CONVOLUTIONS = "model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.GELU(), nn.Conv1d(8, 3, 3))"


@pytest.mark.parametrize(
    ("layers", "shape", "recipe"),
    [(VECTORS, "8", "single+lora"), (CONVOLUTIONS, "3, 16", "single")],
)
def test_an_own_module_trains(layers, shape, recipe, tmp_path):
    (tmp_path / "mine.py").write_text(MODEL.format(layers=layers, shape=shape))
    words = f"--recipe {recipe} --objective own --data synthetic --global-batch 4 --ema 0".split()
    words += ["--steps", "2", "--warmup", "1", "--model", f"{tmp_path}/mine.py:make"]
    in_fork(tmp_path, "harness.train", *words, "--out", tmp_path / "out")
    row = load(tmp_path / "out" / "result.json")
    assert row.status is Status.OK, row.reason


@pytest.mark.thorough
def test_an_own_module_is_predicted_under_fsdp2(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL.format(layers=VECTORS, shape="8"))
    model = f"{tmp_path}/mine.py:make"
    spec = Spec(recipe="fsdp2+bf16", model=model, objective="own", data="synthetic", processes=2,
                device="cuda", ema=0.0)  # fmt: skip
    (found,) = pool.predict_all([resolve(spec)], tmp_path, jobs=1)
    assert found.method == "trace", found.fault
