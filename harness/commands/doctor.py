"""``./run.sh doctor``: report what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness import RUN, hooks
from harness.commands.console import make_console, print_listed
from harness.commands.options import add_json, folder_name, write_answer
from harness.commands.run import OK, examined
from harness.resolve import Resolved, resolve
from harness.spec import Spec, SpecError
from harness.system import gpus
from harness.system.machine import Machine, recall
from harness.system.requirements import gib, lacks_kernels, needed_ops, obstacle
from strategies import CATALOG, parse
from strategies.base import Conflict, Reason, Slot
from strategies.workloads import SAMPLE, TRAIN

WINDOWS = Path("/dev/dxg")
"""The driver of Linux inside Windows (WSL2) creates it."""
SPILLS = (
    "moves GPU memory to host memory when a GPU is full: steps take several times longer, and no "
    "error says so. Task Manager shows it as shared GPU memory of the process. Keep to recipes "
    f"that {RUN} plan --check fits"
)
"""WSL2 ignores the driver's setting against it: github.com/microsoft/WSL/issues/11050."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, text = parser.add_argument, "results folder (default: results)"
    add("--out", type=folder_name, metavar="DIR", default=Path("results"), help=text)
    add_json(parser)


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine can run; return the exit code."""
    out, console = options.out.absolute(), make_console()
    there = next(p for p in (out, *out.parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise SpecError(f"{out}: cannot write to {there}; choose another --out")
    ops = needed_ops([resolve(Spec(recipe="zero3_nvme", device=recall(out).device, **LATENTS))])
    machine = examined(console, out, ops)
    lacks = print_doctor(machine, console)
    reasons = {name: dataclasses.asdict(lack) for name, lack in lacks.items() if lack}
    able = [name for name in CATALOG if name not in reasons]
    answer = {"can_run": able, "cannot_run": reasons, "machine": dict(_facts(machine))}
    write_answer(options, answer)
    return OK


def print_doctor(machine: Machine, console: Console) -> dict[str, Reason | None]:
    """Print the machine's facts, what can run, and why the rest cannot; return these reasons."""
    lacks = {name: why_not(name, machine) for name in CATALOG}
    able = [name for name, lack in lacks.items() if lack is None]
    device = "GPUs" if machine.device == "cuda" and not machine.blind else "the CPU"
    text = f"{len(able)} of {len(lacks)} strategies can run on {device} of this machine"
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, fact in _facts(machine):
        facts.add_row(name, Text(fact))
    able_line = Text.assemble(("can run: ", "bold green"), ", ".join(able))
    console.print(Text(text, style="bold"), "", facts, "", able_line, "", sep="\n")
    rows = [(name, Text(f"{lack.text}\n-> {lack.hint}")) for name, lack in lacks.items() if lack]
    if rows:
        print_listed(console, ("cannot run", "reason, and what to do"), rows)
    return lacks


def _facts(machine: Machine) -> list[tuple[str, str]]:
    probe = machine.probe or {}
    limit = machine.container_bytes
    memory = gib(machine.memory_bytes) + (f", container limit {gib(limit)}" if limit else "")
    versions = ", ".join(f"{n} {v or 'missing'}" for n, v in machine.versions.items())
    cards = [
        f"{g.index}: {g.name}, {gib(g.total_bytes)}"
        + (f", in use: {g.who()}" if g.busy else f", {gib(g.free_bytes)} free")
        for g in machine.gpus
    ]
    if machine.blind:
        cards.append(f"torch sees none: {machine.blind}")
    device = machine.gpus[0].name if machine.gpus else "cpu"
    lines = gpus.rows(gpus.smi("--query-gpu=driver_version"), 1) if cards else []
    driver = lines[0][0] if lines and lines[0][0] else "of unknown version"
    cuda = (probe.get("torch") or {}).get("cuda")
    faults = "; ".join(f"{k}: {v}" for k, v in probe.get("errors", {}).items())
    return [
        ("machine", f"{machine.cores} cores, {memory}"),
        ("GPUs", "\n".join(cards) or "torch can use none: runs use the CPU"),
        *([("driver", f"NVIDIA {driver}; torch is built for CUDA {cuda or '?'}")] if cards else []),
        *([("Windows", SPILLS)] if WINDOWS.exists() else []),
        ("disk", f"{gib(machine.disk_free_bytes)} free at {machine.folder}"),
        ("compilers", f"{machine.compiler or 'g++ missing'}, {machine.ninja or 'ninja missing'}"),
        ("packages", f"Python {probe.get('python', '?')}, {versions}"),
        ("backends", ", ".join(probe.get("backends", [])) or "none"),
        ("calibration", hooks.planner("calibration_words")(device)),
        *([("faults", faults)] if faults else []),
    ]


COMPANY = (
    "ddp", "single", "single+bf16", "single+bf16_pure", "single+sgd:momentum=0.0", "single+lora",
    "zero1", "fsdp2",
)  # fmt: skip
"""Recipes to combine a strategy with. The first that the strategy accepts decides if it can run."""
TOKENS = {"model": "DiT-S/4:tokens=1024", "objective": "masked", "data": "synthetic"}
LATENTS: dict[str, Any] = {"data": "synthetic"}
"""Data that every machine has. The digits need scikit-learn, which may be missing."""
TRAINED: tuple[dict[str, Any], ...] = (LATENTS, TOKENS)
"""Training data: latents, or tokens for the strategies that change a token loss."""
PROCESSES = (2, 4)
"""Process counts without GPUs: any machine can start as many processes as sharding needs."""
MORE_GPUS = (2, 4, 8, 16)
"""GPU counts to try for a strategy that refuses this machine's number of GPUs."""


def why_not(name: str, machine: Machine) -> Reason | None:
    """Return what prevents a plain run of the strategy ``name`` here; None if nothing does."""
    runs = list(_plain_runs(name, machine))
    resolved = next((run for run in runs if not run.refusal), runs[0])
    needed, here = resolved.spec.processes, len(machine.gpus)
    if resolved.refusal:
        return Reason(str(resolved.refusal), f"see {RUN} list")
    if needed > here and (lack := lacks_kernels(machine)):
        return lack
    if here and needed > here and not machine.blind:
        present = f"{here} GPU{'s' * (here > 1)}"
        return Reason(
            f"{name} needs {needed} GPUs; this machine has {present}",
            f"{RUN} plan --recipes {resolved.spec.recipe} --gpus {needed} predicts it",
        )
    return obstacle(resolved, machine)


def _plain_runs(name: str, machine: Machine) -> Iterator[Resolved]:
    """Yield runs that use the strategy, the plainest first, those for more GPUs last."""
    kind = CATALOG[name]
    sharding = kind.slot is Slot.SHARD
    workload = TRAIN if sharding or TRAIN in kind.workloads else SAMPLE
    recipes = [name] if sharding else [f"{company}+{name}" for company in COMPANY]
    here = len(machine.gpus)
    counts = (here, *(n for n in MORE_GPUS if n > here)) if here else PROCESSES
    subjects = TRAINED if workload == TRAIN else (LATENTS,)
    for processes, trained, recipe in itertools.product(counts, subjects, recipes):
        with contextlib.suppress(Conflict):  # two of its parts use the same slot
            count = 1 if parse(recipe).alone(machine.device) else processes
            shared = {**trained, "processes": count, "global_batch": 64 * count}
            yield resolve(Spec(recipe=recipe, workload=workload, device=machine.device, **shared))
