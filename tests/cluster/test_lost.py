"""A link between two nodes that is cut, without a training: supervisors on two namespaces, and
ranks that wait for each other as collectives do. As root. What else befalls a node, and trainings:
test_namespaces.py."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from harness.cluster import preflight
from harness.cluster.leader import Launched, node_facts, whole_facts
from harness.cluster.meeting import Order, write
from harness.cluster.outcome import classify_nodes
from harness.result import Status
from harness.spec import Spec
from harness.system import machine
from tests.made.two_nodes import two_nodes, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SILENCE = 6.0
SPEC = Spec(recipe="zero2", processes=2, nodes=2)
SERVE = """import sys; from pathlib import Path; from harness.cluster.supervisor import serve
serve(Path(sys.argv[1]), int(sys.argv[2]))"""


class Row:
    """A launch of ``tests.children.steps`` on two nodes, led from here."""

    def __init__(self, nodes, folder: Path) -> None:
        self.nodes, self.folder = nodes, folder
        order = Order(
            token="lost", nodes=2, processes=1, head=nodes.addresses[0], out=str(folder),
            words=[sys.executable, "-m", "tests.children.steps", "$NODE_RANK", "$HEAD", "$PORT"],
            environment={"CUDA_VISIBLE_DEVICES": ""}, timeout=60.0, silence=SILENCE,
            code=preflight.code(), versions=preflight.versions(), cpu=machine.cpu_name(),
        )  # fmt: skip
        write(folder, order)
        self.seen = Launched(order, folder, lambda status: None)
        words = [sys.executable, "-c", SERVE, str(folder)]
        self.children = [
            nodes.start(rank, [*words, str(rank)], folder / f"said{rank}.txt") for rank in (0, 1)
        ]
        self.until(self.stepping, 40)

    def until(self, holds, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, (self.folder / "said1.txt").read_text()
            self.seen.look()
            if self.seen.go is None:
                self.seen.meet()
            time.sleep(0.05)

    def stepping(self) -> bool:
        beats = [beat for beat in self.seen.beats.values() if beat and beat.statuses]
        return len(beats) == 2 and all(beat.statuses[0]["step"] > 3 for beat in beats)

    def ended(self) -> tuple[Status, str]:
        """The row, once all nodes have ended in time; and nothing is left on any."""
        over = SILENCE + 35
        self.until(lambda: all(child.poll() is not None for child in self.children), over)
        self.until(lambda: not self.nodes.left(), 5)
        self.seen.end(0.5)
        facts = node_facts(SPEC, self.seen)
        whole = whole_facts(SPEC, self.seen, facts)
        status, reason, hint = classify_nodes(whole, facts, SILENCE)
        assert hint
        return status, reason


@pytest.fixture
def row(tmp_path):
    with two_nodes() as nodes:
        yield Row(nodes, tmp_path)


def test_a_link_that_is_cut(row):
    row.nodes.link(up=False)
    status, reason = row.ended()
    assert status is Status.NODE_LOST, reason
    # On a busy machine the other's files may fall silent first: the same node either way.
    assert re.match(r"node 1 \(n2\) stopped answering in phase measure(, step \d+)?: it ", reason)
