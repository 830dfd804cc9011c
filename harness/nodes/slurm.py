"""Slurm as text: the script of a suite, the step of a row, and its words for how they ended. Pure
but for two questions to its commands, which may be absent.

States are asked of steps first: a job's own exit code is 0:0 for NODE_FAIL, PREEMPTED and TIMEOUT,
and ``sacct -X`` hides the step that ran out of memory. Without accounting, what ``srun`` itself
printed is all there is.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.nodes.outcome import StepState
from strategies.base import BadInput

__all__ = [
    "Site",
    "SiteError",
    "ask",
    "from_sacct",
    "from_scontrol",
    "from_srun",
    "read_site",
    "script",
    "srun",
    "step_state",
]

WAIT_SECONDS = 120
"""For the other supervisors' last words once one has ended: each has a grace, and a kill."""
OWN = {
    "nodes": "--nodes N of run",
    "N": "--nodes N of run",
    "ntasks": "one task a node, which is what a row's step takes",
    "n": "one task a node, which is what a row's step takes",
    "ntasks-per-node": "one task a node, which is what a row's step takes",
    "requeue": "nothing: a row that starts over measures another thing",
    "array": "nothing: rows follow one another on the same nodes",
    "output": "OUT/slurm-JOB.txt, which run follows",
    "o": "OUT/slurm-JOB.txt, which run follows",
}
"""Options that a site file may not set -> what stands in their place."""
SAID = (
    ("NODE_FAIL", re.compile(r"DUE TO NODE FAILURE|Node failure on (?P<node>[\w.-]+)")),
    (
        "OUT_OF_MEMORY",
        re.compile(
            r"error: (?P<node>[\w.-]+): tasks? [\d,-]+: Out Of Memory|oom[_-]kill"
            r"|exceeded (?:step|job)? ?memory limit"
        ),
    ),
    ("TIMEOUT", re.compile(r"DUE TO TIME LIMIT")),
    ("PREEMPTED", re.compile(r"DUE TO PREEMPTION")),
    ("CANCELLED", re.compile(r"\*\*\* (?:STEP|JOB) \S+ (?:ON \S+ )?CANCELLED AT")),
)
"""State -> how srun and slurmstepd say it; the first that is found is the cause."""


class SiteError(BadInput):
    """A site file that cannot be used: the file, the line, and what to do."""


@dataclass(frozen=True)
class Site:
    """A site's facts, as text: ``#SBATCH`` lines, and shell lines that set a job up."""

    directives: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()


def read_site(path: Path) -> Site:
    """The site file in ``path``.

    Raises:
        SiteError: unreadable, or it sets what is the run's own.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SiteError(f"site file {path}: unreadable ({error}); give --site FILE") from None
    directives = tuple(line.rstrip() for line in lines if line.startswith("#SBATCH"))
    for line in directives:
        option = re.match(r"#SBATCH\s+-{1,2}([\w-]+)", line)
        if option and option[1] in OWN:
            raise SiteError(f"site file {path}: {line!r}: leave it out, there is {OWN[option[1]]}")
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
    """A batch script that a person can read, paste and change: one job, in which the command
    ``words`` starts one step a row. ``folder`` gets its output, ``where`` is its directory."""
    own = {
        "job-name": name,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "exclusive": None,
        "no-requeue": None,
        "time": time,
        "output": f"{folder}/slurm-%j.txt",
    }
    taken = " ".join(site.directives)
    lines = ["#!/bin/bash", f"# {name}: one job, one step a row. Results: {folder}"]
    for option, value in own.items():
        if (option == "time" and value is None) or re.search(rf"--{option}\b", taken):
            continue
        lines.append(f"#SBATCH --{option}" + (f"={value}" if value is not None else ""))
    lines += [*site.directives, "", *site.shell]
    lines += [f"export {key}={shlex.quote(value)}" for key, value in exports.items()]
    lines += [f"cd {shlex.quote(str(where))}", f"exec {shlex.join(words)}", ""]
    return "\n".join(lines)


def srun(nodes: int, cpus: int) -> list[str]:
    """The words in front of a supervisor: one task on each of ``nodes``, with ``cpus`` cores.

    ``--export=ALL`` since a script's ``--export=NONE`` would reach the step; cores are said again
    since srun no longer takes them from sbatch; a bad exit ends all, but supervisors exit well."""
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        "--cpu-bind=none",
        "--export=ALL",
        "--kill-on-bad-exit=1",
        f"--wait={WAIT_SECONDS}",
    ]


# ---- states ----


def step_state(log: Path, job: str) -> StepState | None:
    """How the step ended whose output is in ``log``, if Slurm ended it."""
    try:
        said = from_srun(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        said = None
    return said or from_sacct(ask("sacct", "-n", "-P", "-j", job, "--format=JobID,State,NodeList"))


def from_srun(text: str) -> StepState | None:
    """The state that srun's own messages tell; None where Slurm did not end the step."""
    for word, pattern in SAID:
        found = pattern.search(text)
        if found:
            line = next(line for line in text.splitlines() if pattern.search(line))
            named = [m["node"] for m in pattern.finditer(text) if m.groupdict().get("node")]
            what = "job" if " JOB " in line else "step"
            if word == "TIMEOUT":
                what = "job"  # no step has a limit of its own here
            return StepState(word=word, what=what, nodes=tuple(dict.fromkeys(named)), line=line)
    return None


def from_sacct(text: str) -> StepState | None:
    """The state of the last step of ``sacct -n -P --format=JobID,State,NodeList``; else the job's.
    None where they ended by themselves, or still run."""
    steps: dict[int, tuple[str, str]] = {}
    job = ("", "")
    for line in text.splitlines():
        name, state, nodes = [*line.split("|"), "", ""][:3]
        number = name.partition(".")[2]
        if number.isdigit():
            steps[int(number)] = (state, nodes)
        elif name.isdigit():
            job = (state, nodes)
    last = steps[max(steps)] if steps else ("", "")
    return _state(last[0], "step") or _state(job[0], "job")


def from_scontrol(text: str) -> StepState | None:
    """The state of a job that ended, as ``scontrol show job`` says it; None while it is not over,
    or where it ended by itself."""
    found = re.search(r"\bJobState=(\w+)", text)
    return _state(found[1], "job") if found else None


def _state(said: str, what: str) -> StepState | None:
    """``CANCELLED by 0``, ``NODE_FAIL``: the word and who."""
    word, _, by = said.partition(" by ")
    known = {"NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "PREEMPTED", "CANCELLED"}
    if word not in known:
        return None
    return StepState(word=word, what=what, by=f"user {by}" if by else "", line=said)


def ask(*words: str) -> str:
    """What one of Slurm's commands prints; empty where there is none, or it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
