"""Two nodes as network namespaces: a suite on both, and what can befall one of them.

As root, some ten minutes on two cores: ./run.sh test -n 1 -m nodes
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import ROOT
from harness.report.figures.derive import paused_steps
from harness.result import Result, Status, load_all
from tests.made.living import until
from tests.made.two_nodes import Nodes, steps, two_nodes, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.nodes, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

DEADLINE = 60
"""Seconds of a row; those of a faulty row end it, if its own errors do not."""


FAILS = """
import socket
import torch
from torch._subclasses.fake_tensor import FakeTensor

def loss(model, batch):
    real = not isinstance(batch["x"], FakeTensor)  # a plan looks at the loss before any launch
    if real and socket.gethostname() == "n2":
        raise ValueError("no good on n2")
    return model(batch["x"]).square().mean()

def make():
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    return torch.nn.Sequential(*layers), {"x": torch.randn(4, 3, 8)}, loss
"""


@pytest.fixture
def nodes():
    """Two of them, and at the end nothing on them runs."""
    with two_nodes() as made:
        yield made
        until(lambda: not made.left(), 5)


def line(recipe: str, steps: int = 4000, deadline: int = DEADLINE, model: str = "DiT-T/4") -> list:
    return (
        f"run --recipes {recipe} --model {model} --global-batch 8 --processes 2 --warmup 1 "
        f"--steps {steps} --device cpu --noise-floor 1 --no-predictions --timeout {deadline} --out"
    ).split()


def measuring(nodes: Nodes, out: Path, recipe: str, **given: int) -> list[subprocess.Popen]:
    """Both commands, with their row in its timed steps."""
    children = nodes.run_on_both([*line(recipe, **given), str(out)], out)
    until(lambda: steps(out), children=children)
    return children


def ended(folder: Path, child: subprocess.Popen, seconds: float) -> Result:
    """A node's row, once its command has ended in so many seconds."""
    child.wait(seconds)
    ((result,), skipped) = load_all(folder)
    assert not skipped
    return result


def said(out: Path) -> str:
    return "\n".join((out / f"said{rank}.txt").read_text() for rank in (0, 1))


def ranks_on(nodes: Nodes, rank: int) -> list[int]:
    """Processes of the training on a node, without their launcher."""
    words = ["ip", "netns", "pids", nodes.names[rank]]
    pids = subprocess.run(words, capture_output=True, text=True).stdout.split()
    found = []
    for pid in map(int, pids):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"harness.train" in line and not any(w.endswith(b"accelerate") for w in line):
            found.append(pid)
    return found


def test_a_suite_of_four_rows_computes_as_on_one_machine(nodes, tmp_path):
    line = "run --suite smoke --device cpu --no-predictions --out"
    both, one = tmp_path / "two", tmp_path / "one"
    children = nodes.run_on_both([*line.split(), str(both)], both)
    assert [child.wait(500) for child in children] == [0, 0], said(both)
    subprocess.run([sys.executable, "-m", "harness", *line.split(), str(one)], cwd=ROOT, check=True)
    two_rows, one_rows = ({r.spec.recipe: r for r in load_all(out)[0]} for out in (both, one))
    assert len(two_rows) == 4 and two_rows.keys() == one_rows.keys()
    for recipe, row in two_rows.items():
        there = one_rows[recipe]
        assert row.status is there.status is Status.OK, row.reason
        assert row.losses == there.losses and row.grad_norms == there.grad_norms, recipe
        assert row.projections == there.projections
        assert [r.categories for r in row.ranks] == [r.categories for r in there.ranks]


@pytest.mark.parametrize("recipe", ["ddp", "zero2"])
def test_a_rank_is_killed(nodes, tmp_path, recipe):
    children = measuring(nodes, tmp_path, recipe)
    os.kill(ranks_on(nodes, 1)[0], signal.SIGKILL)
    far = ended(tmp_path, children[0], DEADLINE + 60)
    assert far.status is Status.NODE_LOST, far.reason
    assert "another node stopped answering in phase measure, step" in far.reason
    near = ended(tmp_path / "node-1", children[1], DEADLINE)
    assert near.status is Status.FAILED and "killed by SIGKILL from outside" in near.reason


@pytest.mark.parametrize("dead", [0, 1], ids=["head", "other"])
def test_a_node_is_killed(nodes, tmp_path, dead):
    children = measuring(nodes, tmp_path, "ddp")
    nodes.power_off(children[dead])
    folder = tmp_path if dead else tmp_path / "node-1"
    row = ended(folder, children[1 - dead], DEADLINE + 60)
    assert row.status is Status.NODE_LOST, row.reason
    assert row.phase == "measure" and row.step > 2 and children[1 - dead].returncode == 1


def test_a_link_that_is_cut_ends_the_row_at_its_deadline(nodes, tmp_path):
    """No packet tells anybody, and torchrun's agent does not notice."""
    children = measuring(nodes, tmp_path, "zero2")
    nodes.link(up=False)
    for child, folder in zip(children, (tmp_path, tmp_path / "node-1"), strict=True):
        row = ended(folder, child, DEADLINE + 90)
        assert row.status in (Status.TIMEOUT, Status.NODE_LOST), row.reason
        assert "phase measure, step" in row.reason


def test_an_error_on_one_node_is_the_rows_on_both(nodes, tmp_path):
    """The cause is a rank's of node 1, and node 0 says so."""
    (tmp_path / "fails.py").write_text(FAILS)
    words = line("ddp", steps=2, model=f"{tmp_path}/fails.py:make")
    children = nodes.run_on_both([*words, str(tmp_path / "out")], tmp_path / "out")
    for child, folder in zip(children, (tmp_path / "out", tmp_path / "out/node-1"), strict=True):
        row = ended(folder, child, 200)
        assert row.status is Status.FAILED, row.reason
        assert "no good on n2" in row.reason
    assert "on n2 failed" in load_all(tmp_path / "out")[0][0].reason


def test_an_outage_that_ends_is_flagged(nodes, tmp_path):
    """Three of them: one that falls between two steps, where ranks meet, costs no step."""
    children = measuring(nodes, tmp_path, "ddp", steps=250, deadline=400)
    for _ in range(3):
        nodes.link(up=False)
        time.sleep(8)
        nodes.link(up=True)
        after = max(steps(tmp_path)) + 5
        until(lambda: max(steps(tmp_path), default=0) > after, 60, children=children)  # noqa: B023
    assert [child.wait(400) for child in children] == [0, 0], said(tmp_path)
    ((row,), _) = load_all(tmp_path)
    assert row.status is Status.OK and paused_steps(row) >= 1
    assert "network paused?" in (tmp_path / "report.md").read_text()
