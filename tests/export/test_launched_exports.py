"""Exports started by the command that they print; what is in force is read from their objects.

Two starts for all: ZeRO and replicas. Every other combination is executed in
``test_export_lines``, and every launch file read in ``test_export_files``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT, cli
from harness.launch import command
from harness.resolve import resolve
from harness.spec import Spec
from strategies.engines.zero.sizes import buffer_sizes

MODEL = "DiT-S/4:depth=2"
NUMBERS = ["--learning-rate", "3e-4", "--beta2", "0.95", "--weight-decay", "0.01"]
ASKED = {
    "zero": ["zero2+bf16+checkpoint:every=2+accumulate:steps=2", "--grad-clip", "0.7"],
    "replicas": ["ddp+checkpoint+compress:kind=fp16+accumulate:steps=4+adamw:impl=foreach"],
}
BATCH = 16


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each export says; both are under way together."""
    base = tmp_path_factory.mktemp("exports")
    begun = {name: started(base / name, words) for name, words in ASKED.items()}
    for name, process in begun.items():
        log = process.communicate(timeout=300)[0]
        assert process.returncode == 0, f"{name}\n{log[-3000:]}"
    return {
        name: [json.loads((base / name / f"rank{rank}.json").read_text()) for rank in (0, 1)]
        for name in begun
    }


def started(folder: Path, words: list[str]) -> subprocess.Popen[str]:
    """The printed line, with a look at the objects behind train.py and a port of its own."""
    asked = ["export", *words, "--cpu", "--gpus", "2", "--model", MODEL, *NUMBERS, "--trainers"]
    assert cli.main([*asked, "--global-batch", str(BATCH), "--out", str(folder)]) == 0
    line = shlex.split(printed(words[0], folder))
    line[line.index("accelerate")] = str(Path(sys.executable).parent / "accelerate")
    script = line.pop()
    line += ["--main_process_port", str(command.free_port())]
    line += [str(ROOT / "tests/children/exported.py"), script, str(folder)]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    own |= {"CUDA_VISIBLE_DEVICES": "", "PATH": os.environ["PATH"]}
    return subprocess.Popen(
        line,
        env=command.inherited() | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed(recipe: str, folder: Path) -> str:
    """The line that train.py says starts it, which is the one that was printed."""
    (line,) = (x for x in (folder / "train.py").read_text().splitlines() if "--config_file" in x)
    return line.strip()


@pytest.mark.parametrize("name", ASKED)
def test_what_every_export_sets_is_in_force(said, name):
    steps = {"zero": 2, "replicas": 4}[name]
    for rank in said[name]:
        assert rank["processes"] == 2 and rank["accumulation"] == steps
        assert rank["settings"] == [3e-4, [0.9, 0.95], 1e-8, 0.01] and rank["optimizer"] == "AdamW"
        assert rank["average"] > 0 and rank["moved"], "an average is kept, and it lags behind"


def test_deepspeed_runs_with_the_exported_numbers(said):
    sizes = buffer_sizes(
        resolve(Spec(recipe="zero2", model=MODEL, data="synthetic:32")).subject.sizes
    )
    bucket = sizes["reduce_bucket_size"]
    for rank in said["zero"]:
        assert (rank["type"], rank["precision"], rank["stage"]) == ("DEEPSPEED", "bf16", 2)
        assert rank["weights"] == ["torch.bfloat16"] and rank["clip"] == 0.7
        assert (rank["micro_batch"], rank["steps_accumulated"]) == (BATCH // 4, 2)
        assert rank["batch"] == BATCH and rank["buckets"] == [bucket, bucket]
        assert rank["taken"] == 2 and rank["blocks"] == ["CheckpointWrapper"] * 2


def test_replicas_are_averaged_with_the_exported_hook(said):
    first, second = said["replicas"]
    assert (first["type"], first["precision"]) == ("MULTI_CPU", "no")
    assert first["model"] == "DistributedDataParallel" and first["hooks"] == ["fp16_compress_hook"]
    assert first["weights"] == ["torch.float32"] and first["blocks"] == ["CheckpointWrapper"] * 4
    assert first["sum"] == second["sum"], "replicas that saw other data are equal"
