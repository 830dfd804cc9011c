"""How a station ended, as a file: what a call resumes from, and what the archive holds."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.calibrate.station import Station
from harness.calibration.record import Device
from harness.json_files import BadFile, read_json, write_json
from harness.launch.sources import digest

__all__ = ["DONE", "Outcome", "kept", "mark_of", "outcome_file"]

DONE = ("ok", "partly", "lacking")
"""Ends that another call would not change."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``status``: ok, partly (some rows of a suite did not end well), lacking (the machine cannot),
    failed, or skipped (no time was left). ``facts`` are what it measured; ``mark`` says of which
    device, sources and settings."""

    station: str
    part: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    mark: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Keep it below the session's folder."""
        write_json(outcome_file(self.part, self.station, folder), dataclasses.asdict(self))


def outcome_file(part: str, name: str, folder: Path) -> Path:
    """The file of a station's outcome."""
    plain = re.sub(r"[^\w.-]+", "_", name)[:60]
    key = hashlib.sha256(name.encode()).hexdigest()[:6]
    return folder / "stations" / f"{part}-{plain}-{key}.json"


def kept(part: str, name: str, folder: Path) -> Outcome | None:
    """The outcome of an earlier call; None where there is none to read."""
    try:
        return read_json(outcome_file(part, name, folder), Outcome)
    except BadFile:
        return None


def mark_of(station: Station, device: Device, small: bool) -> str:
    """A hash of all that decides what a station measures, but for rows and suites, which know for
    themselves whether they must run again."""
    spec = dataclasses.asdict(station.spec) if station.spec else None
    sources = digest(("calibrate/stations",))
    facts = [dataclasses.asdict(device), sources, station.key, small, spec]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
