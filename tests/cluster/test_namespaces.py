"""Two nodes as network namespaces: a suite on both, and everything that can befall one of them.

By hand, as root, some ten minutes on two cores: ./run.sh test -n 1 -m nodes
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import ROOT
from harness.report.figures.derive import paused_steps
from harness.result import Result, Status, load_all
from tests.made.two_nodes import Nodes, statuses, stepping, two_nodes, wait, why_not

WHY_NOT = why_not()
pytestmark = [pytest.mark.nodes, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

SILENCE = 12
ENDING = 75
"""Seconds from a fault to the end of both commands: silence, two graces, the report, a busy
machine."""


@pytest.fixture
def nodes():
    with two_nodes() as made:
        yield made


def row_words(recipe: str, out: Path, steps: int, silence: int = SILENCE) -> list[str]:
    line = (
        f"run --recipes {recipe} --model DiT-T/4 --global-batch 8 --processes 2 --warmup 1 "
        f"--steps {steps} --device cpu --noise-floor 1 --no-predictions --silence {silence} --out"
    )
    return [*line.split(), str(out)]


def furthest(out: Path) -> int:
    """The last step that a rank has told of."""
    return max((one["step"] for one in statuses(out)), default=0)


def measuring(nodes: Nodes, out: Path, recipe: str, steps: int = 4000, silence: int = SILENCE):
    """Both commands, with their row in its timed steps."""
    children = nodes.run_on_both(row_words(recipe, out, steps, silence), out)
    wait(lambda: stepping(out), 240, children)
    return children


def ended(nodes: Nodes, out: Path, children: list[subprocess.Popen]) -> Result:
    """The row, once both commands have ended in time; nothing of them is left on either node."""
    began = time.monotonic()
    for child in children:
        child.wait(max(1.0, ENDING - (time.monotonic() - began)))
    wait(lambda: not nodes.left(), 5, [])
    ((result,), skipped) = load_all(out)
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


# ---- the same as on one machine ----


def test_a_suite_of_four_rows_reports_as_on_one_machine(nodes, tmp_path):
    line = "run --suite smoke --device cpu --no-predictions --out"
    both, one = tmp_path / "two", tmp_path / "one"
    children = nodes.run_on_both([*line.split(), str(both)], both)
    assert [child.wait(400) for child in children] == [0, 0], said(both)
    subprocess.run([sys.executable, "-m", "harness", *line.split(), str(one)], cwd=ROOT, check=True)
    two_rows, one_rows = ({r.spec.recipe: r for r in load_all(out)[0]} for out in (both, one))
    assert len(two_rows) == 4 and two_rows.keys() == one_rows.keys()
    for recipe, row in two_rows.items():
        there = one_rows[recipe]
        assert row.status is there.status is Status.OK, row.reason
        assert row.losses == there.losses and row.grad_norms == there.grad_norms, recipe
        assert row.projections == there.projections
        assert [r.categories for r in row.ranks] == [r.categories for r in there.ranks]
    tables = [computed(out) for out in (both, one)]
    assert tables[0] == tables[1] and len(tables[0]) == 4


COMPUTED = re.compile(
    r"repeats|timed_steps|precision|peak|need|hosted|imbalance|param|grad|optim|ema|activ|work|beyond"
    r"|loss|moment|update|average|parity|differs_in|sibling"
)
"""Columns that follow from the computation, and not from a clock or a library's heap."""


def computed(out: Path) -> dict[str, dict]:
    """Recipe -> such columns of its row in the report."""
    rows = json.loads((out / "report.json").read_text())["groups"][0]["rows"]
    return {
        row["spec"]["recipe"]: {
            name: value
            for name, value in {**row["numbers"], **row["versus_reference"]}.items()
            if COMPUTED.match(name) and "metered" not in name
        }
        for row in rows
    }


# ---- what can befall them ----


def test_a_rank_is_killed(nodes, tmp_path):
    children = measuring(nodes, tmp_path, "ddp")
    os.kill(ranks_on(nodes, 1)[0], signal.SIGKILL)
    row = ended(nodes, tmp_path, children)
    assert row.status is Status.FAILED, row.reason
    assert "on node 1 (n2): killed by SIGKILL from outside" in row.reason
    assert row.phase == "measure" and row.step > 2


def test_a_node_is_killed(nodes, tmp_path):
    children = measuring(nodes, tmp_path, "zero2")
    nodes.power_off(children[1])
    row = ended(nodes, tmp_path, children)
    assert row.status is Status.NODE_LOST, row.reason
    assert re.match(r"node 1 \(n2\) stopped answering in phase measure, step \d+: ", row.reason)
    assert [n.answered for n in row.nodes] == [True, False] and children[0].returncode == 1


def test_the_head_is_killed(nodes, tmp_path):
    """Nobody is left to write the row: the other node must not wait for ever."""
    children = measuring(nodes, tmp_path, "ddp")
    nodes.power_off(children[0])
    children[1].wait(ENDING)
    wait(lambda: not nodes.left(), 5, [])
    assert children[1].returncode == 2 and "node 0 gave no sign for 12 s" in said(tmp_path)


@pytest.mark.parametrize("recipe", ["ddp", "zero2"])
def test_the_link_is_cut(nodes, tmp_path, recipe):
    """No packet tells anybody, and under ZeRO no group's timeout: the row ends from outside."""
    children = measuring(nodes, tmp_path, recipe)
    nodes.link(up=False)
    row = ended(nodes, tmp_path, children)
    assert row.status is Status.NODE_LOST, row.reason
    assert "node 1 (n2) stopped answering in phase measure, step" in row.reason
    assert "could not reach node 0 (n1)" in row.reason


def test_a_rank_that_stands_still(nodes, tmp_path):
    children = measuring(nodes, tmp_path, "zero2")
    os.kill(ranks_on(nodes, 1)[0], signal.SIGSTOP)
    row = ended(nodes, tmp_path, children)
    assert row.status is Status.FAILED, row.reason
    assert "no rank took a step for 12 s in phase measure" in row.reason


def test_an_outage_that_ends_is_flagged(nodes, tmp_path):
    """Three of them: one that falls between two steps, where ranks meet, costs no step."""
    children = measuring(nodes, tmp_path, "ddp", steps=250, silence=60)
    for _ in range(3):
        nodes.link(up=False)
        time.sleep(8)
        nodes.link(up=True)
        after = furthest(tmp_path) + 5
        wait(lambda after=after: furthest(tmp_path) > after, 60, children)
    assert [child.wait(400) for child in children] == [0, 0], said(tmp_path)
    ((row,), _) = load_all(tmp_path)
    assert row.status is Status.OK and paused_steps(row) >= 1
    assert max(row.ranks[0].step_seconds) > 7
    assert "network paused?" in (tmp_path / "report.md").read_text()


def test_a_slow_link_is_named(nodes, tmp_path):
    nodes.slow("50mbit")
    children = nodes.run_on_both(row_words("ddp", tmp_path, 3), tmp_path)
    assert [child.wait(240) for child in children] == [0, 0], said(tmp_path)
    ((row,), _) = load_all(tmp_path)
    assert row.wire.bandwidth < 7e6
    assert "slow network between the nodes" in (tmp_path / "report.md").read_text()
