"""Tests write nothing into the tree: a run that did fails, and names what was written."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness import ROOT


@pytest.mark.parametrize(
    ("does", "ends"),
    [
        ("(root / 'docs/results/report.json').read_text()", 0),
        ("(root / 'docs/results/report.json').write_text('{}')", 1),
        ("(root / 'docs/results/report.json').unlink()", 1),
    ],
    ids=["reads", "writes the same", "removes"],
)
def test_a_run_that_writes_into_the_tree_fails(does, ends, tmp_path):
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "docs/results/report.json").write_text("{}")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    body = f"from pathlib import Path\nroot = Path({str(tmp_path)!r})\n"
    (tmp_path / "test_it.py").write_text(f"{body}def test_it(tmp_path):\n    {does}\n")
    words = [sys.executable, "-m", "pytest", "-p", "tests.made.untouched", "-p", "no:cacheprovider"]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=here)
    assert found.returncode == ends, found.stdout + found.stderr
    said = "written while tests ran (by a test, or by you): docs/results/"
    assert (said in found.stdout) == bool(ends), found.stdout
