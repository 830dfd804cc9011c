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

from collections.abc import Sequence
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


LOST_WAY = "check that node's power and network; leave it out, or run the suite again"


def classify_nodes(
    whole: Facts, nodes: Sequence[NodeFacts], silence: float, by: str = ""
) -> Outcome:
    """Return the outcome that the facts show, of a launch without a result. ``whole`` has all
    ranks' files and the logs of all nodes; ``by`` is the scheduler's reason for a signal.
    """
    return (
        _own_cause(nodes)
        or _seen_by_a_node(nodes)
        or _interrupted(whole, nodes, by)
        or _lost(whole, nodes, silence)
        or (classify(whole) if whole.stopped == "timeout" else None)
        or _silent(whole, nodes, silence)
        or classify(whole)
    )


def _own_cause(nodes: Sequence[NodeFacts]) -> Outcome | None:
    """Return the failure that a rank reported, with its node, if it is no echo of another's end."""
    for node in nodes:
        found = cause_of(node.facts)
        if found:
            return _on(node, found)
    return None


def _seen_by_a_node(nodes: Sequence[NodeFacts]) -> Outcome | None:
    """Return the outcome of a kill or a crash on a node whose processes ended by themselves."""
    for node in nodes:
        found = own_words(node.facts) if node.end and node.end.stopped is None else None
        if found:
            return _on(node, found)
    return None


def _on(node: NodeFacts, found: Outcome) -> Outcome:
    return found._replace(reason=f"on node {node.rank} ({node.host}): {found.reason}")


def _interrupted(whole: Facts, nodes: Sequence[NodeFacts], by: str) -> Outcome | None:
    """Return the outcome of a signal to the leader, or to another node alone."""
    if whole.stopped == "interrupted":
        found = classify(whole)
        if by.startswith(NODE_FAILURE):
            gone = [f"node {node.rank} ({node.host})" for node in nodes if node.end is None]
            return _lost_outcome(whole, ", ".join(gone) or "a node", f"Slurm says {by}")
        return found._replace(reason=f"{found.reason} by Slurm: {by}") if by else found
    for node in nodes:
        if node.end and node.end.stopped == "interrupted":
            reason = f"node {node.rank} ({node.host}) was told to end in {_at(whole)}"
            return Outcome(
                Status.INTERRUPTED, reason, "run the suite again: it resumes at this row"
            )
    return None


def _lost(whole: Facts, nodes: Sequence[NodeFacts], silence: float) -> Outcome | None:
    """Return the outcome if a node left no end file, or that lost the others."""
    for node in nodes:
        if node.end is None:
            return _lost_outcome(whole, f"node {node.rank} ({node.host})", "it gave no sign")
    hosts = {node.rank: node.host for node in nodes}
    for node in nodes:
        if node.end.stopped == "unreachable":
            why = f"it could not reach node 0 ({hosts.get(0)})"
            return _lost_outcome(whole, f"node {node.rank} ({node.host})", why)
        if node.end.stopped == "isolated":
            why = f"it could not write to the results folder for {silence / 2:g} s"
            return _lost_outcome(whole, f"node {node.rank} ({node.host})", why)
        if node.end.stopped == "lost":
            gone = ", ".join(f"node {rank} ({hosts.get(rank)})" for rank in node.end.lost)
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
