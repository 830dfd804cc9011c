"""The outcome of a row on several nodes, from each node's files. No processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cluster.leader import Launched
from harness.cluster.meeting import End, Order
from harness.cluster.outcome import NodeFacts, classify_nodes
from harness.launch.outcome import Facts
from harness.result import Status

SILENCE = 60.0
RESET = {
    "type": "RuntimeError",
    "message": "Connection reset by peer [10.77.0.2]:4",
    "traceback": "",
}
HERE = {"phase": "measure", "step": 14}
KILLED = "  traceback : Signal 9 (SIGKILL) received by PID 6408"


def node(rank: int, end: dict | None, *, steps: int = 14, log: str = "", **facts) -> NodeFacts:
    """A node whose rank of the same number came to ``steps``."""
    told = None if end is None else End(token="t", rank=rank, host=f"n{rank + 1}", **end)
    failures = [{**HERE, "rank": rank, **f} for f in (end or {}).get("failures", [])]
    own = Facts(
        exit_code=told.exit_code if told else None,
        stopped=told.stopped if told else None,
        failures=tuple(failures),
        statuses=({"rank": rank, "phase": "measure", "step": steps},),
        log=log,
        recipe="zero2",
        processes=2,
        **facts,
    )
    return NodeFacts(rank=rank, host=f"n{rank + 1}", end=told, facts=own)


def ended(*nodes: NodeFacts, by: str = "", **whole):
    facts = Facts(
        failures=tuple(f for n in nodes for f in n.facts.failures),
        statuses=tuple(s for n in nodes for s in n.facts.statuses),
        log="\n".join(n.facts.log for n in nodes),
        recipe="zero2",
        processes=2,
        **whole,
    )
    return classify_nodes(facts, nodes, SILENCE, by)


PEER = {"exit_code": 1, "stopped": "peer", "failures": [RESET]}
OOM = {"type": "OutOfMemoryError", "message": "CUDA out of memory.", "traceback": ""}
NAN = {"type": "ValueError", "message": "the loss is nan", "traceback": ""}
LIMIT = {"group_kills": 1, "group_limit_bytes": 400 << 20}
CASES = {
    "a node that is gone, and the echo of its end": (
        (node(0, {"exit_code": 1, "failures": [RESET]}), node(1, None)),
        {}, Status.NODE_LOST, "node 1 (n2) stopped answering in phase measure, step 14",
    ),
    "a rank that was killed there": (
        (node(0, PEER), node(1, {"exit_code": 1}, log=KILLED)),
        {}, Status.FAILED, "on node 1 (n2): killed by SIGKILL from outside",
    ),
    "a limit that killed it": (
        (node(0, PEER), node(1, {"exit_code": 1}, log=KILLED, **LIMIT)),
        {}, Status.HOST_OOM, "on node 1 (n2): killed (SIGKILL)",
    ),
    "a rank's own word": (
        (node(0, PEER), node(1, {"exit_code": 1, "failures": [OOM]})),
        {}, Status.GPU_OOM, "on node 1 (n2): rank 1 ran out of GPU memory",
    ),
    "a rank's own fault": (
        (node(0, PEER), node(1, {"exit_code": 1, "failures": [NAN]})),
        {}, Status.FAILED, "on node 1 (n2): rank 1 failed in phase measure",
    ),
    "what was killed because another had ended is no kill from outside": (
        (node(0, {"exit_code": 1, "stopped": "peer"}, log=KILLED), node(1, None)),
        {}, Status.NODE_LOST, "node 1 (n2) stopped answering",
    ),
    "a link that is down, files shared by another way": (
        (node(0, {"stopped": "peer"}), node(1, {"stopped": "unreachable", "lost": [0]})),
        {}, Status.NODE_LOST, "node 1 (n2) stopped answering in phase measure, step 14: it could "
        "not reach node 0 (n1)",
    ),
    "a node cut off with its files": (
        (node(0, {"stopped": "lost", "lost": [1]}), node(1, {"stopped": "isolated"})),
        {}, Status.NODE_LOST, "node 1 (n2) stopped answering",
    ),
    "all there, and none goes on": (
        (node(0, {"stopped": "silent"}), node(1, {"stopped": "silent"}, steps=13)),
        {}, Status.FAILED, "no rank took a step for 60 s in phase measure, step 13; all nodes "
        "answer; least far: rank 1 on node 1",
    ),
    "the deadline": (
        (node(0, {"stopped": "timeout"}), node(1, {"stopped": "timeout"})),
        {"stopped": "timeout", "timeout_seconds": 30.0}, Status.TIMEOUT, "not finished after 30 s",
    ),
    "Slurm's limit": (
        (node(0, {"stopped": "interrupted"}), node(1, None)),
        {"stopped": "interrupted", "by": "time limit"}, Status.INTERRUPTED,
        "interrupted in phase measure, step 14 by Slurm: time limit",
    ),
    "Slurm's word for a node": (
        (node(0, {"stopped": "interrupted"}), node(1, None)),
        {"stopped": "interrupted", "by": "node failure on n2"}, Status.NODE_LOST,
        "node 1 (n2) stopped answering in phase measure, step 14: Slurm says node failure on n2",
    ),
    "a node told to end": (
        (node(0, PEER), node(1, {"stopped": "interrupted"})),
        {}, Status.INTERRUPTED, "node 1 (n2) was told to end in phase measure",
    ),
    "Ctrl-C": (
        (node(0, {"stopped": "interrupted"}), node(1, {"stopped": "interrupted"})),
        {"stopped": "interrupted"}, Status.INTERRUPTED, "interrupted in phase measure",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_row_on_several_nodes(name):
    nodes, whole, status, words = CASES[name]
    found = ended(*nodes, **whole)
    assert found.status is status and words in (found.reason or "")
    assert found.hint


def test_another_headroom_on_any_node_is_told_of():
    """Each supervisor sees its own machine alone."""
    ends = {0: End(token="t", rank=0, host="n1", exit_code=0),
            1: End(token="t", rank=1, host="n2", exit_code=0, others=[4711]), 2: None}  # fmt: skip
    order = Order(token="t", nodes=3, processes=1, head="n1", words=[], environment={}, out="",
                  timeout=None, silence=SILENCE, code="", versions={}, cpu="")  # fmt: skip
    seen = Launched(order, Path("/nowhere"), lambda status: None)
    seen.ends = ends
    assert seen.launch_record().others == [4711]
