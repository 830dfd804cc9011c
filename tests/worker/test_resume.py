"""Training saved, ended and resumed in new processes goes on as if it had never stopped."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from conftest import launched

from harness.result import Result, Status
from harness.spec import Spec
from harness.worker import checkpoint
from harness.worker.audit import weights_digest

SPEC = Spec(
    recipe="ddp", model="DiT-T/8", global_batch=4, warmup=1, steps=5, processes=2, ema=0.9,
    learning_rate=1e-3,
)  # fmt: skip
HALF, WHOLE = "step-00000003", "step-00000006"
RECIPES = ["ddp", "zero2", "zero3"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """``straight(recipe)``: six steps without a stop, saved after three and six of them."""
    base, done = tmp_path_factory.mktemp("straight"), {}

    def get(recipe: str) -> tuple[Result, Path]:
        if recipe not in done:
            spec, state = dataclasses.replace(SPEC, recipe=recipe), base / recipe / "state"
            words = ["--checkpoint", str(state), "--save-every", "3"]
            done[recipe] = launched(spec, base / recipe / "run", *words), state
        return done[recipe]

    return get


def resumed(spec: Spec, state: Path, tmp_path: Path) -> tuple[Result, Path]:
    """The same in new processes, which find the first three steps alone."""
    shutil.copytree(state / HALF, tmp_path / "state" / HALF)
    words = ["--checkpoint", str(tmp_path / "state"), "--save-every", "3", "--resume"]
    return launched(spec, tmp_path / "run", *words), tmp_path / "state"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_training_goes_on_as_if_never_stopped(recipe, straight, tmp_path):
    row, state = straight(recipe)
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert sorted(p.name for p in state.iterdir()) == [HALF, WHOLE]
    again, other = resumed(dataclasses.replace(SPEC, recipe=recipe), state, tmp_path)
    assert again.status is Status.OK, f"{again.reason}\n{again.log_tail}"
    assert len(row.losses) == 6 and len(set(row.losses)) == 6
    assert again.losses == pytest.approx(row.losses, rel=1e-6)
    assert len(row.grad_norms) == 6
    assert again.grad_norms == pytest.approx(row.grad_norms, rel=1e-5)
    assert [c for c in again.audit if not c.ok] == []
    assert sum(len(r.step_seconds) + len(r.warmup_seconds) for r in again.ranks) == 2 * 3
    for rank in range(SPEC.processes):
        wanted, found = (
            torch.load(p / WHOLE / f"attached-{rank}.pt", weights_only=True)["ema"]
            for p in (state, other)
        )
        assert found["updates"] == wanted["updates"] == 6
        for a, b in zip(found["shards"], wanted["shards"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_another_number_of_processes_or_another_recipe_is_refused(straight, tmp_path):
    _, state = straight("ddp")
    for name, value, said in (
        ("processes", 1, "processes 2, not 1"),
        ("recipe", "ddp+checkpoint", "recipe ddp, not ddp+checkpoint"),
    ):
        row, _ = resumed(dataclasses.replace(SPEC, **{name: value}), state, tmp_path / name)
        assert row.status is Status.FAILED
        assert f"was saved with {said}; resume with the same" in f"{row.reason}{row.log_tail}"


def test_another_spec_is_refused_before_anything_is_loaded(train_here, tmp_path):
    spec = dataclasses.replace(SPEC, recipe="single", processes=1)
    run, _ = train_here(spec, 1)
    facts = {"recipe": "single", "model": "DiT-T/8"}
    path = checkpoint.save(run.trained, tmp_path, facts)
    before = weights_digest(run.trained.module)
    with pytest.raises(ValueError, match="saved with model DiT-T/8, not DiT-S/8; resume with"):
        checkpoint.restore(run.trained, path, {**facts, "model": "DiT-S/8"})
    again, _ = train_here(spec, 0)
    assert weights_digest(again.trained.module) != before
    assert checkpoint.restore(again.trained, path, facts)["step"] == 1
    assert weights_digest(again.trained.module) == before
    assert again.trained.attached["ema"].updates == again.trained.optimizer_steps == 1


def test_only_whole_checkpoints_count(tmp_path):
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for step in (9, 10, 11):
        (tmp_path / f"step-{step:08d}").mkdir()
        if step != 11:
            (tmp_path / f"step-{step:08d}" / checkpoint.DONE).write_text("{}")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000010"
