"""Training saved, ended and resumed in new processes goes on as if it had never stopped."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import launched

from harness.result import Status
from harness.spec import Spec

SPEC = Spec(
    recipe="ddp", model="DiT-T/8", global_batch=4, warmup=1, steps=5, processes=2, ema=0.9,
    learning_rate=1e-3,
)  # fmt: skip


@pytest.mark.parametrize("recipe", ["ddp", "zero2", "zero3"])
def test_a_resumed_training_goes_on_as_if_never_stopped(recipe, tmp_path):
    spec = dataclasses.replace(SPEC, recipe=recipe)
    half = dataclasses.replace(spec, steps=2)
    save = ["--checkpoint", str(tmp_path / "state"), "--save-every", "3"]
    straight = launched(spec, tmp_path / "straight", "--checkpoint", str(tmp_path / "other"))
    first = launched(half, tmp_path / "first", *save)
    second = launched(spec, tmp_path / "second", *save, "--resume")
    for row in (straight, first, second):
        assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    assert len(straight.losses) == 6 and first.losses == pytest.approx(straight.losses[:3])
    assert second.losses == pytest.approx(straight.losses, rel=1e-6)


def test_resuming_another_recipe_is_refused(tmp_path):
    spec = dataclasses.replace(SPEC, recipe="single", processes=1, steps=1)
    save = ["--checkpoint", str(tmp_path / "state")]
    assert launched(spec, tmp_path / "first", *save).status is Status.OK
    other = dataclasses.replace(spec, recipe="single+checkpoint")
    row = launched(other, tmp_path / "second", *save, "--resume")
    assert row.status is Status.FAILED and "was saved by single" in f"{row.reason}{row.log_tail}"
