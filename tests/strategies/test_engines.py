"""What a launch file names, and what a broken one takes away: the strategies that need it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT
from harness.result import Status, load_all
from strategies.launch_file import Layout

BROKEN = {
    "torn": ("distributed_type: [", "not YAML"),
    "unheard_of": (
        'distributed_type: "FLYING"',
        "distributed_type is 'FLYING' -> one of DEEPSPEED",
    ),
    "unquoted": ("distributed_type: NO", "distributed_type is False -> name an engine, in quotes"),
    "no_json": ('distributed_type: "DEEPSPEED"', "names no deepspeed_config_file"),
    "lost_json": (
        'distributed_type: "DEEPSPEED"\ndeepspeed_config: {deepspeed_config_file: no/such.json}',
        "unreadable launch file",
    ),
}
"""Name of a launch file -> (its text, what its strategy says)."""


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """The program beside launch files of which some are broken."""
    folder = tmp_path_factory.mktemp("house")
    for name in ("harness", "strategies", "launch_configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (text, _) in BROKEN.items():
        (folder / "launch_configs" / f"{name}.yaml").write_text(text)
    (folder / "launch_configs" / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    return folder


def run(house: Path, *words: str) -> str:
    """What the program prints there."""
    env = {**os.environ, "PYTHONPATH": str(house), "COLUMNS": "200"}
    line = [sys.executable, "-m", "harness", *words]
    done = subprocess.run(line, cwd=house, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_other_strategies_are_there_beside_a_broken_file(house):
    told = run(house, "list")
    assert "zero3_offload" in told and "cannot be used" in told
    told = run(house, "run", "--recipes", "ddp", "zero3+bf16", "--dry-run", "--out", "results/x")
    assert "launch_configs/zero3.yaml" in told
    shutil.copytree(ROOT / "tests/golden/report/cpu", house / "set")
    run(house, "report", "set")


def test_a_recipe_on_a_broken_file_says_what_is_wrong_with_it(house):
    texts = [f"{name}+bf16" for name in BROKEN]
    told = run(house, "run", "--recipes", "ddp", *texts, "--dry-run", "--out", "results/x")
    for name, (_, words) in BROKEN.items():
        line = next(line for line in told.splitlines() if f"{name}+bf16: refused" in line)
        assert words in line and "mend the file, or take another sharding" in line


@pytest.mark.thorough
def test_the_example_of_a_launch_file_of_one_s_own_is_a_recipe(house):
    for file in (ROOT / "docs" / "examples").glob("zero3_hpz.*"):
        shutil.copy(file, house / "launch_configs")
    words = "--model DiT-T/8:depth=2 --data synthetic --device cpu --processes 4 --global-batch 4"
    words += " --steps 1 --warmup 1 --noise-floor 1 --no-predictions --out results/own"
    run(house, "run", "--recipes", "zero3_hpz", *words.split())
    (row,) = load_all(house / "results" / "own")[0]
    assert row.status is Status.OK, row.reason
    assert row.configs["deepspeed"]["zero_optimization"]["zero_hpz_partition_size"] == 2


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (Layout(replicate=2, shard=2), [0, 1, 2, 3]),
        (Layout(replicate=2, tensor=2), [0, 0, 1, 1]),
        (Layout(shard=2, sequence=2, tensor=2), [0, 0, 0, 0, 1, 1, 1, 1]),
        (Layout(replicate=2, pipeline=2), [0, 1, 0, 1]),
    ],
)
def test_ranks_that_work_on_one_sample_together_own_the_same_share(layout, shares):
    assert [layout.share(rank) for rank in range(layout.ranks)] == shares
    assert layout.data == max(shares) + 1
