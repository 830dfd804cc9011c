"""Engines by the contract: what a launch file names, how ranks are used, and a file that is broken
takes away only the strategies that need it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY

from harness import ROOT
from harness.resolve import resolve
from strategies import CATALOG, engines
from strategies import engine as contract
from strategies.base import TRAITS
from strategies.engine import Engine
from strategies.engines import ENGINES
from strategies.engines.pipeline.engine import Pipeline, in_file
from strategies.launch_file import FOLDER, Layout
from strategies.sharding import sharding_kinds

BROKEN = {
    "torn": ("distributed_type: [", "not YAML"),
    "unheard_of": (
        'distributed_type: "FLYING"',
        "distributed_type is 'FLYING' -> one of DEEPSPEED",
    ),
    "unquoted": ("distributed_type: NO", "distributed_type is False -> name an engine, in quotes"),
    "typeless": ("num_machines: 1", "distributed_type is None"),
    "empty": ("", "distributed_type is None"),
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


def run(house: Path, *words: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(house), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=house,
        env=env,
        capture_output=True,
        text=True,
    )


def test_other_strategies_are_there_beside_a_broken_file(house):
    done = run(house, "list")
    assert done.returncode == 0, done.stderr
    assert "zero3_offload" in done.stdout and "cannot be used" in done.stdout
    done = run(house, "run", "--recipes", "ddp", "zero3+bf16", "--dry-run", "--out", "results/x")
    assert done.returncode == 0 and "launch_configs/zero3.yaml" in done.stdout
    shutil.copytree(ROOT / "tests/golden/report/cpu", house / "set")
    done = run(house, "report", "set")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", BROKEN)
def test_a_recipe_on_a_broken_file_says_what_is_wrong_with_it(name, house):
    done = run(house, "run", "--recipes", "ddp", f"{name}+bf16", "--dry-run", "--out", "results/x")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if f"{name}+bf16: refused" in line)
    assert BROKEN[name][1] in line and "mend the file, or take another sharding" in line


OF_SCRIPTS = {"runs", "adopt", "adopt_model"}
"""Methods that only ``harness.script`` calls."""


def test_the_contract_is_small_and_its_page_names_each_member_once():
    public = {name for name in vars(Engine) if not name.startswith("_")}
    methods = {name for name in public if callable(getattr(Engine, name))}
    facts = {name for name in public if isinstance(vars(Engine)[name], property)}
    assert 20 < len(methods - OF_SCRIPTS) <= 30
    page = contract.__doc__.partition("Methods by the moment")[2].partition("No method predicts")[0]
    assert sorted(re.findall(r"``(\w+)``", page)) == sorted(methods | facts)


def test_every_engine_is_named_by_its_launch_files():
    named = {kind.engine(device).file.kind for kind in _shardings() for device in ("cpu", "cuda")}
    assert named == set(ENGINES)
    for kind in _shardings():
        engine = kind.engine("cpu")
        staged = isinstance(engine, Pipeline) and in_file(engine.file)
        assert staged or ENGINES[engine.file.kind] is type(engine)


@pytest.mark.parametrize("kind", sorted(sharding_kinds()))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_traits_of_an_engine_are_words_that_are_explained(kind, device):
    engine = CATALOG[kind].engine(device)
    assert engine.traits <= set(TRAITS)
    layout = engine.layout(4)
    assert layout.ranks == 4 and engine.place("optimizer") in ("device", "cpu", "nvme")
    assert "shards" in engine.traits or layout.shard == 1


def _shardings() -> list:
    return list(sharding_kinds(FOLDER).values())


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (Layout(replicate=4), [0, 1, 2, 3]),
        (Layout(replicate=2, shard=2), [0, 1, 2, 3]),
        (Layout(replicate=2, tensor=2), [0, 0, 1, 1]),
        (Layout(shard=2, sequence=2, tensor=2), [0, 0, 0, 0, 1, 1, 1, 1]),
        (Layout(replicate=2, pipeline=2), [0, 1, 0, 1]),
    ],
)
def test_ranks_that_work_on_one_sample_together_own_the_same_share(layout, shares):
    assert [layout.share(rank) for rank in range(layout.ranks)] == shares
    assert layout.data == max(shares) + 1


class Twins(Engine):
    """Two ranks work on every sample together."""

    def layout(self, ranks: int) -> Layout:
        return Layout(replicate=ranks // 2, tensor=2)


def test_a_global_batch_is_divided_among_shares_and_not_among_processes(monkeypatch, tmp_path):
    (tmp_path / "twins.yaml").write_text('distributed_type: "TWINS"\n')
    monkeypatch.setitem(ENGINES, "TWINS", Twins)
    monkeypatch.setitem(CATALOG, "twins", sharding_kinds(tmp_path)["twins"])
    spec = dataclasses.replace(TINY, recipe="twins", processes=4, global_batch=8)
    assert resolve(spec).micro_batch == 4
    assert resolve(dataclasses.replace(spec, recipe="ddp")).micro_batch == 2
    assert engines.of_file(tmp_path / "twins.yaml").layout(4).share(3) == 1
