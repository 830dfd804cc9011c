"""Rows trained on rehearsed cards by ``./run.sh run``: real values, torch's own caching allocator,
ProcessGroupNCCL, FSDP2 and DeepSpeed. Predictions are held to that allocator.

Their seconds say nothing, and no reader takes them for measurements.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.predict import pool
from harness.predict.prediction import Prediction
from harness.resolve import resolve
from harness.result import REHEARSED
from harness.spec import Spec
from tests.rehearsal import build

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(build.absent()), reason=build.absent() or "it is there"),
]

MIB = 2**20
RECIPES = {
    1: [
        *("single", "single+bf16", "single+checkpoint", "single+bf16_pure", "single+fp16"),
        *("single+bf16_pure+adamw_bf16", "single+adafactor", "single+bf16+muon", "single+lora"),
        *("single+dora", "single+distill:feature=0.5", "single+head", "single+difffit"),
        *("single+attend:kernel=math", "single+bf16+attend:kernel=flash", "single+accumulate"),
        *("single+attend:kernel=efficient", "single+checkpoint:keep=products"),
        *("single+offload_activations", "single+adamw:impl=foreach", "single+ema:place=cpu"),
        "single+optimizer_in_backward",
    ],
    2: [
        *("ddp", "ddp+bf16", "ddp+sp", "zero1", "zero2", "zero2+bf16", "zero2+fp16", "zero3"),
        *("zero2_offload", "zero3_offload", "zero3_offload+bf16", "zero3_offload_partial"),
        *("zero1+bf16_master", "zero2+bf16_pure", "zero3+bf16+checkpoint", "zero3+lora"),
        *("fsdp2", "fsdp2_offload", "fsdp2+bf16+checkpoint", "fsdp2:reshard=off", "ddp+tp"),
        *("zero2+distill:store=bf16", "pp", "model_parallel"),
    ],
}
"""Number of cards -> recipes."""
EVERY = [(cards, recipe) for cards, recipes in RECIPES.items() for recipe in recipes]
DDP_TWICE = "at most the old gradient buckets may live beside the new ones in DDP's second step"


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """A row's result, as JSON has it, and its prediction."""

    result: dict[str, Any]
    prediction: Prediction

    def highest(self, count: str) -> list[int]:
        """The allocator's highest ``count`` on each rank, in bytes."""
        ranks = self.result["ranks"]
        return [max(phase[count] for phase in rank["phases"].values()) for rank in ranks]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[tuple[int, str], Rehearsed]:
    """(cards, recipe) -> its row."""
    made: dict[tuple[int, str], dict[str, Any]] = {}
    for cards, recipes in RECIPES.items():
        folder = tmp_path_factory.mktemp(f"cards{cards}")
        trained = run(cards, folder, *recipes)
        for path in sorted((folder / "out").glob("runs/*/result.json")):
            result = json.loads(path.read_text())
            made[cards, result["spec"]["recipe"]] = result
        assert made, trained.stdout[-3000:] + trained.stderr[-3000:]
    specs = [resolve(Spec(**result["spec"])) for result in made.values()]
    found = pool.predict_all(specs, tmp_path_factory.mktemp("predictions"), kind="cudnn")
    return {key: Rehearsed(made[key], one) for key, one in zip(made, found, strict=True)}


def run(cards: int, folder: Path, *recipes: str) -> subprocess.CompletedProcess[str]:
    """``./run.sh run`` of these recipes on so many rehearsed cards."""
    env = {**os.environ, **build.environment([build.H100] * cards, folder)}
    words = ["--model", "DiT-T/4", "--data", "synthetic", "--global-batch", "8", "--steps", "2"]
    words += ["--warmup", "2", "--device", "cuda", "--out", str(folder / "out")]
    line = ["./run.sh", "run", *words, "--recipes", *recipes]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("key", EVERY, ids=str)
def test_a_row_trains_and_carries_its_mark(key, rows):
    result = rows[key].result
    assert result["status"] == "ok", result["reason"] + result["log_tail"]
    assert result["environment"]["device"] == REHEARSED
    assert {rank["device"] for rank in result["ranks"]} == {REHEARSED}
    assert all(loss == loss for loss in result["losses"]), "a loss is no number"


@pytest.mark.parametrize("key", EVERY, ids=str)
def test_the_predicted_peak_is_the_allocator_s(key, rows):
    row = rows[key]
    measured, predicted = row.highest("allocated")[row.prediction.rank], row.prediction.allocated
    if key[1].startswith("ddp") and measured > 1.005 * predicted:
        most = predicted + 4 * row.result["parameters"]
        assert measured <= 1.005 * most, DDP_TWICE
        return
    assert predicted == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("key", EVERY, ids=str)
def test_the_predicted_reserve_is_the_allocator_s(key, rows):
    row = rows[key]
    measured = row.highest("reserved")[row.prediction.rank]
    off = abs(row.prediction.reserved - measured)
    assert off <= max(0.02 * measured, 2 * MIB), (row.prediction.reserved / MIB, measured / MIB)


def test_ranks_agree_on_the_loss_of_one_process(rows):
    """Real values: replicas and shards of a batch train as one process does."""
    alone = rows[1, "single"].result["losses"]
    for recipe in ("ddp", "zero1", "zero2", "zero3", "fsdp2"):
        assert rows[2, recipe].result["losses"] == pytest.approx(alone, rel=1e-4)
