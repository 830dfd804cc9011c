"""Stations and their order, a budget of minutes, and what is to be done of them. Pure; no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from harness.spec import Spec

__all__ = ["Budget", "Planned", "Station", "schedule"]


@dataclass(frozen=True, kw_only=True)
class Station:
    """One thing that is measured. ``minutes`` are expected on this kind of machine.

    ``kind``: measure (``harness.calibrate.stations``), row (one recipe with its prediction), check
    (one recipe of the catalog, beside others), suite, or tests. ``spec`` is a row's or a check's.
    """

    name: str
    part: str
    kind: str
    minutes: float
    spec: Spec | None = None

    @property
    def key(self) -> str:
        """Its name, unique among all parts."""
        return f"{self.part} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A station and what is to be done with it: run, done (an earlier call did it), or skip."""

    station: Station
    action: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Minutes that a call may take (None: as long as it takes), by a clock in seconds."""

    minutes: float | None
    now: Callable[[], float]
    began: float

    @property
    def left(self) -> float | None:
        """Minutes that are left; None without a limit."""
        return None if self.minutes is None else self.minutes - (self.now() - self.began) / 60

    def lacks(self, minutes: float) -> str:
        """Why something of so many minutes is not begun; empty where it may be."""
        left = self.left
        if left is None or minutes <= left:
            return ""
        return f"needs about {minutes:.1f} min, {max(left, 0.0):.1f} of {self.minutes:g} are left"


def schedule(
    stations: Sequence[Station], minutes: float | None, done: Collection[str], at_a_time: int = 1
) -> list[Planned]:
    """What a call would do, in order, if each took what is expected. Checks run ``at_a_time``."""
    planned, spent = [], 0.0
    for station in stations:
        if station.key in done:
            planned.append(Planned(station=station, action="done", reason="by an earlier call"))
            continue
        budget = Budget(minutes=minutes, now=lambda spent=spent: 60 * spent, began=0.0)
        cost = station.minutes / (at_a_time if station.kind == "check" else 1)
        lack = budget.lacks(cost)
        if not lack:
            spent += cost
        action = "skip" if lack else "run"
        planned.append(Planned(station=station, action=action, reason=lack))
    return planned
