"""``./run.sh controls``: check on this machine that the parity check detects a wrong training.

Each sabotage (``harness.worker.sabotage``) is launched like any row and compared with a plain run;
parity must report a difference. Rows that compute the same in another way must be equal.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import ROOT
from harness.commands import single_run
from harness.commands.console import FAILED, INTERRUPTED, OK, make_console
from harness.commands.options import add_force, add_settings, folder_name, overrides, seconds
from harness.commands.progress import Progress
from harness.launch import launch
from harness.report.data.grid import text_grid
from harness.report.figures import parity
from harness.report.rendering.narrow import print_grid
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import Spec
from harness.system import process
from harness.system.machine import Machine
from harness.worker.sabotage import HYBRID, SABOTAGES, SHARDED
from harness.worker.sabotage_ranks import (
    BETWEEN,
    CUT,
    NUMBERS,
    RANKS,
    REPEATED,
    SHARED,
    SHARED_NUMBERS,
    SPLIT,
)

USUAL = {"model": "DiT-S/4:depth=2", "data": "digits", "steps": 6, "warmup": 2}
USUAL |= {"weight_decay": 0.01}  # so that applying it twice shows
CPU_PROCESSES = 2
SAMPLES = 4
"""Samples per process: two micro-batches of two."""
HALVES = "accumulate:steps=2"
SAME = {
    "again": "",
    "checkpoint": "checkpoint",
    "accumulate": HALVES,
    "adamw:impl=plain": "adamw:impl=plain",
}
"""Equivalent computation -> its additions to the recipe."""
TOKENS = "tp:norms=tokens"
SHARING = {"sp": SHARED, "tp": CUT, TOKENS: BETWEEN}
"""Equivalent computation of pairs of processes -> the sabotages of what they share."""
STAGED, APART = "pp", "pp:schedule=zero_bubble"
SAME_STAGED = {
    "pp": STAGED,
    "pp:schedule=gpipe": "pp:schedule=gpipe",
    APART: "pp:schedule=zero_bubble,runs=1",
    "model_parallel": "model_parallel",
}
"""Equivalent computations with another sharding instead of ddp. They need as many processes as the
pipeline has stages, or a multiple."""
STAGES = 2
STAGES_SHARED = "pp_fsdp2"
WITHIN, OVER, TWICE = "fsdp2", "hsdp", "tp+sp"
GROUPS = 2 * 2
"""Least number of ranks for ``hsdp`` and ``tp+sp``: two groups of two."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """One run compared with the plain one. Without a ``sabotage`` the two must be equal."""

    name: str
    recipe: str
    sabotage: str = ""

    @property
    def expected(self) -> str:
        """Return the comparison that passes."""
        return "DIFFERS" if self.sabotage else "equal"


class _Quiet(Progress):
    """Progress without results; the command prints them in a table at the end."""

    def _finished(self, result: Result, after: str, name: str) -> None:
        self.done += 1


def all_controls(plain: str, processes: int) -> list[Control]:
    """Return all controls of the recipe ``plain``, those that must be equal first.

    Each needs as many processes as share its samples, its weights or its stages, or a multiple.
    """
    halves = f"{plain}+{HALVES}"
    same = {name: f"{plain}+{part}" if part else plain for name, part in SAME.items()}
    broken = {name: halves if "micro_batch" in name else plain for name in SABOTAGES}
    if processes > 1:
        same |= {WITHIN: WITHIN}
        broken |= dict.fromkeys(RANKS, plain) | dict.fromkeys(SHARDED, WITHIN)
    if processes % 2 == 0:
        same |= {part: f"{plain}+{part}" for part in SHARING}
        broken |= {name: f"{plain}+{part}" for part, names in SHARING.items() for name in names}
    if processes % GROUPS == 0:
        same |= {OVER: OVER, TWICE: f"{plain}+{TWICE}"}
        broken |= dict.fromkeys(HYBRID, OVER)
    if processes % STAGES == 0:
        same |= SAME_STAGED
        broken |= dict.fromkeys(NUMBERS, STAGED) | dict.fromkeys(SPLIT, SAME_STAGED[APART])
    if processes % STAGES == 0 and processes > STAGES:
        same |= {STAGES_SHARED: STAGES_SHARED}
        broken |= dict.fromkeys(REPEATED, STAGED) | dict.fromkeys(SHARED_NUMBERS, STAGES_SHARED)
    equal = [Control(name=name, recipe=recipe) for name, recipe in same.items()]
    wrong = [Control(name=n, recipe=recipe, sabotage=n) for n, recipe in broken.items()]
    return equal + wrong


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``controls``."""
    add = parser.add_argument
    add("--out", type=folder_name, metavar="DIR", help="folder (default: results/controls)")
    add_force(parser)
    add("--timeout", type=seconds, metavar="SECONDS", help="deadline of one run (default: none)")
    usual = {
        **USUAL,
        "global_batch": f"{SAMPLES} a process",
        "processes": f"all GPUs, {CPU_PROCESSES} on a CPU",
    }
    left = ("recipe", "repeat", "profile", "snapshot", "world")
    add_settings(parser.add_argument_group("settings"), *left, defaults=usual)


def controls(options: argparse.Namespace) -> int:
    """Run all controls and print each comparison; return 1 if one is not as expected."""
    console, given = make_console(), overrides(options)
    out = Path(options.out or ROOT / "results" / "controls").absolute()
    ask = functools.partial(_asked, options, given)
    _, row = single_run.checked(ask, out, ("*",), options, console)
    plain = row.resolved.spec
    asked, progress, words = all_controls(plain.recipe, plain.processes), _Quiet(console), {}
    progress.begin_suite("controls", ["plain", *(c.name for c in asked)], [True] * (1 + len(asked)))
    try:
        reference = _ended(
            Control(name="plain", recipe=plain.recipe), plain, out, options, progress
        )
        if reference.status is not Status.OK:
            console.print(
                f"the run without sabotage ended as {reference.status.value}: {reference.reason}"
            )
            return FAILED
        for control in asked:
            result = _ended(control, plain, out, options, progress)
            words[control] = (result, _word(control, result, reference))
    except process.Interrupted:
        console.print(f"interrupted after {len(words)} of {len(asked)} controls")
        return INTERRUPTED
    finally:
        progress.stop()
    return _told(words, reference, console)


def _asked(options: argparse.Namespace, given: Mapping[str, Any], machine: Machine) -> Spec:
    usual = single_run.usual("ddp", options.device, machine)
    if usual["device"] == "cpu":
        usual["processes"] = CPU_PROCESSES
    fields = {**USUAL, **usual, **given}
    fields["recipe"] = "ddp" if fields["processes"] > 1 else "single"
    return Spec(**{"global_batch": SAMPLES * fields["processes"], **fields})


def _ended(
    control: Control, plain: Spec, out: Path, options: argparse.Namespace, progress: Progress
) -> Result:
    """Launch one control like any row and return its result."""
    progress.begin_run(control.name, options.timeout)
    result = launch.run(
        resolve(replace(plain, recipe=control.recipe)),
        out / "runs" / control.name.replace(":", "_"),
        timeout=options.timeout,
        on_status=progress.status,
        more=["--sabotage", control.sabotage] if control.sabotage else [],
    )
    progress.end_run(result)
    return result


def _word(control: Control, result: Result, reference: Result) -> str:
    """Return the report's word for the comparison, as if the row promised the same computation."""
    if result.status is not (Status.VOID if control.sabotage else Status.OK):
        return result.status.value
    allowed = parity.limits([reference])
    return parity.against_the_reference(result, reference, allowed).word


def _told(words: dict[Control, tuple[Result, str]], reference: Result, console: Console) -> int:
    """Print the table and its conclusion; return the exit code."""
    lines: list[list[str]] = []
    marks: list[tuple[str, ...]] = []
    for control, (result, word) in words.items():
        far = parity.distances(result, reference)
        cells = [f"{far[m]:.1e}" if m in far else "-" for m in parity.MEASURES]
        right = word == control.expected
        reads = word if right else f"{word}, NOT {control.expected}"
        lines.append([control.name.replace("_", " "), *cells, reads])
        marks.append(() if right else ("alarm",))
    kinds = {"control": "text", **dict.fromkeys(parity.MEASURES, "number"), "reads": "text"}
    grid = text_grid("controls", "", kinds, lines)
    print_grid(replace(grid, marks=marks), console, least_worth=tuple(reversed(parity.MEASURES)))
    allowed = parity.limits([reference])
    limits = ", ".join(f"{m} {getattr(allowed, m):g}" for m in parity.MEASURES)
    console.print(f"limits, relative to the run without sabotage: {limits} ({allowed.why})")
    for control, (result, word) in words.items():
        if word == result.status.value:
            console.print(f"{control.name} did not end as expected: {word}: {result.reason}")
    wrong = [control.name for control, (_, word) in words.items() if word != control.expected]
    if wrong:
        console.print(f"NOT as expected: {', '.join(wrong)}", style="red")
        return FAILED
    console.print(f"all {len(words)} controls ended as expected", style="green")
    return OK
