"""``plan --from``: a trainer's own configuration, its prediction, and the plan's answer beside it.
``--diff`` compares two configurations by category of memory."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.commands.console import FAILED, INTERRUPTED, OK
from harness.commands.options import write_answer
from harness.planner import pool
from harness.planner.edits import adapts
from harness.planner.export import files
from harness.planner.export.files import ACCELERATE
from harness.planner.export.matching import Reading
from harness.planner.export.reading import reading
from harness.planner.plan.answer import (
    answered,
    gib,
    in_words,
    needs_or_lacks,
    of_uncounted,
    on_host,
    peak_in_words,
    rate_in_words,
    reach,
)
from harness.planner.plan.candidates import PlanError, asked_for, without_recipes
from harness.planner.plan.request import MODEL, fit_as_json
from harness.planner.plan.table import (
    SHOWN,
    by_category,
    print_explained,
    print_lines,
    setting,
    short_notes,
    unpredicted,
)
from harness.planner.plan.tracing import Asking
from harness.planner.verdict import Fit, with_uncounted
from harness.report.figures.units import GIB
from strategies.base import Slot

SIZES = {"resolution": "", "frames": 0, "text": 0, "global_batch": None}
"""Options that replace the files' sizes, with their defaults."""
FOUND = "The plan's own answer, for the same model, samples and card:"
NAMES = {"params": "parameters", "grads": "gradients", "optim": "optimizer state", "ema": "average",
         "activ": "activations", "other": "temporaries"}  # fmt: skip
STAY, BEYOND = "models that stay", "reserve and overhead"
"""Needs of a GPU beyond the live tensors at the peak."""
SAMPLES = ("model", "resolution", "frames", "micro batch")
CAUSES: Mapping[str, Sequence[str]] = {
    "parameters": ("model", "SHARD", "PRECISION", "SWAP", "CAST", "ADAPT", "processes"),
    "gradients": ("model", "SHARD", "PRECISION", "SWAP", "ADAPT", "STEP", "accumulation"),
    "optimizer state": ("model", "SHARD", "PRECISION", "SWAP", "ADAPT", "OPTIMIZE", "processes"),
    "average": ("model", "SHARD", "ADAPT", "AVERAGE"),
    "activations": (*SAMPLES, "PRECISION", "ATTEND", "RECOMPUTE", "OFFLOAD", "ADAPT"),
    "temporaries": (*SAMPLES, "PRECISION", "ATTEND", "RECOMPUTE", "OPTIMIZE", "ADAPT"),
}
"""Category -> the settings that decide it."""
LEAST = GIB // 20
"""Bytes of a difference that is worth a line."""


def read(options: argparse.Namespace, paths: Sequence[Path]) -> Reading:
    """Return the reading of the files, under the options that replace their settings.

    Raises:
        BadInput: the files cannot be read as a recipe.
    """
    model = "" if options.model == MODEL else options.model
    return reading(files.read(paths), model, options.processes)


def asked_of(options: argparse.Namespace, made: Reading) -> argparse.Namespace:
    """Return the options of a plan for a reading."""
    own: dict[str, Any] = {name: getattr(made, name) for name in SIZES}
    own |= {name: getattr(options, name) for name, usual in SIZES.items()
            if getattr(options, name) != usual}  # fmt: skip
    own |= {"model": made.model, "processes": made.processes, "recipes": [made.recipe]}
    own["also"] = options.also or list(dict.fromkeys(made.also))
    asked = options.phases or options.also or options.cached  # of a light installation the rest
    own["phases"] = options.phases if asked or not pool.traces() else made.phases
    if made.trainer != ACCELERATE:
        own["average"] = made.average
    return argparse.Namespace(**{**vars(options), **own})


def plan_from(options: argparse.Namespace, made: Reading, asking: Asking, console: Console) -> int:
    """Predict the configuration and the plan's answer, print both, and return the exit code."""
    (fit,) = (with_uncounted(one, made.unpredicted) for one in asking.fits(asking.asked.resolved))
    if options.diff:
        return _plan_diff(options, made, fit, asking, console)
    # Before the search, which takes minutes for a model without records.
    before = asking.asked.before
    print_lines([setting([fit]), *(before.lines if before else ())], console)
    print_lines(_verdict(made, fit), console)
    print_lines(_intended(options, made, asking), console)
    for lines in _reading_lines(made, options.source, options.notes):
        print_lines(lines, console)
    alike = asked_of(options, made)
    if adapts(fit.resolved) and "average" in vars(alike):
        alike.average = 0.0  # the adapters' own is small, and records have none
    other = dataclasses.replace(asking, asked=without_recipes(alike, fit.resolved))
    fits, proofs, ways = other.answer()
    print_lines([FOUND, *answered(fits, proofs, ways)], console)
    print_lines([*unpredicted([fit]), *short_notes([fit])], console, style="dim")
    if options.explain:
        print_explained([fit], console)
    if options.json:
        found = {"rows": [fit_as_json(fit)], "searches": [proof.as_json for proof in proofs]}
        write_answer(options, {"read": dataclasses.asdict(made), **found})
    if any(proof.stopped for proof in proofs):
        return INTERRUPTED
    return FAILED if fit.need_bytes is None else OK


def _intended(options: argparse.Namespace, made: Reading, asking: Asking) -> list[str]:
    """Return what the configuration would need with the adapters of which it sets options."""
    if made.intended is None:
        return []
    asked = asked_for(asked_of(options, made.intended))
    (fit,) = dataclasses.replace(asking, asked=asked).fits(asked.resolved)
    idle = ", ".join(made.idle)
    verb = "does" if len(made.idle) == 1 else "do"
    needs = reach(fit) if fit.need_bytes is not None else "is not predicted"
    head = f"{idle} {verb} nothing: all weights train by default. As adapters:"
    return [head, f"  {in_words(fit)}: {fit.label}, {needs}"]


def _verdict(made: Reading, fit: Fit) -> list[str]:
    """Return the configuration's recipe, what it needs, and its peak."""
    lines = [f"{made.trainer}: {fit.label}", f"  {in_words(fit)}: {needs_or_lacks(fit)}"]
    if fit.need_bytes is not None:
        lines[1] += on_host(fit) if fit.may_fit else ""
        lines[1] += (f", {rate_in_words(fit)}" if fit.seconds else "") + of_uncounted(fit)
        lines.append(f"  its peak: {peak_in_words(fit)}")
    return lines


def _reading_lines(made: Reading, paths: Sequence[Path], every: bool) -> Iterator[list[str]]:
    """Yield the parts of a reading as lines: what was read, assumed, not predicted and not read."""
    names = ", ".join(path.name for path in paths)
    yield [f"Read from {names}:", *(f"  {given} -> {means}" for given, means in made.means)]
    usual = (f"  {given} -> {means} ({source})" for given, means, source in made.usual)
    parts = {"The trainer's defaults:": [*usual]}
    parts["Assumed:"] = [f"  {text}" for text in made.assumed]
    parts["Not predicted:"] = [f"  {text}" for text in made.unpredicted]
    some = made.differs if every else made.differs[:3]
    parts["The trainer differs:"] = [f"  {text}" for text in some]
    yield from ([head, *lines] for head, lines in parts.items() if lines)
    if made.unread:  # names of one block are joined, as ``sample.*``
        names = (f"{n.partition('.')[0]}.*" if "." in n else n for n in made.unread)
        yield [f"Not read: {', '.join(dict.fromkeys(names))}"]


def _plan_diff(
    options: argparse.Namespace, made: Reading, fit: Fit, asking: Asking, console: Console
) -> int:
    """Predict the other configuration too, and print which settings and bytes differ."""
    other = read(options, options.diff)
    asked = asked_for(asked_of(options, other))
    found = dataclasses.replace(asking, asked=asked).fits(asked.resolved)
    (second,) = (with_uncounted(one, other.unpredicted) for one in found)
    for one in (fit, second):
        if one.need_bytes is None:
            raise PlanError(f"{one.label} is not predicted: {one.lack or one.prediction.reason}")
    names = [options.source[0].name, options.diff[0].name]
    names = ["A", "B"] if names[0] == names[1] else names
    console.print(setting([fit]), highlight=False)
    print_lines(diff_lines(names, (made, other), (fit, second)), console)
    if options.json:
        rows = {"read": [dataclasses.asdict(one) for one in (made, other)]}
        write_answer(options, {**rows, "rows": [fit_as_json(one) for one in (fit, second)]})
    return OK


def diff_lines(
    names: Sequence[str], read: tuple[Reading, Reading], fits: tuple[Fit, Fit]
) -> list[str]:
    """Return which of two configurations needs more, by category, and the settings that differ."""
    first, second = (_by_category(fit) for fit in fits)
    settings = [_settings(*pair) for pair in zip(read, fits, strict=True)]
    keys = dict.fromkeys([*settings[0], *settings[1]])
    both = {key: tuple(one.get(key, "none") for one in settings) for key in keys}
    unlike = {key: pair for key, pair in both.items() if pair[0] != pair[1]}
    more, less = (0, 1) if fits[0].need_bytes >= fits[1].need_bytes else (1, 0)
    total = fits[more].need_bytes - fits[less].need_bytes
    lines = [f"{names[more]} needs {gib(total)} GiB more than {names[less]}"]
    lines += [
        f"  {name}: {reach(fit)}, {fit.label}{of_uncounted(fit)}"
        for name, fit in zip(names, fits, strict=True)
    ]
    heads = "".join(f"{name[:16]:>17}" for name in names)
    lines += ["GiB of a GPU at the peak:", f"  {'':<22}{heads}{'difference':>13}"]
    pairs = {name: (first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}
    for name, (one, other) in sorted(pairs.items(), key=lambda item: -abs(item[1][0] - item[1][1])):
        change = (other - one) / GIB
        sizes = f"{gib(one):>17}{gib(other):>17}{change:>+13.1f}"
        lines.append(f"  {name:<22}{sizes}")
    lines += ["Settings that differ:"]
    lines += [f"  {key.lower()}: {a} against {b}" for key, (a, b) in unlike.items()] or ["  none"]
    why = []  # the settings behind each category's difference, the largest first
    for name in sorted(CAUSES, key=lambda name: -abs(first[name] - second[name])):
        size = abs(second[name] - first[name])
        causes = [f"{unlike[k][0]} against {unlike[k][1]}" for k in CAUSES[name] if k in unlike]
        if size >= LEAST and causes:
            why.append(f"  {name}, {size / GIB:.1f} GiB: {'; '.join(causes)}")
    return lines + ([f"Why, as {names[0]} and {names[1]} have it:", *why] if why else [])


def _by_category(fit: Fit) -> dict[str, int]:
    """Return the need by category; the last is what the allocator and libraries hold beyond."""
    live = by_category(fit)
    found = {NAMES[key]: live.get(key, 0) for key in SHOWN}
    found |= {STAY: fit.gpu.beside} if fit.gpu.beside else {}
    return {**found, BEYOND: fit.need_bytes - sum(found.values())}


def _settings(made: Reading, fit: Fit) -> dict[str, str]:
    spec, resolved = fit.resolved.spec, fit.resolved
    sides, _, rest = resolved.subject.size_in_words.partition(" of ")
    found = {"model": spec.model, "resolution": sides.partition(",")[0]}
    found |= {"frames": rest.partition(" ")[0]}
    found |= {"micro batch": str(resolved.micro_batch), "processes": str(spec.processes)}
    found |= {"accumulation": str(resolved.launch.accumulation)}
    parts = {Slot(part.slot).name: str(part) for part in resolved.recipe.strategies
             if part.slot != Slot.ACCUMULATE}  # fmt: skip
    return {**{k: v for k, v in found.items() if v}, **parts}
