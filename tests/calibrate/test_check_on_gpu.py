"""Where there is a GPU: the whole catalog on it, several at a time, as a person starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from harness import ROOT
from harness.result import Status, load_all
from harness.void import shown_status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_every_recipe_of_the_catalog_runs_or_says_what_it_lacks(tmp_path):
    words = ["calibrate", "--part", "check", "--out", str(tmp_path / "s")]
    done = subprocess.run([sys.executable, "-m", "harness", *words], cwd=ROOT, text=True,
                          capture_output=True, timeout=3600)  # fmt: skip
    results, skipped = load_all(tmp_path / "s" / "check")
    ends = {r.spec.recipe: shown_status(r) for r in results}
    able = (Status.OK, Status.UNSUPPORTED, Status.REFUSED)
    wrong = {recipe: end for recipe, end in ends.items() if end[0] not in able}
    assert not wrong and not skipped and len(ends) > 60, done.stdout[-4000:]
    ran = [r for r in results if r.status is Status.OK]
    assert all(r.meter == "cuda" and r.ranks[0].phases["steady"].reserved for r in ran)
