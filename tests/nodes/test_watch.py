"""When a supervisor ends its part, and what a row on several nodes is called then. No processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.launch.outcome import Facts
from harness.nodes.files import End, Order
from harness.nodes.launch import _launch_record
from harness.nodes.launched import Launched
from harness.nodes.outcome import NodeFacts, StepState, classify_nodes
from harness.nodes.watch import Progress, Signs, stop_word
from harness.result import Status
from harness.system import process

SILENCE = 60.0


@pytest.mark.parametrize(
    ("signs", "word"),
    [
        ({}, None),
        ({"quiet": {1: 59.0}}, None),
        ({"quiet": {1: 61.0, 2: 5.0}}, ("lost", [1])),
        ({"ended_badly": 9.0}, None),
        ({"ended_badly": 11.0}, ("peer", [])),
        ({"ended_badly": 11.0, "quiet": {1: 61.0}}, ("lost", [1])),
        ({"unreachable": 59.0}, None),
        ({"unreachable": 61.0}, ("unreachable", [0])),
        ({"unwritable": 31.0, "quiet": {1: 61.0}}, ("isolated", [])),
        ({"unwritable": 29.0}, None),
        ({"silent": 61.0}, ("silent", [])),
    ],
)
def test_what_ends_a_part(signs, word):
    assert stop_word(Signs(**signs), SILENCE) == word


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def stepped(phases: list[tuple[str, int, float]]) -> tuple[Progress, Clock]:
    """Progress that saw (phase, step) at a time."""
    clock = Clock()
    progress = Progress(clock)
    for phase, step, clock.time in phases:
        progress.see([{"rank": 0, "phase": phase, "step": step}])
    return progress, clock


FAST = [("warmup", 0, 1.0), ("warmup", 1, 2.0), ("measure", 0, 2.5), ("measure", 1, 3.0)]
SLOW = [("warmup", 0, 1.0), ("warmup", 1, 31.0), ("measure", 0, 61.0), ("measure", 1, 91.0)]


@pytest.mark.parametrize(
    ("seen", "after", "silent"),
    [
        (FAST, 59.0, False),
        (FAST, 61.0, True),
        (SLOW, 61.0, False),  # steps of 30 s: twenty of them may pass
        (SLOW, 601.0, True),
        ([("load", 0, 1.0)], 900.0, False),  # a compiler, or data: the deadline bounds it
        ([("warmup", 0, 1.0)], 900.0, False),
        ([], 900.0, False),
    ],
)
def test_ranks_are_silent_where_steps_should_follow_one_another(seen, after, silent):
    progress, clock = stepped(seen)
    clock.time += after
    assert (progress.silent_for(SILENCE) is not None) is silent


def test_a_pause_that_ends_is_none():
    progress, clock = stepped(FAST)
    clock.time += 50
    progress.see([{"rank": 0, "phase": "measure", "step": 2}])
    clock.time += 50
    assert progress.silent_for(SILENCE) is None


# ---- outcomes ----

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


def ended(*nodes: NodeFacts, step: StepState | None = None, **whole):
    facts = Facts(
        failures=tuple(f for n in nodes for f in n.facts.failures),
        statuses=tuple(s for n in nodes for s in n.facts.statuses),
        log="\n".join(n.facts.log for n in nodes),
        recipe="zero2",
        processes=2,
        **whole,
    )
    return classify_nodes(facts, nodes, step, SILENCE)


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
        {"stopped": "timeout", "timeout_seconds": 30.0}, Status.TIMEOUT, "not done after 30 s",
    ),
    "Ctrl-C": (
        (node(0, {"stopped": "interrupted"}), node(1, {"stopped": "interrupted"})),
        {"stopped": "interrupted"}, Status.INTERRUPTED, "interrupted in phase measure",
    ),
    "a result is a result": (
        (node(0, {"exit_code": 1}), node(1, None)), {"result": Status.OK}, Status.OK, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_row_on_several_nodes(name):
    nodes, whole, status, words = CASES[name]
    found = ended(*nodes, **whole)
    assert found.status is status and words in (found.reason or "")
    assert found.way_out or status is Status.OK


STEPS = {
    "OUT_OF_MEMORY": (Status.HOST_OOM, "on n2: the step's memory limit ended it in phase measure"),
    "NODE_FAIL": (Status.NODE_LOST, "n2 stopped answering in phase measure, step 14"),
    "TIMEOUT": (Status.INTERRUPTED, "the step's time limit ended it"),
    "PREEMPTED": (Status.INTERRUPTED, "preempted in phase measure"),
    "CANCELLED": (Status.INTERRUPTED, "cancelled by user 0 in phase measure"),
}


@pytest.mark.parametrize("word", STEPS)
def test_a_schedulers_word(word):
    status, words = STEPS[word]
    state = StepState(word=word, nodes=("n2",), by="user 0" if word == "CANCELLED" else "")
    found = ended(node(0, {"stopped": "interrupted"}), node(1, None), step=state)
    assert found.status is status and words in found.reason and found.way_out


def test_a_ranks_own_word_stands_before_the_schedulers():
    state = StepState(word="CANCELLED")
    found = ended(node(0, PEER), node(1, {"exit_code": 1, "failures": [OOM]}), step=state)
    assert found.status is Status.GPU_OOM


def test_another_headroom_on_any_node_is_told_of():
    """Each supervisor sees its own machine alone."""
    ends = {0: End(token="t", rank=0, host="n1", exit_code=0),
            1: End(token="t", rank=1, host="n2", exit_code=0, others=[4711]), 2: None}  # fmt: skip
    left = process.Ended(
        exit_code=0, signal=None, wall_seconds=9.0, stopped=None, tree_peak_bytes=1,
        tree_processes=1, left_behind=0, survivors=0,
    )  # fmt: skip
    order = Order(token="t", nodes=3, processes=1, head="n1", words=[], environment={}, out="",
                  timeout=None, silence=SILENCE, code="", versions={}, cpu="")  # fmt: skip
    seen = Launched(order, Path("/nowhere"), lambda status: None)
    assert _launch_record(left, ends, seen).others == [4711]
