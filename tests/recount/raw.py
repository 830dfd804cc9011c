"""Raw results as json reads their files, one row for the repetitions of a run."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

NOT_WORK = ("recipe", "processes", "repeat")
"""Fields of a spec in which rows that are compared may differ."""


class Run:
    """One process group that ran: ``data`` is its result.json."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.spec, self.ranks = data, data["spec"], data["ranks"]
        # Seconds of each timed step, the slowest rank's.
        self.steps = [max(s) for s in zip(*(r["step_seconds"] for r in self.ranks), strict=False)]
        facts = data["environment"]
        name = facts.get("device") or self.spec["device"]
        self.device = str(facts.get("cpu") or name) if name == "cpu" else str(name)
        # What rows that are compared share.
        spec = {k: v for k, v in self.spec.items() if k not in NOT_WORK}
        shared = [spec, data["meter"], self.device, facts.get("code", "")]
        self.work = json.dumps(shared, sort_keys=True)

    @property
    def counts(self) -> bool:
        """Ended well, with an audit that holds and steps that were timed, and without a recorder
        that slows them."""
        proven = all(check["ok"] for check in self.data["audit"]) and bool(self.steps)
        recorded = self.spec.get("profile") or self.spec.get("snapshot")
        return self.data["status"] == "ok" and proven and not recorded


class Row:
    """The repetitions of one run."""

    def __init__(self, group: Group, run: Run) -> None:
        self.group, self.runs = group, [run]
        self.first, self.spec = run.data, run.spec
        self.parts = frozenset(run.spec["recipe"].split("+"))

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [rank for run in self.runs for rank in run.ranks]

    @property
    def label(self) -> str:
        """The recipe, with the processes where it ran on several numbers of them."""
        recipe = self.spec["recipe"]
        alike = [row for row in self.group.rows if row.spec["recipe"] == recipe]
        return f"{recipe} x{self.spec['processes']}" if len(alike) > 1 else recipe


class Group:
    """Rows that did the same work on the same device."""

    def __init__(self, results: ResultSet) -> None:
        self.results = results
        self.rows: list[Row] = []

    @cached_property
    def reference(self) -> Row:
        """The row that the suite names, else plain ddp, else the simplest exact one."""
        for name in (self.results.wanted, "ddp"):
            named = [row for row in self.rows if row.parts == frozenset(name.split("+"))]
            if named:
                return named[0]
        exact = [row for row in self.rows if row.first["parity"] == "exact"]
        return min(exact or self.rows, key=lambda row: len(row.parts))

    @property
    def device(self) -> str:
        return self.reference.runs[0].device

    @property
    def gpu(self) -> bool:
        return self.reference.first["meter"] == "cuda"


class ResultSet:
    """A folder of results, read anew; ``wanted`` is the recipe that its suite names as the
    reference."""

    def __init__(self, folder: Path) -> None:
        self.wanted = json.loads((folder / "suite.json").read_text())["reference"]
        works: dict[str, Group] = {}
        rows: dict[tuple[Any, ...], Row] = {}
        for path in sorted(folder.glob("runs/*/result.json")):
            run = Run(json.loads(path.read_text()))
            own = run.work, run.spec["recipe"], run.spec["processes"]
            if not run.counts:
                continue
            if own in rows:
                rows[own].runs.append(run)
                continue
            group = works.setdefault(run.work, Group(self))
            rows[own] = Row(group, run)
            group.rows.append(rows[own])
        self.groups = list(works.values())

    @cached_property
    def ordered(self) -> list[Group]:
        """As a report lists them: with the wanted row, with plain ddp, others; largest first."""

        def place(group: Group) -> tuple[int, ...]:
            parts = [row.parts for row in group.rows]
            names = [frozenset(name.split("+")) in parts for name in (self.wanted, "ddp")]
            most = max(len(row.runs) for row in group.rows)
            named = names.index(True) if True in names else 2
            return (named, -len(group.rows), -most)

        return sorted(self.groups, key=place)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.ordered for row in group.rows]
