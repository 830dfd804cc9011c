"""Where rows on several nodes run: how the supervisors of a launch are started on all of them.

Two ways, alike to whoever runs a row. Started on every node (``Each``), the leader starts node 0's
supervisor itself and the followers theirs. Inside a Slurm job (``Steps``), one ``srun`` starts all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from harness.nodes import slurm
from harness.nodes.outcome import StepState
from harness.nodes.session import Session
from harness.result import Wire

__all__ = ["SILENCE_SECONDS", "Each", "Place", "Steps"]

SILENCE_SECONDS = 60.0
"""How long a node may give no sign, and ranks take no step, before a row is ended from outside."""


@dataclass(kw_only=True)
class Place:
    """``nodes`` machines with their ``head``. ``wire`` and ``notes`` are what their survey found
    (``harness.nodes.survey``). ``gone`` names a node that ended without a word, once one has."""

    nodes: int
    head: str
    silence: float = SILENCE_SECONDS
    wire: Wire | None = None
    notes: list[str] = field(default_factory=list)
    gone: str = ""

    def words(self, folder: Path) -> list[str]:
        """The command that starts supervisors for the launch of ``folder``, and ends with them."""
        raise NotImplementedError

    def published(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        """Tell those that this process does not start."""
        return contextlib.nullcontext()

    def said(self, folder: Path) -> StepState | None:
        """What a scheduler says of the launch in ``folder``, when it is over."""
        return None


@dataclass(kw_only=True)
class Each(Place):
    """The command runs on every node; this is node 0's."""

    session: Session

    def words(self, folder: Path) -> list[str]:
        return supervisor_words(folder, "0")

    def published(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        return self.session.published(folder)


@dataclass(kw_only=True)
class Steps(Place):
    """A Slurm job in which this process may start steps."""

    job: str
    cpus: int

    def words(self, folder: Path) -> list[str]:
        return [*slurm.srun(self.nodes, self.cpus), *supervisor_words(folder)]

    def said(self, folder: Path) -> StepState | None:
        return slurm.step_state(folder / "supervisor.txt", self.job)


def supervisor_words(folder: Path, rank: str = "") -> list[str]:
    """A supervisor's command; without a rank it is the step's to say."""
    words = [os.path.abspath(sys.executable), "-m", "harness.nodes.supervisor", str(folder)]
    return [*words, rank] if rank else words
