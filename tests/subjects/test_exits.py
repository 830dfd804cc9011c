"""Models whose code ends the process: a failure, whatever the exit code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from harness.result import Status, load

QUITS = """
import os, sys
import torch
from torch import nn

def loss(module, batch):
    out = module(batch["x"])
    {loss}
    return out.square().mean()

def make():
    {make}
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {{"x": torch.randn(4, 3, 8)}}, loss
"""


def model(folder: Path, place: str, code: str) -> str:
    said = dict.fromkeys(("make", "loss"), "pass") | {place: code}
    (folder / "quits.py").write_text(QUITS.format(**said))
    return f"{folder}/quits.py:make"


@pytest.mark.parametrize(
    ("place", "code"),
    [("loss", "sys.exit(0)"), ("make", "os._exit(0)"), ("loss", "sys.exit(3)")],
)
def test_a_model_that_ends_the_process_does_not_fit(tmp_path, capsys, place, code):
    name = model(tmp_path, place, code)
    words = ["--gpu", "RTX-4090", "--gpus", "1", "--recipes", "single", "--check"]
    assert cli.main(["plan", "--model", name, *words]) == 2
    said = capsys.readouterr()
    assert "quits.py" in said.err and "fits" not in said.out + said.err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "code", "why"),
    [
        ("loss", "type(out) is torch.Tensor and os._exit(0)", "ended the process (exit code 0)"),
        (
            "loss",
            "out.requires_grad and out.register_hook(lambda g: os._exit(0))",
            "no result in phase",
        ),
    ],
)
def test_a_run_that_ends_without_a_result_has_failed(tmp_path, place, code, why):
    """These leave only in a real pass, or in the backward pass, where nothing sees them."""
    words = ["--model", model(tmp_path, place, code), "--device", "cpu", "--steps", "1"]
    out = tmp_path / "out"
    assert cli.main(["run", "--recipes", "single", *words, "--out", str(out)]) == 1
    (file,) = (out / "runs").glob("*/result.json")
    found = load(file)
    assert found.status is Status.FAILED and why in str(found.reason)
