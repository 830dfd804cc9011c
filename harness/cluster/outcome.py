"""Outcome of a row on several nodes, as a status and a sentence, from each node's files.

The first of these that holds:

- a rank's own cause,
- a kill or crash that a node saw of its own processes,
- a signal,
- a node without an end file,
- the deadline,
- ranks that took no step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.cluster.meeting import End
from harness.cluster.slurm import NODE_FAILURE
from harness.launch.outcome import Facts, Outcome, cause_of, classify, own_words, where
from harness.result import Status


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One node when the row is over. ``end`` is None for a node without an end file; ``facts`` are
    from its own ranks and its own kernel."""

    rank: int
    host: str
    end: End | None
    facts: Facts

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host})"


LOST_WAY = "check that node's power and network; leave it out, or run the suite again"


def classify_nodes(
    whole: Facts, nodes: Sequence[NodeFacts], silence: float, by: str = ""
) -> Outcome:
    """Return the outcome that the facts show, of a launch without a result. ``whole`` has all
    ranks' files and the logs of all nodes; ``by`` is the scheduler's reason for a signal.
    """
    return (
        # The failure that a rank reported, if it is no echo of another's end.
        _first_on(nodes, cause_of)
        # A kill or a crash on a node whose processes ended by themselves.
        or _first_on([n for n in nodes if n.end and n.end.stopped is None], own_words)
        or _interrupted(whole, nodes, by)
        or _lost(whole, nodes, silence)
        or (classify(whole) if whole.stopped == "timeout" else None)
        or _silent(whole, nodes, silence)
        or classify(whole)
    )


def _first_on(
    nodes: Sequence[NodeFacts], cause: Callable[[Facts], Outcome | None]
) -> Outcome | None:
    """Return the first node's outcome that has a ``cause``, with that node."""
    for node in nodes:
        if found := cause(node.facts):
            return found._replace(reason=f"on {node}: {found.reason}")
    return None


def _interrupted(whole: Facts, nodes: Sequence[NodeFacts], by: str) -> Outcome | None:
    """Return the outcome of a signal to the leader, or to another node alone."""
    if whole.stopped == "interrupted":
        found = classify(whole)
        if by.startswith(NODE_FAILURE):
            gone = [str(node) for node in nodes if node.end is None]
            return _lost_outcome(whole, ", ".join(gone) or "a node", f"Slurm says {by}")
        return found._replace(reason=f"{found.reason} by Slurm: {by}") if by else found
    for node in nodes:
        if node.end and node.end.stopped == "interrupted":
            reason = f"{node} was told to end in {_at(whole)}"
            return Outcome(
                Status.INTERRUPTED, reason, "run the suite again: it resumes at this row"
            )
    return None


def _lost(whole: Facts, nodes: Sequence[NodeFacts], silence: float) -> Outcome | None:
    """Return the outcome if a node left no end file, or that lost the others."""
    for node in nodes:
        if node.end is None:
            return _lost_outcome(whole, str(node), "it gave no sign")
    named = {node.rank: node for node in nodes}
    for node in nodes:
        if node.end.stopped == "unreachable":
            why = f"it could not reach {named[0]}"
            return _lost_outcome(whole, str(node), why)
        if node.end.stopped == "isolated":
            why = f"it could not write to the results folder for {silence / 2:g} s"
            return _lost_outcome(whole, str(node), why)
        if node.end.stopped == "lost":
            gone = ", ".join(str(named[rank]) for rank in node.end.lost)
            return _lost_outcome(whole, gone, f"it gave node {node.rank} no sign for {silence:g} s")
    return None


def _lost_outcome(whole: Facts, who: str, why: str) -> Outcome:
    reason = f"{who} stopped answering in {_at(whole)}: {why}"
    return Outcome(Status.NODE_LOST, reason, LOST_WAY)


def _silent(whole: Facts, nodes: Sequence[NodeFacts], silence: float) -> Outcome | None:
    """All nodes are there, and their ranks wait for one another."""
    if not any(node.end and node.end.stopped == "silent" for node in nodes):
        return None
    behind = _least_far(nodes)
    reason = f"no rank took a step for {silence:g} s in {_at(whole)}; all nodes answer"
    hint = f"; least far: {behind}" if behind else ""
    return Outcome(Status.FAILED, reason + hint, "check that rank; the other ranks wait for it")


def _least_far(nodes: Sequence[NodeFacts]) -> str:
    places = [
        (where(Facts(statuses=(status,))), f"rank {status.get('rank')} on node {node.rank}")
        for node in nodes
        for status in node.facts.statuses
    ]
    steps = {place for place, _ in places}
    if len(steps) < 2:
        return ""
    return min(places, key=lambda item: item[0][1])[1]


def _at(facts: Facts) -> str:
    phase, step = where(facts)
    return f"phase {phase}, step {step}" if step else f"phase {phase}"
