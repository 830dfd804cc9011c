"""Whatever is changed in a raw result is found in the tables and sentences made of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recount import house

ROOT = house.ROOT
SETS = sorted(p for p in (ROOT / house.RESULTS).iterdir() if p.is_dir())


# ---- a raw result that is changed ----


def slower(data: dict[str, Any]) -> None:
    for rank in data["ranks"]:
        rank["step_seconds"] = [1.02 * seconds for seconds in rank["step_seconds"]]


def fuller(data: dict[str, Any]) -> None:
    for rank in data["ranks"]:
        for peak in rank["phases"].values():
            peak["allocated"] += 2 << 20


def times(factor: float, *keys: Any) -> Any:
    """Multiplies one raw value, where the keys lead."""

    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] *= factor

    return change


RAW = {
    "steps": slower,
    "the resident marks": fuller,
    "a loss": times(1.01, "losses", 3),
    "a gradient norm": times(1.01, "grad_norms", 3),
    "host memory": times(1.02, "launch", "tree_peak_bytes"),
    "a category": times(1.1, "ranks", 0, "categories", "activations"),
    "the baseline": times(1.02, "ranks", 0, "baseline_bytes"),
    "FLOPs": times(1.5, "flops_per_step"),
    "the warm-up": times(1.5, "ranks", 0, "warmup_seconds", 0),
    "the set-up": times(1.5, "ranks", 0, "phase_seconds", "prepare"),
    "the whole run": times(1.02, "launch", "wall_seconds"),
    "a bucket": times(2, "configs", "deepspeed", "zero_optimization", "reduce_bucket_size"),
    "evidence": lambda data: data["evidence"]["fp32"].update(moments="bfloat16"),
    "an audit that fails": lambda data: data["audit"][2].update(ok=False),
    "the promise": lambda data: data.update(parity="by design"),
    "the status": lambda data: data.update(status="failed"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A copy of the first set."""
    place = tmp_path_factory.mktemp("sets") / SETS[0].name
    shutil.copytree(SETS[0], place, ignore=shutil.ignore_patterns("*.png"))
    return place


@pytest.mark.parametrize("name", RAW)
def test_a_raw_result_that_is_changed_is_found_in_each_format(folder, name):
    path = first_of(folder, "zero2", "result.json")
    before = path.read_text()
    data = json.loads(before)
    RAW[name](data)
    path.write_text(json.dumps(data))
    try:
        faults = list(house.set_faults(folder))
    finally:
        path.write_text(before)
    named = [
        file for file in ("md", "html", "csv", "json") if any(f".{file}: " in f for f in faults)
    ]
    # Which bucket or weight type it was is in no CSV.
    wanted = {"a bucket": 2, "evidence": 2}.get(name, 4)
    assert len(named) >= wanted, (named, faults[:5])
    assert any("zero2" in fault or "measured" in fault for fault in faults)


def first_of(folder: Path, recipe: str, name: str) -> Path:
    """The file of the first run of a recipe."""
    runs = (p for p in sorted(folder.glob("runs/*/result.json")) if recipe_of(p) == recipe)
    return next(runs).with_name(name)


def recipe_of(path: Path) -> str:
    return json.loads(path.read_text())["spec"]["recipe"]


def test_a_prediction_that_is_changed_is_found(folder):
    path = first_of(folder, "zero2", "prediction.json")
    before = path.read_text()
    data = json.loads(before)
    data["steady"]["bytes"] = int(1.01 * data["steady"]["bytes"])
    path.write_text(json.dumps(data))
    try:
        faults = list(house.set_faults(folder))
    finally:
        path.write_text(before)
    assert any("Step, predicted GiB" in fault for fault in faults)
    assert any("the errors of predictions" in fault for fault in faults)


def results_of(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.glob("runs/*/result.json")]


@pytest.mark.parametrize("name", ["peak_bytes", "beyond_state_bytes", "step_seconds", "verdict"])
def test_a_forecast_that_is_changed_is_found(tmp_path, name):
    """Each number that the column of the trained size is made of, of one row."""
    (claims,) = [folder for folder in SETS if (folder / "forecast.json").exists()]
    for file in ("forecast.json", "suite.json", "claims.md", *results_of(claims)):
        target = tmp_path / claims.name / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(claims / file, target)
    assert list(house.set_faults(tmp_path / claims.name)) == []
    path = tmp_path / claims.name / "forecast.json"
    data = json.loads(path.read_text())
    rows = [r for r in data["rows"] if r["spec"]["recipe"] == "single+bf16"]
    (row,) = [r for r in rows if r["spec"]["global_batch"] == 96]
    row[name] = "no" if name == "verdict" else int(1.2 * row[name]) + 1
    path.write_text(json.dumps(data))
    assert any("Predicted" in f or "At DiT" in f for f in house.set_faults(path.parent))


# ---- what the sets measured here may not have: by changed copies of those made by hand ----


def again_slower(data: dict[str, Any]) -> None:
    if data["spec"]["repeat"] == 1:
        slower(data)


def with_sums(data: dict[str, Any]) -> None:
    """Signed sums of which one row's moment is away."""
    away = 1.001 if data["spec"]["recipe"] == "zero2" else 1.0
    names = ("update", "moment", "average", "inputs")
    data["projections"] = {name: {"a.weight": [0.5, -0.25]} for name in names}
    data["projections"]["moment"] = {"a.weight": [0.5 * away, -0.25]}


def other_weights(data: dict[str, Any]) -> None:
    data["configs"]["initial_weights"] = data["spec"]["recipe"]


def busy(data: dict[str, Any]) -> None:
    for rank in data["ranks"]:
        usage = rank["step_usage"]
        usage["busy_seconds"] = [s * usage["cores"] for s in rank["step_seconds"]]


def unplaced(data: dict[str, Any]) -> None:
    for rank in data["ranks"]:
        rank["categories"]["placed_by"] = "unknown: said so"


def set_only(data: dict[str, Any]) -> None:
    for facts in data["evidence"].values():
        facts["settings_not_effects"] = ["a_setting"]


def hindered(data: dict[str, Any]) -> None:
    facts = {"uuid": "", "max_sm_clock_hz": 0, "celsius": 40, "processes": 2}
    data["gpu_samples"] = [
        {"when": when, "index": 0, "sm_clock_hz": hz, "held_back_by": ["power cap"], **facts}
        for when, hz in (("before", 1_980_000_000), ("after", 1_500_000_000))
    ]


UNSEEN: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "a repetition": ("cpu", again_slower, "noise floor"),
    "a moment": ("cpu", with_sums, "Verdict"),
    "first weights": ("cpu", other_weights, "Verdict"),
    "a busy machine": ("cpu", busy, "Disturbed steps"),
    "places": ("cpu", unplaced, "Places of"),
    "settings": ("cpu", set_only, "settings are"),
    "a GPU's state": ("gpu", hindered, "GPU 0 held back by power cap, GPU 0 shared by 2"),
}
"""What is in a raw result -> the set, the change, and a word of the mismatch with its report."""


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_raw_result_has_and_its_report_has_not_is_found(tmp_path, name):
    made, change, word = UNSEEN[name]
    folder = tmp_path / made
    shutil.copytree(ROOT / "tests/golden/report" / made, folder)
    for path in folder.glob("runs/*/result.json"):
        data = json.loads(path.read_text())
        if data["status"] == "ok":
            change(data)
            path.write_text(json.dumps(data))
    assert any(word in fault for fault in house.set_faults(folder))
