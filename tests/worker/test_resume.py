"""Training saved, ended and resumed in new processes goes on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import DRAWN, Case, OnDemand, launchable, launched_together, weights_digest

from harness.launch import checkpoints
from harness.result import Result, Status
from harness.spec import Spec
from harness.worker import training

SPEC = Spec(
    recipe="ddp", model="DiT-T/8:depth=2", global_batch=4, warmup=1, steps=3, processes=2,
    ema=0.9, learning_rate=1e-3,
)  # fmt: skip
HALF, WHOLE = "step-00000002", "step-00000004"
RECIPES = ["ddp", "zero2", "zero3", "fsdp2"]
OFTEN = {"ddp", "zero2", "fsdp2"}


OTHER = "ddp+checkpoint"
AVERAGED = "averaged.safetensors"


def words(state: Path, *more: str) -> tuple[str, ...]:
    return ("--checkpoint", str(state), "--save-every", "2", *more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Mapping[str, Result], Path]:
    """``straight-RECIPE``: four steps without a stop, saved after two and four of them;
    ``again-RECIPE``: the same in new processes, which find the first two alone; another recipe
    that finds ddp's; and what is saved by two processes found by one. Their
    checkpoints are in folders of these names, below ``state``. A run starts when it is read."""
    base, cases, after = tmp_path_factory.mktemp("resume"), {}, {}
    state = base / "state"
    state.mkdir()

    def resuming(name: str, recipe: str, found: str, processes: int = 2) -> None:
        (state / name).mkdir()
        half = (state / found / HALF, state / name / HALF)
        spec = dataclasses.replace(SPEC, recipe=recipe, processes=processes)
        cases[name] = Case(spec, words(state / name, "--resume"), (half,))
        after[name] = found

    def run(name: str) -> Result:
        if name in after:
            assert rows[after[name]]
        return launched_together({name: cases[name]}, base)[name]

    for recipe in RECIPES:
        name, spec = f"straight-{recipe}", dataclasses.replace(SPEC, recipe=recipe)
        more = ("--averaged", str(state / AVERAGED)) if recipe == "fsdp2" else ()
        cases[name] = Case(spec, words(state / name, *more))
        resuming(f"again-{recipe}", recipe, name)
    resuming(OTHER, OTHER, "straight-ddp")
    resuming("on-one", "zero2", "straight-zero2", 1)
    rows = OnDemand(run)
    return rows, state


@pytest.mark.parametrize("recipe", launchable(RECIPES, OFTEN))
def test_a_resumed_training_goes_on_as_if_never_stopped(recipe, runs):
    rows, state = runs
    row, again = rows[f"straight-{recipe}"], rows[f"again-{recipe}"]
    folders = [state / f"{name}-{recipe}" for name in ("again", "straight")]
    for one, folder in zip((again, row), folders, strict=True):
        assert one.status is Status.OK, f"{one.reason}\n{one.log_tail}"
        assert sorted(p.name for p in folder.iterdir()) == [HALF, WHOLE]
    assert len(row.losses) == 4 and len(set(row.losses)) == 4
    assert again.losses == pytest.approx(row.losses, rel=1e-6)
    assert again.grad_norms == pytest.approx(row.grad_norms, rel=1e-5)
    assert [c for c in again.audit if not c.ok] == []
    for one, steps in ((row, 4), (again, 2)):
        assert [len(r.step_seconds) + len(r.warmup_seconds) for r in one.ranks] == [steps] * 2
    for rank in range(SPEC.processes):
        found, wanted = (
            torch.load(p / WHOLE / f"attached-{rank}.pt", weights_only=True)["ema"] for p in folders
        )
        assert found["updates"] == wanted["updates"] == 4
        for a, b in zip(found["shards"], wanted["shards"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_averaged_weights_are_those_that_samples_are_drawn_with(runs, draw_here):
    """From a training whose average lies in shards, over the file that it leaves, to a sampler."""
    rows, state = runs
    assert rows["straight-fsdp2"].status is Status.OK
    own = {name: getattr(SPEC, name) for name in ("model", "data", "objective")}
    spec = dataclasses.replace(DRAWN, **own, weights=str(state / AVERAGED))
    held = dict(draw_here(spec).module.named_parameters())
    wanted = whole_average(
        state / "straight-fsdp2" / WHOLE, SPEC.processes, [n for n in held if n != "pos_embed"]
    )
    assert len(wanted) > 20
    for name, value in wanted.items():
        torch.testing.assert_close(held[name].flatten(), value.flatten(), rtol=0, atol=0)
    first = dict(draw_here(dataclasses.replace(spec, weights="")).module.named_parameters())
    away = [name for name, value in wanted.items() if not torch.equal(first[name].flatten(), value)]
    assert len(away) > len(wanted) // 2, "trained, not as they were drawn"


@pytest.mark.parametrize(
    ("name", "why"), [(OTHER, f"recipe ddp, not {OTHER}"), ("on-one", "processes 2, not 1")]
)
def test_another_recipe_and_number_of_processes_are_refused(name, why, runs):
    row = runs[0][name]
    assert row.status is Status.FAILED and f"was saved with {why}" in row.reason
    assert "resume with the same" in row.way_out


class Evil:
    """Runs a command where a pickle of it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def handed(runs, tmp_path_factory) -> tuple[dict[str, Result], Path]:
    """Trainings that go on from a checkpoint with a command in it: refused, and trusted."""
    base = tmp_path_factory.mktemp("handed")
    assert runs[0]["straight-zero2"].status is Status.OK
    found = base / "found" / HALF
    shutil.copytree(runs[1] / "straight-zero2" / HALF, found)
    for file in found.rglob("*model_states.pt"):
        torch.save({"module": Evil(base / "ran")}, file)
    facts = json.loads((found / checkpoints.DONE).read_text())
    facts["files"] = checkpoints.sizes(found)
    facts["digests"] = checkpoints.proof(found)["digests"]
    (found / checkpoints.DONE).write_text(json.dumps(facts))
    spec, rows = dataclasses.replace(SPEC, recipe="zero2"), {}
    for name, more in {"refused": (), "trusted": ("--trust",)}.items():
        (base / f"of-{name}").mkdir()
        given = words(base / f"of-{name}", "--resume", *more)
        case = Case(spec, given, ((found, base / f"of-{name}" / HALF),))
        rows |= launched_together({name: case}, base)
        if name == "refused":
            assert not (base / "ran").exists(), "code of a checkpoint ran"
    return rows, base


def test_a_checkpoint_of_somebody_else_runs_no_code_unless_it_is_trusted(handed):
    rows, base = handed
    assert rows["refused"].status is Status.FAILED
    assert "give --trust if you trust the author" in rows["refused"].way_out
    assert (base / "ran").exists(), "with --trust DeepSpeed loads what it is given"


def test_what_proves_a_checkpoint_is_its_files_and_the_users_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "step-00000002"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "state.pt").write_bytes(b"state")
    (path / "model.safetensors").write_bytes(b"weights")

    def signed() -> None:
        (path / checkpoints.DONE).write_text(json.dumps(checkpoints.proof(path)))

    signed()
    checkpoints.check_own(path)
    (path / "model.safetensors").write_bytes(b"other weights, which run no code")
    checkpoints.check_own(path)
    (path / "inner" / "state.pt").write_bytes(b"stat3")
    with pytest.raises(checkpoints.Foreign, match=r"inner/state\.pt has changed since it was"):
        checkpoints.check_own(path)
    signed()
    (path / "more.pt").write_bytes(b"")
    with pytest.raises(checkpoints.Foreign, match=r"more\.pt has changed since it was saved"):
        checkpoints.check_own(path)
    signed()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    with pytest.raises(checkpoints.Foreign, match="not saved by this user"):
        checkpoints.check_own(path)
    checkpoints.proof(path)  # makes another key
    with pytest.raises(checkpoints.Foreign, match="by another user or on another machine"):
        checkpoints.claims(path)


def whole_average(folder: Path, ranks: int, names: list[str]) -> dict[str, torch.Tensor]:
    """The averaged weights by name, flat: each rank's file has its rows, in the names' order."""
    files = [torch.load(folder / f"attached-{n}.pt", weights_only=True) for n in range(ranks)]
    shards = zip(*(file["ema"]["shards"] for file in files), strict=True)
    whole = [torch.cat([part.flatten() for part in rows]) for rows in shards]
    return dict(zip(names, whole, strict=True))


def test_another_spec_is_refused_before_anything_is_loaded(train_here, tmp_path):
    spec = dataclasses.replace(SPEC, recipe="single", processes=1)
    run = train_here(spec, 1)
    facts = {"recipe": "single", "model": "DiT-T/8"}
    path = training.save(run, tmp_path, facts)
    with pytest.raises(ValueError, match="saved with model DiT-T/8, not DiT-S/8; resume with"):
        training.restore(run, path, {**facts, "model": "DiT-S/8"})
    again = train_here(spec, 0)
    assert training.restore(again, path, facts)["step"] == 1
    assert weights_digest(again.module) == weights_digest(run.module)
    assert again.attached["ema"].updates == again.optimizer_steps == 1
    assert checkpoints.newest_whole(tmp_path)[0] == path
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-9])
    assert checkpoints.newest_whole(tmp_path)[0] is None, "cut, as by a disk that filled up"
