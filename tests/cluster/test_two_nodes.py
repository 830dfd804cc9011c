"""One row on two nodes, started once, beside the same row on one machine: real processes.

The nodes are network namespaces where that can be (root), else two commands on one host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import Case, launched_together

from harness import ROOT
from harness.result import Result, Status, load, load_all
from harness.spec import Spec
from tests.made.two_nodes import two_nodes, why_not

pytestmark = pytest.mark.thorough

SPEC = Spec(recipe="ddp", model="DiT-T/8", global_batch=4, warmup=1, steps=2, processes=2)
WORDS = "run --recipes ddp --model DiT-T/8 --global-batch 4 --warmup 1 --steps 2 --processes 2 "
WORDS += "--device cpu --noise-floor 1 --no-predictions --out"


class Pair(NamedTuple):
    """``two`` on two nodes and ``one`` on one machine; the commands' exit codes, what they
    printed, and what was left running on the nodes."""

    two: Result
    one: Result
    codes: list[int]
    said: list[str]
    left: list[str]
    out: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    out = tmp_path_factory.mktemp("two")
    with started(out) as (children, left):
        alone = {"one": Case(SPEC, resident=True)}  # which takes the steps of any run
        one = launched_together(alone, tmp_path_factory.mktemp("alone"))["one"]
        codes = [child.wait(240) for child in children]
        remaining = left()
    said = [(out / f"said{rank}.txt").read_text() for rank in (0, 1)]
    rows, _ = load_all(out)
    assert rows, said
    return Pair(rows[0], one, codes, said, remaining, out)


@contextlib.contextmanager
def started(out: Path) -> Iterator[tuple[list[subprocess.Popen], Callable[[], list[str]]]]:
    """Both commands, on nodes of their own where that can be; and what is left on the nodes."""
    words = [*WORDS.split(), str(out)]
    if not why_not():
        with two_nodes() as nodes:
            yield nodes.run_on_both(words, out), nodes.left
        return
    command = [sys.executable, "-m", "harness", *words, "--nodes", "2", "--head", "127.0.0.1"]
    children = []
    for rank in (0, 1):
        with (out / f"said{rank}.txt").open("w") as said:
            own = [*command, "--node-rank", str(rank)]
            children.append(subprocess.Popen(own, cwd=ROOT, stdout=said, stderr=said))
    yield children, list


def test_a_row_on_two_nodes_is_ok_and_both_commands_end_well(pair):
    assert pair.two.status is Status.OK, pair.two.reason
    assert pair.codes == [0, 0] and pair.left == [], pair.said


def test_it_trains_the_same_bit_for_bit(pair):
    assert pair.one.status is Status.OK, pair.one.reason
    assert pair.two.losses == pair.one.losses and len(pair.two.losses) > 4
    assert pair.two.grad_norms == pair.one.grad_norms
    assert pair.two.projections == pair.one.projections
    peaks = [[rank.categories.total for rank in row.ranks] for row in (pair.two, pair.one)]
    assert peaks[0] == peaks[1]


def test_the_result_names_its_nodes_and_the_network_between_them(pair):
    row = pair.two
    assert row.spec == dataclasses.replace(SPEC, nodes=2) and len(row.ranks) == 2
    assert [(n.rank, n.answered, n.exit_code, n.stopped) for n in row.nodes] == [
        (0, True, 0, None), (1, True, 0, None),
    ]  # fmt: skip
    assert all(n.cores and n.tree_peak_bytes > 1 << 27 and n.interface for n in row.nodes)
    assert row.launch.tree_peak_bytes == max(n.tree_peak_bytes for n in row.nodes)
    assert row.wire.backend == "gloo" and row.wire.size_bytes >= 1 << 20
    assert 1e-6 < row.wire.latency_seconds < 1 and row.wire.bandwidth > 1e6
    assert row.token and load(pair.out / "runs" / next_folder(pair.out) / "result.json") == row


def next_folder(out: Path) -> str:
    (folder,) = (out / "runs").iterdir()
    return folder.name


def test_the_leader_reports_and_the_other_follows(pair):
    assert "between them" in pair.said[0] and "report.md" in pair.said[0]
    assert "node 1: ddp-on2-" in pair.said[1] and "report.md" not in pair.said[1]
    report = (pair.out / "report.md").read_text()
    assert "On 2 nodes; between them" in report


def test_each_nodes_log_is_kept(pair):
    log = (pair.out / "runs" / next_folder(pair.out) / "log.txt").read_text()
    assert log.index("==== node 0 ====") < log.index("==== node 1 ====")
