"""Exported launch files, started by the command that an export prints, with a small loop.

What is in force is read from its objects.
One of each sharding that can be exported; accelerate's launcher reads each command, its processes
are forks of one start. Every other launch file is read in ``test_export_files``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import shlex
from collections.abc import Mapping
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
ASKED = {
    "single": "single+bf16 --cpu",
    "ddp": "ddp+accumulate:steps=4 --cpu --grad-clip 0.01",
    "zero1": "zero1+bf16_pure+accumulate:steps=2 --cpu",
    "zero1_offload": "zero1_offload+bf16 --cpu",
    "zero2": "zero2+bf16+accumulate:steps=2 --cpu --grad-clip 0.7",
    "zero2_offload": "zero2_offload+bf16+accumulate:steps=2 --cpu --grad-clip 0.5",
    "zero3": "zero3+bf16 --cpu",
    "zero3_offload": "zero3_offload+bf16 --cpu",
    "zero3_nvme": "zero3_nvme+bf16 --cpu",
    "fsdp2": f"fsdp2+bf16+accumulate:steps=2 {CARD} --grad-clip 0.01",
    "fsdp2, kept": f"fsdp2:reshard=off {CARD}",
    "fsdp2_offload": f"fsdp2_offload {CARD} --grad-clip 0.01",
    "hsdp": f"hsdp:replicate=2+bf16 {CARD} --gpus 4",
}
"""What is exported: a recipe and options of the command."""
REFUSED = {"pp", "model_parallel"}
"""By name, as ``test_export_files`` holds."""
OFTEN = {"single", "ddp", "zero2", "fsdp2"}
"""One of each engine, which run by default."""
BATCH = 16
LOOP = Path(one_start.__file__).with_name("own_loop.py")


def asked(text: str) -> list[str]:
    """The words of one, with those that all of them share."""
    words = ["--gpus", "2", "--model", MODEL, *text.split(), "--trainers"]
    if text.startswith("single"):
        words[1] = "1"
    return ["export", *words, "--global-batch", str(BATCH)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[dict[str, Any]]]:
    """The facts of each rank of each export; an export is started when it is read."""
    base = tmp_path_factory.mktemp("exports")
    return OnDemand(lambda name: started(base / name.replace(", ", "_"), ASKED[name]))


def started(folder: Path, text: str) -> list[dict[str, Any]]:
    """The printed line with a loop of one's own, and a look at the objects that it leaves."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*asked(text), "--out", str(folder)]) == 0
    filled_in(folder)
    *lead, _, _, file, path, script = shlex.split(out.getvalue().splitlines()[-1])
    assert script == OWN
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    own |= {"OWN_ADAM": "cpu" if re.match("zero.*(offload|nvme)", text) else ""}
    ranks = 4 if "--gpus 4" in text else 1 if text.startswith("single") else 2
    steps = int((re.findall(r"accumulate:steps=(\d+)", text) or ["1"])[0])
    clip = 0.0 if "zero" in text else float((re.findall(r"--grad-clip (\S+)", text) or [0])[0])
    words = [BATCH // ranks // steps, steps, clip]
    log = folder / "log"
    case = {
        "line": ["launch", file, path, str(LOOP)],
        "env": command.ALLOCATOR | own | pairs(lead),
        "module": "tests.children.exported",
        "words": [str(LOOP), str(folder), *map(str, words)],
    }
    case |= {"foreign": True, "resident": False, "copy": []}
    one_start.running(begin).case(case, log, seconds=300)
    found = sorted(folder.glob("rank*.json"))
    assert found, f"{text}\n{log.read_text()[-4000:]}"
    return [json.loads(rank.read_text()) for rank in found]


def pairs(words: list[str]) -> dict[str, str]:
    """The variables before a command, with the word ``env`` in front."""
    return dict(word.split("=", 1) for word in words if "=" in word)


def filled_in(folder: Path) -> None:
    """What only a user knows: a folder to swap to."""
    path = folder / "deepspeed.json"
    if path.exists():
        path.write_text(path.read_text().replace(NVME_BLANK, str(folder / "nvme")))
        (folder / "nvme").mkdir()


# ---- what is in force ----

ZERO3 = {"type": "DEEPSPEED", "zero_class": "DeepSpeedZeroOptimizer_Stage3", "stage": 3}
ZERO = {"type": "DEEPSPEED", "zero_class": "DeepSpeedZeroOptimizer", "bf16": True, "partitioned": 0}
CPU = {"optimizer": "DeepSpeedCPUAdam"}
SHARDED = {"type": "FSDP", "gathered": ["Block"], "groups": 4, "offloads": [False]}
BF16 = {"precision": "bf16"}
IN_FORCE: dict[str, dict[str, Any]] = {
    "single": {"type": "NO", **BF16, "weights": ["torch.float32"]},
    "ddp": {
        "type": "MULTI_CPU", "model": "DistributedDataParallel", "precision": "no",
        "weights": ["torch.float32"],
    },
    "zero1": {**ZERO, "stage": 1, "master": False, "weights": ["torch.bfloat16"]},
    "zero1_offload": {**ZERO, **CPU, "stage": 1, "offloaded": {"optimizer": "cpu"}},
    "zero2": {**ZERO, "stage": 2, "master": True, "clip": 0.7},
    "zero2_offload": {**ZERO, **CPU, "stage": 2, "clip": 0.5, "offloaded": {"optimizer": "cpu"}},
    "zero3": {**ZERO3, "offloaded": {}},
    "zero3_offload": {**ZERO3, **CPU, "offloaded": {"optimizer": "cpu", "weights": "cpu"}},
    "zero3_nvme": {
        **ZERO3, "optimizer": "DeepSpeedCPUAdam",
        "offloaded": {"optimizer": "nvme", "weights": "cpu"}, "swaps": True,
    },
    "fsdp2": {**SHARDED, **BF16, "mesh": [[2]], "reshards": [2]},
    "fsdp2, kept": {**SHARDED, "reshards": [0], "weights": ["torch.float32"]},
    "fsdp2_offload": {**SHARDED, "offloads": [True], "reshards": [2]},
    "hsdp": {**SHARDED, **BF16, "mesh": [[2, 2]], "reshards": [2]},
}  # fmt: skip


def test_every_sharding_that_can_be_exported_is_started():
    shardings = {name for name, kind in CATALOG.items() if kind.slot is Slot.SHARD}
    started_here = {re.split(r"[+: ]", text)[0] for text in ASKED.values()}
    assert started_here == shardings - REFUSED


@pytest.mark.parametrize("name", launchable(ASKED, OFTEN))
def test_what_an_export_is_for_and_sets_is_in_force(said, name):
    words = asked(ASKED[name])
    processes = max(int(n) for at, n in itertools.pairwise(words) if at == "--gpus")
    steps = int((re.findall(r"accumulate:steps=(\d)", ASKED[name]) or [1])[0])
    assert len(said[name]) == (1 if name == "single" else processes)
    for rank in said[name]:
        assert {key: rank[key] for key in IN_FORCE[name]} == IN_FORCE[name]
        assert rank["processes"] == len(said[name]) and rank["accumulation"] == steps
        assert rank["settings"] == [3e-4, [0.9, 0.95], 1e-8, 0.01]


@pytest.mark.parametrize(
    "name", launchable((name for name in ASKED if name.startswith("zero")), OFTEN)
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


def test_replicas_that_saw_other_data_are_equal(said):
    first, second = said["ddp"]
    assert first["sum"] == second["sum"]


def test_groups_of_ranks_hold_the_same_shares(said):
    sums = [rank["sum"] for rank in said["hsdp"]]
    assert sums[0] == sums[2] != sums[1] == sums[3]


@pytest.mark.parametrize("recipe", ["fsdp2", "fsdp2_offload+bf16", "hsdp"])
def test_what_accelerate_would_not_shard_is_refused(recipe, tmp_path, capsys):
    words = ["export", recipe, "--cpu", "--gpus", "4", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 2
    assert "only on GPUs" in capsys.readouterr().err and not (tmp_path / "out").exists()
