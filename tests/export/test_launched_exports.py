"""Exported launch files, started by the command that an export prints, with a small loop.

What is in force is read from its objects.
One of each sharding that can be exported; accelerate's launcher reads each command, its processes
are forks of one start. Every other launch file is read in ``test_export_files``.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.launch import command
from harness.planner.adapters.zero import NVME_BLANK
from harness.planner.export.settled import OWN
from harness.resolve import resolve
from harness.spec import Spec
from strategies import CATALOG
from strategies.base import Slot
from strategies.engines.zero.config import buffer_sizes
from tests.conftest import OnDemand, begin, launchable
from tests.made import one_start

MODEL = "DiT-S/4:depth=4"
CARD = "--gpu A100-80GB"
BATCH = 16
LOOP = Path(one_start.__file__).with_name("own_loop.py")


@dataclass(frozen=True)
class Export:
    """A recipe that is exported, with the facts of each rank that are in force."""

    recipe: str
    facts: dict[str, Any]
    device: str = "--cpu"
    ranks: int = 2
    steps: int = 1
    clip: float = 0.0


ZERO3 = {"type": "DEEPSPEED", "zero_class": "DeepSpeedZeroOptimizer_Stage3", "stage": 3}
ZERO = {"type": "DEEPSPEED", "zero_class": "DeepSpeedZeroOptimizer", "bf16": True, "partitioned": 0}
CPU = {"optimizer": "DeepSpeedCPUAdam"}
SHARDED = {"type": "FSDP", "gathered": ["Block"], "groups": 4, "offloads": [False]}
BF16, FLOAT = {"precision": "bf16"}, {"weights": ["torch.float32"]}
EXPORTS = {
    "single": Export("single+bf16", {"type": "NO", **BF16, **FLOAT}, ranks=1),
    "ddp": Export("ddp+accumulate:steps=4", {
        "type": "MULTI_CPU", "model": "DistributedDataParallel", "precision": "no", **FLOAT,
    }, steps=4, clip=0.01),
    "zero1": Export("zero1+bf16_pure+accumulate:steps=2", {
        **ZERO, "stage": 1, "master": False, "weights": ["torch.bfloat16"]}, steps=2),
    "zero1_offload": Export("zero1_offload+bf16", {
        **ZERO, **CPU, "stage": 1, "offloaded": {"optimizer": "cpu"}}),
    "zero2": Export("zero2+bf16+accumulate:steps=2", {
        **ZERO, "stage": 2, "master": True, "clip": 0.7}, steps=2, clip=0.7),
    "zero2_offload": Export("zero2_offload+bf16+accumulate:steps=2", {
        **ZERO, **CPU, "stage": 2, "clip": 0.5, "offloaded": {"optimizer": "cpu"},
    }, steps=2, clip=0.5),
    "zero3": Export("zero3+bf16", {**ZERO3, "offloaded": {}}),
    "zero3_offload": Export("zero3_offload+bf16", {
        **ZERO3, **CPU, "offloaded": {"optimizer": "cpu", "weights": "cpu"}}),
    "zero3_nvme": Export("zero3_nvme+bf16", {
        **ZERO3, **CPU, "offloaded": {"optimizer": "nvme", "weights": "cpu"}, "swaps": True}),
    "fsdp2": Export("fsdp2+bf16+accumulate:steps=2", {
        **SHARDED, **BF16, "mesh": [[2]], "reshards": [2]}, CARD, steps=2, clip=0.01),
    "fsdp2, kept": Export("fsdp2:reshard=off", {**SHARDED, "reshards": [0], **FLOAT}, CARD),
    "fsdp2_offload": Export("fsdp2_offload", {
        **SHARDED, "offloads": [True], "reshards": [2]}, CARD, clip=0.01),
    "hsdp": Export("hsdp:replicate=2+bf16", {
        **SHARDED, **BF16, "mesh": [[2, 2]], "reshards": [2]}, CARD, ranks=4),
}  # fmt: skip
REFUSED = {"pp", "model_parallel"}
"""By name, as ``test_export_files`` holds."""
OFTEN = {"single", "ddp", "zero2", "fsdp2"}
"""One of each engine, which run by default."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[dict[str, Any]]]:
    """The facts of each rank of each export; an export is started when it is read."""
    base = tmp_path_factory.mktemp("exports")
    return OnDemand(lambda name: started(base / name.replace(", ", "_"), EXPORTS[name]))


def started(folder: Path, one: Export) -> list[dict[str, Any]]:
    """The printed line with a loop of one's own, and a look at the objects that it leaves."""
    words = ["export", one.recipe, *one.device.split(), "--gpus", str(one.ranks), "--model", MODEL]
    words += ["--global-batch", str(BATCH), "--grad-clip", str(one.clip), "--out", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*words, "--trainers"]) == 0
    zero = folder / "deepspeed.json"
    if zero.exists():  # a folder to swap to is what only a user knows
        zero.write_text(zero.read_text().replace(NVME_BLANK, str(folder / "nvme")))
        (folder / "nvme").mkdir()
    *lead, _, _, file, path, script = shlex.split(out.getvalue().splitlines()[-1])
    assert script == OWN
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"OWN_ADAM": "cpu" if "DeepSpeedCPUAdam" in one.facts.values() else ""}
    clip = 0.0 if zero.exists() else one.clip
    given = [BATCH // one.ranks // one.steps, one.steps, clip]
    log = folder / "log"
    case = {
        "line": ["launch", file, path, str(LOOP)],
        "env": command.ALLOCATOR | own | dict(word.split("=", 1) for word in lead if "=" in word),
        "module": "tests.children.exported",
        "words": [str(LOOP), str(folder), *map(str, given)],
    }
    case |= {"foreign": True, "resident": False, "copy": []}
    one_start.running(begin).case(case, log, seconds=300)
    found = sorted(folder.glob("rank*.json"))
    assert found, f"{one.recipe}\n{log.read_text()[-4000:]}"
    return [json.loads(rank.read_text()) for rank in found]


# ---- what is in force ----


def test_every_sharding_that_can_be_exported_is_started():
    shardings = {name for name, kind in CATALOG.items() if kind.slot is Slot.SHARD}
    assert {name.partition(",")[0] for name in EXPORTS} == shardings - REFUSED


@pytest.mark.parametrize("name", launchable(EXPORTS, OFTEN))
def test_what_an_export_is_for_and_sets_is_in_force(said, name):
    one = EXPORTS[name]
    assert len(said[name]) == one.ranks
    for rank in said[name]:
        assert {key: rank[key] for key in one.facts} == one.facts
        assert (rank["processes"], rank["accumulation"]) == (one.ranks, one.steps)
        assert rank["settings"] == [3e-4, [0.9, 0.95], 1e-8, 0.01]


@pytest.mark.parametrize(
    "name", launchable((name for name in EXPORTS if name.startswith("zero")), OFTEN)
)
def test_deepspeed_runs_with_the_exported_numbers(said, name):
    ranks = len(said[name])
    for rank in said[name]:
        micro = BATCH // ranks // rank["accumulation"]
        assert (rank["micro_batch"], rank["batch"], rank["taken"]) == (micro, BATCH, 2)
        assert rank["steps_accumulated"] == rank["accumulation"]
        spec = Spec(recipe="zero2", model=MODEL, data="synthetic:32")
        bucket = buffer_sizes(resolve(spec).subject.survey.sizes)["reduce_bucket_size"]
        assert rank["buckets"][0] == bucket
        assert bool(rank["partitioned"]) == (rank["stage"] == 3)


@pytest.mark.parametrize("name", launchable(["ddp", "fsdp2", "fsdp2_offload"], OFTEN))
def test_gradients_arrive_clipped_at_the_optimizer(said, name):
    """Not those of weights that there were before the model was cut."""
    parts = [rank["squared_norms"] for rank in said[name]]
    norms = parts[0] if name == "ddp" else [sum(both) for both in zip(*parts, strict=True)]
    assert [math.sqrt(norm) for norm in norms] == pytest.approx([0.01] * 2, rel=0.02)


def test_replicas_that_saw_other_data_are_equal_and_groups_of_ranks_hold_the_same_shares(said):
    first, second = (rank["sum"] for rank in said["ddp"])
    assert first == second
    sums = [rank["sum"] for rank in said["hsdp"]]
    assert sums[0] == sums[2] != sums[1] == sums[3]
