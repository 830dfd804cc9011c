"""Slurm jobs: the script of a suite, its submission, and one task of the command on each node.

Slurm's own commands do the rest: ``squeue`` and ``tail -f`` follow a job, ``scancel`` ends it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strategies.base import BadInput

WAIT_SECONDS = 120
"""Time for the other tasks after one has ended: each has a grace period, and a kill."""
OWN = {
    **dict.fromkeys(("nodes", "N"), "--nodes N of run"),
    **dict.fromkeys(("ntasks", "n", "ntasks-per-node"), "one task a node"),
    **dict.fromkeys(("output", "o"), "OUT/slurm-JOB.txt"),
    "requeue": "no requeue: a row that starts over measures another thing",
    "array": "no array: rows follow one another on the same nodes",
}
"""Options that a site file may not set -> what is used instead."""
OUTPUT = "slurm-{}.txt"
NODE_FAILURE = "node failure"
FAILED = re.compile(r"Node failure on ([\w.,\[\]-]+)")
CANCELLED = re.compile(r"\*\*\* (?:STEP|JOB) .*CANCELLED AT \S+(?: DUE TO ([A-Z ]*[A-Z]))?")


@dataclass(frozen=True)
class Site:
    """A site's facts, as text: ``#SBATCH`` lines, and shell lines that set a job up."""

    directives: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()


def read_site(path: Path) -> Site:
    """Return the site file in ``path``.

    Raises:
        BadInput: it is unreadable, or sets an option of the run.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"site file {path}: unreadable ({error}); give --site FILE") from None
    directives = tuple(line.rstrip() for line in lines if line.startswith("#SBATCH"))
    for line in directives:
        option = re.match(r"#SBATCH\s+-{1,2}([\w-]+)", line)
        if option and option[1] in OWN:
            raise BadInput(f"site file {path}: {line!r}: leave it out; run sets {OWN[option[1]]}")
    shell = [line.rstrip() for line in lines if not line.startswith(("#SBATCH", "#!"))]
    return Site(directives, tuple(line for line in shell if line.strip()))


def script(
    site: Site,
    words: Sequence[str],
    *,
    name: str,
    nodes: int,
    time: str | None,
    folder: Path,
    where: Path,
    exports: Mapping[str, str],
) -> str:
    """Return a batch script, made to be read and changed, that runs ``words`` in the directory
    ``where``. ``folder`` gets its output.
    """
    own = {
        "job-name": name,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "exclusive": None,
        "no-requeue": None,
        "time": time,
        "output": f"{folder}/{OUTPUT.format('%j')}",
    }
    taken = " ".join(site.directives)
    lines = ["#!/bin/bash", f"# {name}: one job for all rows. Results: {folder}"]
    for option, value in own.items():
        if (option == "time" and value is None) or re.search(rf"--{option}\b", taken):
            continue
        lines.append(f"#SBATCH --{option}" + (f"={value}" if value is not None else ""))
    lines += [*site.directives, "", *site.shell]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in exports.items()]
    lines += [f"cd {shlex.quote(str(where))}", f"exec {shlex.join(words)}", ""]
    return "\n".join(lines)


def submit(text: str, folder: Path) -> str:
    """Submit ``text``, kept as ``folder/suite.sbatch``; returns the job's number.

    Raises:
        BadInput: sbatch refuses it, or is not installed.
    """
    path = folder / "suite.sbatch"
    path.write_text(text, encoding="utf-8")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except OSError:
        raise BadInput("no sbatch here; run on a machine that submits to Slurm") from None
    if done.returncode:
        said = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise BadInput(f"sbatch refused {path}: {said}; change --site, --nodes or --time")
    return done.stdout.strip().partition(";")[0]


def srun(nodes: int, environ: Mapping[str, str]) -> list[str]:
    """Return the words in front of a command that start one task of it on each node of this job.

    A script's ``--export=NONE`` would reach the step. Newer versions of srun take no cores from
    sbatch."""
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={environ.get('SLURM_CPUS_ON_NODE') or 1}",
        "--cpu-bind=none",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        f"--wait={WAIT_SECONDS}",
    ]


def ended_by(environ: Mapping[str, str], out: Path) -> str:
    """Slurm's reason for ending this job, from the job's output; empty if it did not.

    ``scontrol`` says COMPLETING until the leader has ended, and ``sacct`` needs accounting."""
    path = out / OUTPUT.format(environ.get("SLURM_JOB_ID", ""))
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if found := FAILED.search(text):
        return f"{NODE_FAILURE} on {found[1]}"
    found = CANCELLED.search(text)
    return (found[1] or "cancelled").lower() if found else ""
