"""The example of a launch file of one's own, under docs/examples: its name is a recipe."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PACKAGES = ("harness", "strategies", "launch_configs")


@pytest.mark.thorough
def test_a_launch_file_of_ones_own_is_a_recipe(tmp_path):
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name)
    for file in (ROOT / "docs" / "examples").glob("zero3_hpz.*"):
        shutil.copy(file, tmp_path / "launch_configs")
    words = (
        "run --recipes zero3_hpz --model DiT-T/8:depth=2 --data synthetic --device cpu "
        "--processes 4 --global-batch 4 --steps 1 --warmup 1 --noise-floor 1 --no-predictions "
        f"--out {tmp_path / 'results'}"
    )
    here = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-m", "harness", *words.split()], cwd=tmp_path, env=here)
    (file,) = (tmp_path / "results" / "runs").glob("*/result.json")
    row = json.loads(file.read_text())
    assert row["status"] == "ok", row["reason"]
    zero = row["configs"]["deepspeed"]["zero_optimization"]
    assert zero["zero_hpz_partition_size"] == 2
