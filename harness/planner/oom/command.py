"""The ``oom`` command: explain an out-of-memory error, and predict the changes that would fit.
The error is read from a traceback, a log or a memory snapshot. Without a model the command starts
no process."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.markup import escape

from harness.commands.console import OK, make_console
from harness.commands.options import add_json, write_answer
from harness.commands.progress import Predictions
from harness.planner import pool
from harness.planner.explore import usual
from harness.planner.oom import log, reading, snapshot
from harness.planner.oom.log import Failure, Log, Numbers
from harness.planner.oom.reading import Reading, gib
from harness.planner.plan.advice import time_of
from harness.planner.plan.answer import fitting, reach, tried_instead
from harness.planner.plan.answer import gib as plain
from harness.planner.plan.candidates import asked_for
from harness.planner.plan.request import AS_PLANNED, add_question, export_command, fit_as_json
from harness.planner.plan.table import print_lines
from harness.planner.plan.tracing import Asking
from harness.planner.verdict import Fit
from harness.report.figures.units import GIB
from harness.system.cards import size_words
from strategies.base import BadInput
from strategies.files import open_foreign

COLUMNS = 80
"""Columns of the output if it is not a terminal."""
STDIN = "-"
PICKLE = b"\x80"
HEAD, LINE = 4096, 2**16
"""Bytes from which the kind of a file is found, and most characters of a line."""
LARGEST_LINES, CHANGES = 5, 3
"""Most source lines and changes that are printed."""
WANTED = "give a traceback, a log, or a snapshot by torch.cuda.memory._dump_snapshot"

MORE = "Predict which changes fit: add --model MODEL --recipe RECIPE, as they ran."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``oom``."""
    text = "traceback, log, or memory snapshot of torch (-: standard input)"
    parser.add_argument("file", metavar="FILE", help=text)
    text = "the recipe that ran out, such as single+bf16+checkpoint (default: none)"
    parser.add_argument("--recipe", metavar="R", default="", help=text)
    group = parser.add_argument_group("the training, to predict changes that fit")
    add_question(group, optional=True)
    add_json(parser)
    parser.set_defaults(**AS_PLANNED)


def oom(options: argparse.Namespace) -> int:
    """Print the diagnosis and, for a model, the changes that fit; return the exit code.

    Raises:
        BadInput: the file is unreadable or has no such error, or a plan cannot be made.
    """
    if bool(options.model) != bool(options.recipe):
        given, lacks = ("model", "recipe") if options.model else ("recipe", "model")
        raise BadInput(
            f"{given} is {getattr(options, given)}, and changes are predicted from a model and the "
            f"recipe that ran out; add --{lacks}"
        )
    console = make_console(COLUMNS)
    with opened(options.file) as file:
        head = file.peek(HEAD)[:HEAD]
        if head.startswith(PICKLE):
            numbers, found = _tell_snapshot(file, options.file, console)
        else:
            numbers, found = _tell_log(_scanned(file, head, options.file), options.file, console)
    if options.model:
        given, able = _tell_changes(options, numbers, console)
    else:
        given, able = None, []
        console.print(MORE, style="dim", highlight=False)
    if options.json:
        answer: dict[str, Any] = {"memory": dataclasses.asdict(numbers)}
        answer["diagnosis"] = dataclasses.asdict(found) if found else None
        answer["given"] = fit_as_json(given) if given else None
        write_answer(options, {**answer, "changes": [fit_as_json(fit) for fit in able]})
    return OK


def opened(name: str) -> contextlib.AbstractContextManager[Any]:
    """Open a file, or standard input, as bytes.

    Raises:
        BadInput: it cannot be opened, or is no regular file.
    """
    if name == STDIN:
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return io.BufferedReader(open_foreign(name))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"{name}: {why}; {WANTED}, or - for standard input") from None


def _called(name: str) -> str:
    return "standard input" if name == STDIN else name


def _scanned(file: IO[bytes], head: bytes, name: str) -> Log:
    """Return the errors of a log; refuse what is no text, is empty, or has no such error."""
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # PowerShell's `>`
    if b"\x00" in head and not wide:
        raise BadInput(f"{_called(name)} is neither text nor a pickle; {WANTED}")
    encoding = "utf-16" if wide else "utf-8-sig"
    # All of \n, \r\n and the \r of progress bars end a line.
    text = io.TextIOWrapper(file, encoding=encoding, errors="replace", newline=None)
    found = log.scan(iter(lambda: text.readline(LINE), ""))
    text.detach()
    if found.first is None:
        why = f"no out-of-memory message that is known (lines read: {found.lines})"
        why = why if found.lines else "it is empty"
        if found.asserted:
            why = f"another error of the GPU came first ({found.asserted:.60})"
        raise BadInput(f"{_called(name)}: {why}; {WANTED}")
    return found


def _tell_log(found: Log, name: str, console: Console) -> tuple[Numbers, Reading]:
    failure = found.first
    numbers, read = failure.numbers, reading.read(failure)
    _tell(read, numbers, {}, console)
    console.print(escape(f"Read from line {failure.at} of {_called(name)}."), style="dim")
    if others := [one for one in found.failures if one is not failure]:
        ranks = sorted({one.rank for one in found.failures if one.rank}, key=int)
        of = f" of ranks {', '.join(ranks)}" if len(ranks) > 1 else ""
        more = f"{len(others)} more such messages{of}; the first is explained."
        console.print(escape(more), style="dim")
    return numbers, read


def _tell_snapshot(file: IO[bytes], name: str, console: Console) -> tuple[Numbers, Reading | None]:
    try:
        found = snapshot.read(file)
    except ValueError as error:
        raise BadInput(f"{_called(name)} is no memory snapshot: {error}; {WANTED}") from None
    if not found:
        raise BadInput(
            f"{_called(name)} holds no memory of a GPU; record it with _record_memory_history"
        )
    first = found[0]
    failure = Failure(log.GPU, "", frames=first.frames)
    if not first.failed:
        gpu, held = first.numbers.gpu, gib(first.numbers.allocated)
        console.print(f"No allocation failed. At its end GPU {gpu} held {held} of tensors.")
    lines = dict([*first.lines.items()][:LARGEST_LINES])
    shares = {"Allocated by": first.phases, "Lines that hold most": lines}
    read = reading.read(failure, first.numbers) if first.failed else None
    _tell(read, first.numbers, shares, console)
    if len(found) > 1:
        console.print(f"{len(found)} GPUs are in {escape(name)}; one is shown.", style="dim")
    return first.numbers, read


def _tell(
    found: Reading | None,
    numbers: Numbers,
    shares: Mapping[str, Mapping[str, int]],
    console: Console,
) -> None:
    """Print a diagnosis, the parts of the card's memory, other ``shares`` of it, and measures."""
    if found:
        console.print(f"{escape(found.where[0].upper() + found.where[1:])}.", style="bold")
        console.print(escape(found.sentence))
    if rows := parts(numbers):
        gpu = f" of GPU {numbers.gpu}" if numbers.gpu else ""
        _tell_shares(f"{numbers.total / GIB:.2f} GiB{gpu}", rows, console, numbers.total)
        if numbers.requested:
            console.print(f" {'requested':<46}{numbers.requested / GIB:>8.2f}")
    for head, rows in shares.items():
        _tell_shares(head, rows, console)
    if found and found.measures:
        console.print("\nTry, cheapest first:", style="bold")
        print_lines([f"- {text}" for text in found.measures], console)


def parts(numbers: Numbers) -> Mapping[str, int]:
    """Return the parts of the card's memory by name, in bytes; empty if they are unknown."""
    if not numbers.known and not numbers.pool:
        return {}
    named = {
        "PyTorch's tensors": numbers.allocated,
        "reserved by PyTorch, in no tensor": numbers.cached,
        "CUDA context and libraries": numbers.context,
        **{f"process {pid}": size for pid, size in numbers.others.items()},
        "driver, desktop, what the message leaves out": numbers.unseen,
        "free": numbers.free,
    }
    return {name: size for name, size in named.items() if size}


def _tell_shares(
    head: str, rows: Mapping[str, int], console: Console, total: int | None = None
) -> None:
    if not rows:
        return
    whole = total or sum(rows.values()) or 1
    console.print(f"\n {head:<46}{'GiB':>8}{'%':>6}", style="bold")
    for name, size in rows.items():
        name = name if len(name) <= 46 else f"...{name[-43:]}"
        cells = f" {name:<46}{size / GIB:>8.2f}{100 * size / whole:>6.0f}"
        console.print(escape(cells))


def _tell_changes(
    options: argparse.Namespace, numbers: Numbers, console: Console
) -> tuple[Fit, list[Fit]]:
    """Print and return the prediction of the recipe, and the changes that fit."""
    if not (options.gpu or options.gpu_memory or options.cpu):
        if not numbers.capacity:
            raise BadInput(
                f"{_called(options.file)} does not state the card's memory; add --gpu CARD"
            )
        options.gpu_memory = size_words(_whole(numbers.capacity))
    options.recipes = [options.recipe]
    asked = asked_for(options)
    if others := _whole(numbers.beside):
        also = (*asked.gpu.also, size_words(others))
        gpu = dataclasses.replace(asked.gpu, beside=asked.gpu.beside + others, also=also)
        asked = dataclasses.replace(asked, gpu=gpu)
    asking = Asking(asked, pool.default_jobs(), Predictions(console))
    (given,) = asking.fits(asked.resolved)
    tried = asking.instead([given], given)
    able = fitting(tried or ())
    if given.fits:
        lines = [
            f"Predicted to fit: {reach(given)}. The run had larger samples, other models beside it "
            "(--also), or it ran out in a phase that --phases adds."
        ]
    elif able:
        lines = list(changes(given, able))
    else:
        lines = tried_instead(tried) or [f"Not predicted: {given.prediction.reason}"]
    needs = f" needs {reach(given)}" if given.need_bytes else ""
    needs += f", {gib(numbers.beside)} of it for other processes" if numbers.beside else ""
    console.print()
    print_lines([f"{given.resolved.spec.model} with {given.label}{needs}", *lines], console)
    asking.progress.tell_recorded()
    return given, able


def _whole(size: int) -> int:
    """Return whole MiB, as the message has no more digits."""
    return size // 2**20 * 2**20


def changes(given: Fit, able: Sequence[Fit]) -> Iterator[str]:
    """Yield the smallest changes that fit, with memory and time, and the command to export one.
    Fewer changed parts are smaller; of equal ones those that trainers have, then the faster."""
    order = sorted(able, key=lambda fit: (len(difference(given, fit)), not usual(fit.resolved)))
    yield "Smallest changes predicted to fit, with the time of a sample:"
    for fit in order[:CHANGES]:
        parts = ", ".join(difference(given, fit)) or fit.label
        yield f"- {parts}: {plain(fit.need_bytes)} GiB, time {time_of(fit, given)}"
    if command := export_command(order[0]):
        yield f"  export the first: {command}"


def difference(given: Fit, fit: Fit) -> list[str]:
    """Return the parts of the recipe that differ, and another number of GPUs or samples."""
    old, new = given.label.split("+"), fit.label.split("+")
    found = [f"+{part}" for part in new if part not in old]
    found += [f"-{part}" for part in old if part not in new]
    before, after = given.resolved.spec, fit.resolved.spec
    found += [f"{after.processes} GPUs"] if before.processes != after.processes else []
    same = before.global_batch == after.global_batch
    return found + ([] if same else [f"global batch {after.global_batch}"])
