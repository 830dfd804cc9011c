"""Raw results as json reads their files, one row for the repetitions of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

NOT_WORK = ("recipe", "processes", "repeat")
"""Fields of a spec in which rows that are compared may differ."""


@dataclass(eq=False)
class Run:
    """One process group that ran: ``data`` is its result.json."""

    data: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        return self.data["spec"]

    @property
    def recipe(self) -> str:
        return self.spec["recipe"]

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return self.data["ranks"]

    @cached_property
    def steps(self) -> list[float]:
        """Seconds of each timed step, the slowest rank's."""
        return [max(step) for step in zip(*(r["step_seconds"] for r in self.ranks), strict=False)]

    @property
    def status(self) -> str:
        """ "ok" only with an audit that holds and steps that were timed."""
        status = self.data["status"]
        proven = all(check["ok"] for check in self.data["audit"]) and bool(self.steps)
        return "void" if status == "ok" and not proven else status

    @property
    def recorded(self) -> bool:
        return bool(self.spec.get("profile") or self.spec.get("snapshot"))

    @property
    def device(self) -> str:
        facts = self.data["environment"]
        name = facts.get("device") or self.spec["device"]
        return str(facts.get("cpu") or name) if name == "cpu" else str(name)

    @property
    def work(self) -> str:
        """What rows that are compared share."""
        spec = {k: v for k, v in self.spec.items() if k not in NOT_WORK}
        code = self.data["environment"].get("code", "")
        return json.dumps([spec, self.data["meter"], self.device, code], sort_keys=True)


@dataclass(eq=False)
class Row:
    """The repetitions of one run."""

    runs: list[Run]
    group: Group = field(repr=False)

    @property
    def first(self) -> dict[str, Any]:
        return self.runs[0].data

    @property
    def spec(self) -> dict[str, Any]:
        return self.runs[0].spec

    @property
    def recipe(self) -> str:
        return self.spec["recipe"]

    @property
    def parts(self) -> frozenset[str]:
        return frozenset(self.recipe.split("+"))

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return [rank for run in self.runs for rank in run.ranks]

    @cached_property
    def label(self) -> str:
        """The recipe, with the processes where it ran on several numbers of them."""
        alike = [row for row in self.group.rows if row.recipe == self.recipe]
        return f"{self.recipe} x{self.spec['processes']}" if len(alike) > 1 else self.recipe

    @property
    def is_reference(self) -> bool:
        return self is self.group.reference


@dataclass(eq=False)
class Group:
    """Rows that did the same work on the same device."""

    of: ResultSet = field(repr=False)
    rows: list[Row] = field(default_factory=list)

    @property
    def wanted(self) -> str:
        """The recipe that the suite names as the reference."""
        return self.of.suite["reference"]

    @property
    def device(self) -> str:
        return self.reference.runs[0].device

    @cached_property
    def reference(self) -> Row:
        """The row that the suite names, else plain ddp, else the simplest exact one."""
        for name in (self.wanted, "ddp"):
            named = [row for row in self.rows if row.parts == frozenset(name.split("+"))]
            if named:
                return named[0]
        exact = [row for row in self.rows if row.first["parity"] == "exact"]
        return min(exact or self.rows, key=lambda row: len(row.parts))

    @property
    def gpu(self) -> bool:
        return self.reference.first["meter"] == "cuda"


@dataclass(eq=False)
class ResultSet:
    """A folder of results, read anew."""

    folder: Path

    @cached_property
    def suite(self) -> dict[str, Any]:
        return json.loads((self.folder / "suite.json").read_text())

    @cached_property
    def runs(self) -> list[Run]:
        paths = sorted(self.folder.glob("runs/*/result.json"))
        return [Run(json.loads(p.read_text())) for p in paths]

    @cached_property
    def groups(self) -> list[Group]:
        works: dict[str, Group] = {}
        rows: dict[str, Row] = {}
        for run in self.runs:
            if run.status == "ok" and not run.recorded:
                group = works.setdefault(run.work, Group(self))
                own = json.dumps([run.work, run.spec["recipe"], run.spec["processes"]])
                if own not in rows:
                    rows[own] = Row([], group)
                    group.rows.append(rows[own])
                rows[own].runs.append(run)
        return list(works.values())

    @cached_property
    def ordered(self) -> list[Group]:
        """As a report lists them: with the wanted row, with plain ddp, others; largest first."""

        def place(group: Group) -> tuple[int, ...]:
            parts = [row.parts for row in group.rows]
            names = [frozenset(name.split("+")) in parts for name in (group.wanted, "ddp")]
            most = max(len(row.runs) for row in group.rows)
            named = names.index(True) if True in names else 2
            return (named, -len(group.rows), -most)

        return sorted(self.groups, key=place)

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.ordered for row in group.rows]
