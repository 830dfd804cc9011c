"""One Slurm job a suite: submitted, followed, left alone and found again, and put in order when it
was ended from outside. What it prints is its file; what it measured lies in the results folder.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.json_files import BadFile, read_json, write_json
from harness.launch import launch
from harness.nodes import slurm
from harness.nodes.files import Order, read
from harness.nodes.launch import abandoned
from harness.nodes.outcome import StepState
from harness.nodes.place import Place
from harness.resolve import resolve
from harness.result import Result
from harness.spec import Spec, add_arguments, from_arguments
from strategies.base import BadInput

__all__ = ["Job", "JobError", "never", "settle", "spec_of", "submit"]

POLL_SECONDS = 2.0
LIVING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "STAGE_OUT"}
NEVER = ("PartitionConfig", "BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit")
"""Reasons for waiting that no waiting ends."""
RECORD = "slurm.json"


class JobError(BadInput):
    """A job that cannot be submitted, or never starts: Slurm's own word, and the way out."""


def never(state: str, reason: str) -> bool:
    """Whether a job in this state, for this reason, waits in vain."""
    return state == "PENDING" and reason.strip("()").startswith(NEVER)


def submit(text: str, folder: Path) -> Job:
    """Submit ``text``, kept as ``folder/suite.sbatch``, and remember the job there.

    Raises:
        JobError: sbatch refused it, or is not here.
    """
    path = folder / "suite.sbatch"
    path.write_text(text, encoding="utf-8")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except OSError:
        raise JobError("no sbatch here; run on a machine that submits to Slurm") from None
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise JobError(f"sbatch refused {path}: {said}; change --site, --nodes or --time")
    number = done.stdout.strip().partition(";")[0]
    write_json(folder / RECORD, {"job": number})
    return Job(number, folder)


class Job:
    """A job by its number; ``folder`` is the results folder."""

    def __init__(self, number: str, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.output = folder / f"slurm-{number}.txt"
        self.read = 0

    @classmethod
    def of(cls, folder: Path) -> Job | None:
        """The job that was submitted for ``folder`` and is not over; None without one."""
        try:
            number = str(read_json(folder / RECORD, dict[str, Any])["job"])
        except (BadFile, KeyError):
            return None
        job = cls(number, folder)
        return job if job.state()[0] in LIVING else None

    def state(self) -> tuple[str, str]:
        """Slurm's word for it now, and why; empty where it is over and forgotten."""
        told = slurm.ask("squeue", "-h", "-j", self.number, "-o", "%T|%r").strip()
        word, _, reason = told.partition("|")
        return word, reason

    def ended(self) -> StepState | None:
        """How Slurm ended it; None where it ended by itself, or that is forgotten."""
        found = slurm.from_scontrol(slurm.ask("scontrol", "show", "job", self.number))
        fields = "--format=JobID,State,NodeList"
        return found or slurm.from_sacct(slurm.ask("sacct", "-n", "-P", "-j", self.number, fields))

    def cancel(self, seconds: float = 60.0) -> None:
        """End it, and wait until its processes have ended."""
        slurm.ask("scancel", self.number)
        deadline = time.monotonic() + seconds
        while self.state()[0] in LIVING and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 2)

    def follow(self, say: Callable[[str], None], pass_on: Callable[[str], None]) -> None:
        """Until it is over: ``say`` its states, ``pass_on`` what it prints.

        Raises:
            JobError: it can never start; it is cancelled.
        """
        before = ("", "")
        while True:
            now = self.state()
            if now[0] != before[0] or (now[0] == "PENDING" and now != before):
                why = f" ({now[1]})" if now[0] == "PENDING" else ""
                if now[0] in LIVING:
                    say(f"job {self.number}: {now[0].lower()}{why}")
                before = now
            if never(*now):
                self.cancel()
                raise JobError(
                    f"job {self.number} can never start: {now[1]}; cancelled. Ask for what the "
                    "partition has: --nodes, --time, --site"
                )
            self.pass_on(pass_on)
            if now[0] not in LIVING:
                return
            time.sleep(POLL_SECONDS)

    def pass_on(self, pass_on: Callable[[str], None]) -> None:
        """What it has printed since the last call, in whole lines."""
        with contextlib.suppress(OSError), self.output.open("rb") as stream:
            stream.seek(self.read)
            new = stream.read()
            whole = new[: new.rfind(b"\n") + 1]
            self.read += len(whole)
            if whole:
                pass_on(whole.decode("utf-8", errors="replace"))


# ---- a job that was ended from outside ----


def settle(folder: Path, state: StepState | None) -> list[Result]:
    """Results for rows that were running when a job ended and could not say so: written, and
    returned. ``state`` is Slurm's word for the job."""
    settled = []
    for path in sorted(folder.glob("runs/*/launch-*/order.json")):
        row, here = path.parent.parent, path.parent
        order = read(here, Order)
        if order is None or (row / "result.json").exists():
            continue
        place = _Told(nodes=order.nodes, head=order.head, silence=order.silence, state=state)
        result = abandoned(resolve(spec_of(order)), row, here, order, place)
        launch.write(result, row)
        settled.append(result)
    return settled


class _Told(Place):
    """Nodes of which only Slurm's word is left."""

    def __init__(self, *, state: StepState | None, **facts: object) -> None:
        super().__init__(**facts)
        self.state = state

    def said(self, folder: Path) -> StepState | None:
        return slurm.step_state(folder / "supervisor.txt", "") or self.state


def spec_of(order: Order) -> Spec:
    """The spec of a row, read back from the worker's words in its order."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    begin = order.words.index("harness.train") + 1
    return from_arguments(parser.parse_known_args(order.words[begin:])[0])
