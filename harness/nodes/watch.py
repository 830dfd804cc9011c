"""When a node's supervisor has to end its part of a row from outside.

A process group's timeout does not bound every engine: DeepSpeed's own groups are made without one,
and wait for ever. So the bound comes from here, by signs that need no rank's help: a node that
writes no more, one that cannot be reached, ranks that take no step. Pure decisions on what was
seen; times are this machine's monotonic clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.phases import RUN_PHASES

__all__ = ["BEAT_SECONDS", "GRACE_SECONDS", "Progress", "Signs", "stop_word", "words"]

BEAT_SECONDS = 2.0
"""Between two words of a supervisor: one small file a node on the shared file system."""
GRACE_SECONDS = 10.0
"""For ranks to end by themselves once another node's have: their own word is the better one."""
STEPS = 20
"""Median steps for which ranks may take none."""
STEPPING = tuple(RUN_PHASES)[
    list(RUN_PHASES).index("memory") : list(RUN_PHASES).index("measure") + 1
]
"""Phases in which steps follow one another; before, a compiler or a first batch may take minutes,
and the deadline bounds that."""
WORDS = {
    "peer": "another node's part had ended",
    "lost": "another node gave no sign",
    "unreachable": "the head could not be reached",
    "isolated": "the shared folder could not be written",
    "silent": "no rank took a step",
}
"""``stopped`` of a node's end -> what it means."""


def words(stopped: str) -> str:
    """What a supervisor's word for ending its processes means."""
    return WORDS.get(stopped, stopped)


@dataclass
class Progress:
    """How a node's ranks come along, by their own statuses."""

    now: Callable[[], float]
    at: tuple[Any, ...] = ()
    since: float = 0.0
    gaps: list[float] = field(default_factory=list)
    phases: set[str] = field(default_factory=set)

    def see(self, statuses: Sequence[Mapping[str, Any]]) -> None:
        """Note where the ranks are now."""
        places = tuple((s.get("rank"), s.get("phase"), s.get("step")) for s in statuses)
        if places == self.at:
            return
        if self.at and self.phases & {"warmup", *STEPPING}:
            self.gaps.append(self.now() - self.since)
        self.at, self.since = places, self.now()
        self.phases = {str(place[1]) for place in places}

    def silent_for(self, least: float) -> float | None:
        """Seconds without a step where that is too long: above ``least`` and above 20 median
        steps, between steps that follow one another; else None."""
        if not self.phases or not self.phases <= set(STEPPING):
            return None
        usual = statistics.median(self.gaps) if self.gaps else 0.0
        waited = self.now() - self.since
        return waited if waited > max(least, STEPS * usual) else None


@dataclass(kw_only=True)
class Signs:
    """What a supervisor has seen of the others, in seconds since.

    ``quiet``: node -> since its last new word, for nodes that have not ended. ``ended_badly``:
    since another node ended with a failure, or said that a rank of its own had failed.
    """

    quiet: Mapping[int, float] = field(default_factory=dict)
    ended_badly: float | None = None
    unreachable: float | None = None
    unwritable: float | None = None
    silent: float | None = None


def stop_word(signs: Signs, silence: float) -> tuple[str, list[int]] | None:
    """Why to end this node's part now, and the nodes that it speaks of; None to go on. ``silence``
    is how long a node may give no sign. That which names another node comes first."""
    if signs.unwritable is not None and signs.unwritable > silence / 2:
        return "isolated", []
    if signs.unreachable is not None and signs.unreachable > silence:
        return "unreachable", [0]
    lost = sorted(rank for rank, seconds in signs.quiet.items() if seconds > silence)
    if lost:
        return "lost", lost
    if signs.ended_badly is not None and signs.ended_badly > GRACE_SECONDS:
        return "peer", []
    if signs.silent is not None:
        return "silent", []
    return None
