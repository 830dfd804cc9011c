"""``./run.sh max-batch``: find the largest micro-batch that fits, by running out of memory.

Every probe is a run of its own in fresh processes. Probes are stored as results, so an interrupted
search can continue.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from harness import RESULTS, opened
from harness.commands import single_run
from harness.commands.console import FAILED, INTERRUPTED, OK, make_console, short, slug
from harness.commands.options import (
    ALL_GPUS,
    add_force,
    add_settings,
    folder_name,
    overrides,
    seconds,
)
from harness.commands.progress import Progress
from harness.json_files import write_json
from harness.launch import launch
from harness.report.figures import derive
from harness.report.figures.predicted import OUT_OF_MEMORY
from harness.resolve import resolve, run_name
from harness.result import Result, Status, found
from harness.spec import Spec, SpecError
from harness.suite.rows import identity
from harness.system.machine import Machine
from strategies import parse

FILES = ("runs", "max_batch.json")
DATA = {"data": "synthetic"}
STEPS = {"steps": 1, "warmup": 1}
"""The first step allocates the optimizer state and the second runs with it; one has the peak."""
SETTLED = (Status.OK, *OUT_OF_MEMORY)
"""Ends of a probe that say whether its batch fits."""


class Unclear(Exception):
    """A probe neither fitted nor ran out of memory; ``result`` is how it ended."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.reason or result.status.value)
        self.result = result


def search(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Return the largest micro-batch up to ``most`` that fits; 0 if not even one sample does.

    The size doubles until one does not fit; then the search halves the gap.
    """
    low, high, size = 0, most + 1, min(first, most)
    while low + 1 < high:
        if fits(size):
            low = size
        else:
            high = size
        size = min(2 * low, most) if high > most else (low + high) // 2
    return low


@dataclasses.dataclass(kw_only=True)
class Search:
    """One search: its spec without the global batch, and its ``results`` by micro-batch."""

    spec: Spec
    out: Path
    machine: Machine
    progress: Progress
    limit_bytes: int | None
    timeout: float | None
    fresh: bool
    start: Callable[..., Result] = launch.run
    results: dict[int, Result] = dataclasses.field(default_factory=dict)

    def fits(self, micro_batch: int) -> bool:
        """Run one probe, or take its stored outcome; raise Unclear if it has none."""
        samples = _samples(self.spec, micro_batch)
        resolved = resolve(dataclasses.replace(self.spec, global_batch=samples))
        folder = self.out / "runs" / run_name(resolved.spec)
        mark = f"{identity(resolved, self.machine)}-{self.limit_bytes or 'all'}"
        name, result = f"{self.spec.recipe} x {micro_batch}", found(folder)
        if (
            result
            and not self.fresh
            and result.identity == mark
            and result.status in SETTLED
            and (opened.unchanged(result.inputs) or not resolved.runs_users_code)
        ):
            self.progress.skip(result, name)
        else:
            self.progress.recipes.append(name)
            self.progress.begin_run(name, self.timeout)
            more = ["--memory-limit", str(self.limit_bytes or 0)]
            given = {"timeout": self.timeout, "on_status": self.progress.status, "more": more}
            result = self.start(resolved, folder, **given)
            self.progress.end_run(result, name)
            result.identity = mark
            result.write(folder / "result.json")
        self.results[micro_batch] = result
        self.record(None)
        if result.status not in SETTLED:
            raise Unclear(result)
        return result.status is Status.OK

    def ended(self, *ends: Status) -> list[int]:
        return [size for size, result in self.results.items() if result.status in ends]

    def record(self, answer: int | None) -> None:
        """Write the probes so far, ordered by size; ``answer`` is None during the search."""
        probes = [
            {
                "micro_batch": size,
                "global_batch": result.spec.global_batch,
                "status": result.status.value,
                "reason": result.reason,
                "metered_bytes": derive.highest(result.ranks, "allocated")
                or result.peak_so_far_bytes,
            }
            for size, result in sorted(self.results.items())
        ]
        head = {"recipe": self.spec.recipe, "memory_limit_bytes": self.limit_bytes}
        head["largest_known_to_fit"] = max(self.ended(Status.OK), default=None)
        write_json(self.out / "max_batch.json", {**head, "micro_batch": answer, "probes": probes})

    def known(self) -> str:
        fits, over = self.ended(Status.OK), self.ended(*OUT_OF_MEMORY)
        words = [f"{max(fits)} fits"] if fits else []
        words += [f"{min(over)} does not"] if over else []
        return ", ".join(words) or "no probe had ended"


def _samples(spec: Spec, micro_batch: int) -> int:
    """Return the global batch of that micro-batch."""
    recipe = parse(spec.recipe)
    return micro_batch * recipe.shares(spec.device, spec.processes) * recipe.accumulation


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_force(parser)
    add("--out", type=folder_name, metavar="DIR", help="folder (default: results/max-batch/RECIPE)")
    text = "memory limit of a process in GiB (default: all of it)"
    add("--memory-limit", type=float, metavar="GIB", help=text)
    add("--first", type=int, default=1, metavar="N", help="first micro batch to try (default: 1)")
    text = "largest micro batch to try (default: 4096)"
    add("--most", type=int, default=4096, metavar="N", help=text)
    text = "deadline of one probe (default: 1800)"
    add("--timeout", type=seconds, default=1800, metavar="SECONDS", help=text)
    add("--fresh", action="store_true", help="repeat finished probes too (default: keep them)")
    left = ("repeat", "warmup", "steps", "global_batch", "profile", "snapshot")
    usual = {**DATA, "processes": ALL_GPUS}
    add_settings(parser.add_argument_group("settings"), *left, defaults=usual)


def max_batch(options: argparse.Namespace) -> int:
    """Search, print every probe and the largest batch that fits; return the exit code."""
    console, first, most = make_console(), options.first, options.most
    state = _begin(options)
    text = f"each probe is a run of its own: {first} to {most} samples a process"
    console.print(text, highlight=False)
    try:
        best = search(state.fits, first, most)
    except KeyboardInterrupt:
        options.ending.begun = True
        console.print(f"interrupted: {state.known()}; the same command resumes", highlight=False)
        return INTERRUPTED
    except Unclear as stop:
        console.print(f"known so far: {state.known()}", highlight=False)
        console.print(f"cannot go on: {stop.result.status.value}: {stop}; {stop.result.way_out}")
        return FAILED
    finally:
        state.progress.stop()
    state.record(best)
    limit = f" in {state.limit_bytes / 2**30:g} GiB" if state.limit_bytes else ""
    if not best:
        console.print(f"one sample does not fit{limit}: {state.results[1].way_out}")
    else:
        result, processes = state.results[best], state.spec.processes
        size = (derive.highest(result.ranks, "allocated") or 0) / 2**30
        name = "allocated" if result.meter == "cuda" else "resident"
        over = f"{best + 1} ran out of memory"
        console.print(
            f"largest micro batch{limit}: {best} (global batch {result.spec.global_batch} on "
            f"{processes} process{'es' * (processes > 1)}), {name} {size:.3f} GiB; "
            f"{over if best + 1 in state.results else f'--most {most} ended the search'}"
        )
    console.print(str(short(state.out / "max_batch.json")), soft_wrap=True)
    return OK


def _begin(options: argparse.Namespace) -> Search:
    """Start a search, after a check that the machine can run the recipe."""
    if not 1 <= options.first <= options.most:
        raise SpecError(f"first is {options.first}; give --first from 1 to --most {options.most}")
    limit, console, given = options.memory_limit, make_console(), overrides(options)
    if limit is not None and not 0 < limit < float("inf"):
        raise SpecError(f"memory-limit is {limit:g}; give --memory-limit in GiB, above 0")
    out = Path(options.out or RESULTS / "max-batch" / slug(options.recipe)).absolute()

    def ask(machine: Machine) -> Spec:
        usual = single_run.usual(options.recipe, options.device, machine)
        spec = Spec(**{**DATA, **usual, **given, **STEPS})  # given values win, except for the steps
        spec.check()
        return dataclasses.replace(spec, global_batch=_samples(spec, 1))  # the smallest probe

    machine, row = single_run.checked(ask, out, FILES, options, console)
    return Search(
        spec=row.resolved.spec,
        out=out,
        machine=machine,
        progress=Progress(console),
        limit_bytes=None if limit is None else int(limit * 2**30),
        timeout=options.timeout,
        fresh=options.fresh,
    )
