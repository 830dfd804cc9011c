"""How a run on several nodes ended, in one word and one sentence: pure, from what each node left.

The first that holds: the result; a rank's own cause; what a node saw of its own processes; the
scheduler's word for the step; a node without a word; the deadline; ranks that took no step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness.launch.outcome import Facts, Outcome, cause_of, classify, own_words, where
from harness.nodes.files import End
from harness.result import Status

__all__ = ["NodeFacts", "StepState", "classify_nodes"]


@dataclass(frozen=True, kw_only=True)
class StepState:
    """A scheduler's word for a row's step or job: ``word`` as Slurm writes states, ``what`` it is
    of ("step" or "job"), ``nodes`` that it names, ``by`` who ended it, ``line`` as it was said."""

    word: str
    what: str = "step"
    nodes: tuple[str, ...] = ()
    by: str = ""
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One node when the row is over. ``end`` is None for a node without a last word; ``facts`` are
    what its own ranks and its own kernel left."""

    rank: int
    host: str
    end: End | None
    facts: Facts


LOST_WAY = "look at that node (its power, its link); leave it out, or run the suite again"


def classify_nodes(
    whole: Facts, nodes: Sequence[NodeFacts], step: StepState | None, silence: float
) -> Outcome:
    """The outcome that the facts show. ``whole`` has all ranks' files, the logs of all nodes and
    the result, if it carried the launch's token."""
    if whole.result is not None:
        return classify(whole)
    return (
        _own_cause(nodes)
        or _seen_by_a_node(nodes)
        or _by_scheduler(whole, nodes, step)
        or _interrupted(whole, nodes)
        or _lost(whole, nodes, silence)
        or (classify(whole) if whole.stopped == "timeout" else None)
        or _silent(whole, nodes, silence)
        or classify(whole)
    )


def _own_cause(nodes: Sequence[NodeFacts]) -> Outcome | None:
    """What a rank reported, if it is no echo of another's end; with the node it ran on."""
    for node in nodes:
        found = cause_of(node.facts)
        if found:
            return _on(node, found)
    return None


def _seen_by_a_node(nodes: Sequence[NodeFacts]) -> Outcome | None:
    """A kill or a crash, on a node whose processes ended by themselves."""
    for node in nodes:
        found = own_words(node.facts) if node.end and node.end.stopped is None else None
        if found:
            return _on(node, found)
    return None


def _on(node: NodeFacts, found: Outcome) -> Outcome:
    return found._replace(reason=f"on node {node.rank} ({node.host}): {found.reason}")


def _by_scheduler(
    whole: Facts, nodes: Sequence[NodeFacts], step: StepState | None
) -> Outcome | None:
    if step is None:
        return None
    at = _at(whole)
    if step.word == "OUT_OF_MEMORY":
        on = f"on {', '.join(step.nodes)}" if step.nodes else "on one of its nodes"
        told = f"{on}: the {step.what}'s memory limit ended it in {at}"
        facts = dataclasses.replace(whole, stopped=None, signal=9, group_kills=1)
        way_out = own_words(facts)
        way = way_out.way_out if way_out else "ask for more memory"
        return Outcome(Status.HOST_OOM, told, f"{way}, or ask the job for more --mem")
    if step.word in ("NODE_FAIL", "BOOT_FAIL"):
        return _lost_outcome(whole, _named(nodes, step), f"Slurm says {step.word}")
    if step.word == "TIMEOUT":
        reason = f"the {step.what}'s time limit ended it in {at}"
        return Outcome(Status.INTERRUPTED, reason, "give a longer --time; the suite resumes here")
    if step.word in ("PREEMPTED", "CANCELLED"):
        by = f" by {step.by}" if step.by else ""
        reason = f"{step.word.lower()}{by} in {at}"
        return Outcome(Status.INTERRUPTED, reason, "run the suite again: it resumes here")
    return None


def _named(nodes: Sequence[NodeFacts], step: StepState) -> str:
    """The nodes that Slurm names, else those without a last word."""
    if step.nodes:
        return ", ".join(step.nodes)
    quiet = [f"node {node.rank} ({node.host})" for node in nodes if node.end is None]
    return ", ".join(quiet) or "a node"


def _interrupted(whole: Facts, nodes: Sequence[NodeFacts]) -> Outcome | None:
    """A signal to the leader, or to a node's supervisor alone."""
    if whole.stopped == "interrupted":
        return classify(whole)
    for node in nodes:
        if node.end and node.end.stopped == "interrupted":
            reason = f"node {node.rank} ({node.host}) was told to end in {_at(whole)}"
            return Outcome(Status.INTERRUPTED, reason, "run the suite again: it resumes here")
    return None


def _lost(whole: Facts, nodes: Sequence[NodeFacts], silence: float) -> Outcome | None:
    """A node that ended without a word, or that lost the others."""
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
    return Outcome(Status.FAILED, reason + hint, "look at that rank; the others wait for it")


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
