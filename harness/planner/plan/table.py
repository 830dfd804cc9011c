"""A plan in a terminal: its table, its notes and answer, and the details of ``plan --explain``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.markup import escape

from harness import RUN
from harness.planner import resident_models, uncertainty, verdict
from harness.planner.before_step import Before
from harness.planner.eager import note_of
from harness.planner.edits import Ways
from harness.planner.explore import RULE, reason
from harness.planner.export import trainers
from harness.planner.plan.answer import (
    answered,
    gib,
    kind_of_sample,
    near,
    phases,
    rate,
    where,
)
from harness.planner.plan.lattice import adapts
from harness.planner.speed import rates
from harness.planner.speed.roofline import issue_seconds, issued, latency, sent
from harness.planner.verdict import Fit
from harness.prediction import Prediction
from harness.report.data.grid import text_grid
from harness.report.figures.units import GIB
from harness.report.rendering.table import print_grid
from harness.spec import Spec
from harness.system.cards import Card

if TYPE_CHECKING:
    from rich.console import Console

    from harness.planner.explore import Proof


def sent_words(fit: Fit, least: int, digits: int) -> str:
    """Return the GiB that a GPU sends in a step, of links with at least ``least`` bytes."""
    found = sent(fit.prediction.work, fit.resolved.spec.processes, fit.gpu.linked)
    place = "NVLink domain" if fit.gpu.domain else "node"
    ways = {f"within its {place}": found.within, f"to other {place}s": found.across}
    told = [f"{size / GIB:.{digits}f} GiB {w}" for w, size in ways.items() if size >= least]
    return " and ".join(told)


SHOWN = {
    "params": ("parameters", "gathered"),
    "grads": ("gradients", "buckets"),
    "optim": ("optimizer_state",),
    "ema": ("ema",),
    "activ": ("activations", "recomputed", "autocast"),
    "other": ("temporaries",),
}
WORD = {"fits": "fits", "tight": "tight", "host": "host short", "no": "no",
        "unknown": "not predicted", "cannot": "cannot run"}  # fmt: skip
ON_GPU = (
    "Memory in GiB of one GPU; Host: of a node. Needs: the allocator's reserve, library "
    "workspaces, CUDA context and NCCL. fits: the upper ends of Needs and Host fit too. "
    "tight: the available memory lies within the range."
)
ON_CPU = (
    "Memory in GiB. Needs: tensors, interpreters and libraries of all processes, which share "
    "the host's memory."
)
LARGE = 64
"""GPUs up to which a plan states a time without saying what it rests on."""
RULE_IN_SHORT = (
    "The answer: sure to fit and about as fast as the fastest; then exact weights, nothing in host "
    "memory, least memory, fewest parts (--notes: the rule)."
)
BEFORE = "step fits"
"""Verdict of a row whose step fits, while what comes before it does not."""
MORE_NOTES = "More notes: the same command with --notes."
LEAST_WORTH = ("other", "ema", "grads", "params", "optim", "activ", "Step ms", "Free")
"""Heads of columns that a narrow terminal hides first."""
SPEED = {"image": "Img/s", "video": "s/video"}
"""Kind of sample -> head of the speed column."""
WHY_NOT = "Why not"
"""Head of the column of reasons why a faster or smaller row is not the answer."""
TRAINERS = "Trainers"
SOME = 1
"""Trainers that a row names."""
STAYS = ("", "Needs", "Host", *SPEED.values(), WHY_NOT)
"""Heads of columns that are never hidden: they decide the verdict."""
LOOKS = {"": {"fits": "green", "tight": "yellow", "step fits": "yellow", "host short": "red",
              "no": "red", "not predicted": "dim", "cannot run": "dim"}}  # fmt: skip
"""Styles of the verdicts in the column without a head."""


def print_plan(
    fits: Sequence[Fit],
    proofs: Sequence[Proof],
    refused: Sequence[tuple[str, str]],
    ways: Ways | None,
    console: Console,
    *,
    whole: bool,
    before: Before | None = None,
) -> None:
    """Print the answer, the table with the fastest first, rows that cannot run, and notes.

    ``proofs``: of searches, whose predictions are ``fits``. ``whole``: all notes. ``before``: what
    comes before the step, if it is counted.
    """
    print_lines([setting(fits), *(before.lines if before else ())], console)
    print_lines(answered(fits, proofs, ways), console)
    best = [proof.best for proof in proofs] if proofs else [verdict.fastest(fits)]
    best = [fit for fit in best if fit]
    shown, left = shortened(fits, proofs) if proofs else (fits, [])
    short = before is not None and not before.fits
    _print_table(shown, best, console, searched=bool(proofs), short=short)
    print_lines(left, console)
    for name, cause in refused:
        console.print(f"[yellow]refused[/yellow] {escape(name)}: {escape(cause)}")
    _print_notes(fits, console, whole, searched=bool(proofs))


def _print_notes(fits: Sequence[Fit], console: Console, whole: bool, *, searched: bool) -> None:
    """Print why rows have no prediction, then all notes, or the three that matter most; of a
    search its rule too."""
    for text in unpredicted(fits):
        console.print(escape(text), highlight=False)
    texts = notes(fits) if whole else [*short_notes(fits), MORE_NOTES]
    texts = [RULE if whole else RULE_IN_SHORT, *texts] if searched else texts
    for text in texts:
        console.print(escape(text), style="dim", highlight=False)


MOST = 10
"""Most rows of the table of a search."""


def shortened(fits: Sequence[Fit], proofs: Sequence[Proof]) -> tuple[list[Fit], list[str]]:
    """Return the rows of a search that its table shows, and a line on the others of each kind.

    Rows that fit are shown, the answers first; if there are none, the nearest ones are.
    """
    heads = [fit for proof in proofs for fit in (proof.best, *proof.others.values(), proof.nearest)]
    others = [fit for fit in fits if fit.may_fit and not any(fit is one for one in heads)]
    rest = sorted(others, key=order)
    shown: list[Fit] = []
    for fit in heads:
        if fit and not any(fit is one for one in shown):
            shown.append(fit)
    shown += rest[: max(0, MOST - len(shown))]
    left = [fit for fit in fits if not any(fit is one for one in shown)]
    more = sum(fit.may_fit for fit in left)
    none = sum(fit.verdict in ("no", "host") for fit in left)
    lines = [f"{more} more rows fit, or may: --json FILE has them."] if more else []
    return shown, [*lines, *([f"{none} more recipes do not fit."] if none else [])]


def _print_table(
    fits: Sequence[Fit], best: Sequence[Fit], console: Console, *, searched: bool, short: bool
) -> None:
    """Print the table, with the rows of ``best`` marked.

    ``searched``: with the reasons why faster and smaller rows are not the answer, and the trainers
    that have each row. ``short``: what comes before the step does not fit.
    """
    ordered = sorted(fits, key=order)
    kinds = {"Recipe": "text", "": "flag"}
    speed = SPEED[kind_of_sample(fits[0])]
    kinds |= dict.fromkeys(("Needs", "Free", *SHOWN, "Host", "Step ms", speed), "number")
    cells = [_cells(fit, short) for fit in ordered]
    more = {WHY_NOT: [_why_not(fit, best) for fit in ordered],
            TRAINERS: [_trainers(fit) for fit in ordered]}  # fmt: skip
    for head, texts in more.items() if searched else ():
        if any(texts):
            kinds[head] = "text"
            cells = [[*row, text] for row, text in zip(cells, texts, strict=True)]
    grid = text_grid("plan", "", kinds, cells)
    marks = [("reference",) if any(fit is one for one in best) else () for fit in ordered]
    grid = replace(grid, marks=marks)
    print_grid(grid, console, least_worth=LEAST_WORTH, stays=STAYS, styles=LOOKS)


def _why_not(fit: Fit, best: Sequence[Fit]) -> str:
    """Return why a faster or smaller row is not the answer of its training."""
    own = (one for one in best if adapts(one.resolved) == adapts(fit.resolved))
    return next((reason(fit, one) for one in own), "")


def _trainers(fit: Fit) -> str:
    """Return a trainer to which ``export`` takes a row, and how many more there are."""
    names = [name for name in trainers.EXPORTED if trainers.has(name, fit.resolved)]
    names.sort(key=len)
    return ", ".join(names[:SOME]) + f" +{len(names) - SOME}" * (len(names) > SOME)


def print_lines(lines: Sequence[str], console: Console, style: str = "") -> None:
    """Print lines of an answer; only commands are not wrapped."""
    for line in lines:
        whole = RUN in line  # a wrapped command cannot be copied
        for part in [line] if whole else wrapped(line, console.width):
            console.print(escape(part), highlight=False, soft_wrap=True, style=style)


def wrapped(line: str, width: int) -> list[str]:
    """Return the line broken at spaces, with its further lines indented below the first.

    A recipe that is longer than a line is broken after a plus sign.
    """
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    room = width - len(indent)
    lines = [indent[2:]]
    for word in line.split():
        whole = len(word) <= room
        for place, part in enumerate([word] if whole else re.findall(r"[^+]+\+?", word)):
            gap = " " if place == 0 and lines[-1].strip() else ""
            if len(lines[-1] + gap + part) > width:
                lines.append(indent + part)
            else:
                lines[-1] += gap + part
    return lines


def order(fit: Fit) -> tuple[int, float]:
    """Sort key: by verdict, then the fastest of the rows that may fit, then the smallest need."""
    rank, speed = verdict.VERDICTS.index(fit.verdict), fit.samples_per_second or 0.0
    return (rank, -speed if fit.may_fit else float(fit.need_bytes or 0))


def setting(fits: Sequence[Fit]) -> str:
    """Return the table's setting: model, size of a sample, batch and cards."""
    spec, card = max((f.resolved.spec for f in fits), key=lambda s: s.processes), fits[0].gpu
    size = fits[0].resolved.subject.size_in_words
    on = f"{spec.processes} processes on" if card.shared else f"{spec.processes} x"
    return (
        f"{spec.model} at {size}, global batch {spec.global_batch}, "
        f"{on} {card.words}{_nodes(spec, card)}"
    )


def _nodes(spec: Spec, card: Card) -> str:
    """Return the number of machines, if more than one, and the bandwidth between them."""
    count = -(-spec.processes // card.node)
    if count < 2 or card.shared:
        return ""
    if spec.processes <= card.linked:
        return f" on {count} nodes, joined by NVLink"
    speed = f"{card.network_bandwidth / 1e9:.3g} GB/s between them"
    return f" on {count} nodes, {speed} ({card.network_told or 'typical'})"


def by_category(fit: Fit) -> dict[str, int]:
    """Return the bytes of each category of ``SHOWN`` at the peak; empty if it is unknown."""
    if fit.prediction.peak is None:
        return {}
    live = fit.prediction.peak.categories
    return {head: sum(live.get(name, 0) for name in names) for head, names in SHOWN.items()}


def _cells(fit: Fit, short: bool) -> list[str]:
    split = [gib(by_category(fit).get(head)) for head in SHOWN]
    time_cell, speed = "-", "-"
    if fit.seconds:
        time_cell = fit.seconds.words
        speed = rate(fit)
    eager = " (as eager)" if note_of(fit.resolved) else ""
    need = near(fit.need_bytes, fit.spread_bytes)
    word = BEFORE if short and fit.fits else WORD[fit.verdict]
    cells = [f"{fit.label}{eager}", word, need, gib(fit.margin_bytes)]
    return [*cells, *split, gib(fit.host_bytes), time_cell, speed]


def notes(fits: Sequence[Fit]) -> list[str]:
    """Return the meaning and the basis of the numbers, and what is not included."""
    notes = [
        ON_CPU if fits[0].gpu.shared else ON_GPU,
        "Columns between Free and Host: live tensors at the peak of a step. "
        f"{rates.words(fits[0].gpu)}",
    ]
    notes += [*uncertain(fits), *host(fits[0]), *_beside(fits[0])]
    single = [f for f in fits if f.resolved.spec.processes == 1]
    if single and len(single) < len(fits):
        notes.append("Recipes of one process train the whole global batch on one GPU.")
    notes += [verdict.assumed(fits[0].gpu)]
    notes += [*_ranges(fits), *_large(fits), *_failing(fits)]
    return [*notes, *_host_bound(fits), *_of_each(fits)]


def short_notes(fits: Sequence[Fit]) -> list[str]:
    """Return the notes without which the table misleads; ``notes`` has all."""
    share, card = max(fit.uncertainty.share for fit in fits), fits[0].gpu
    reach = f"Ranges of memory are +-{100 * share:.0f} %, the worst of public rows."
    last = " ".join([*host(fits[0]), *_beside(fits[0])])
    found = [ON_CPU if card.shared else ON_GPU, f"{reach} {rates.words(card)}", last]
    return [*filter(None, found), *_large(fits), *_compiled(fits), *_failing(fits)]


def unpredicted(fits: Sequence[Fit]) -> list[str]:
    """Return a line for each reason why rows cannot run on the card or were not predicted."""
    failed = [fit for fit in fits if not fit.lack and fit.prediction.method != "trace"]
    lines = (f"Not predicted: {fit.label}: {fit.prediction.reason}" for fit in failed)
    return [*verdict.lacking(fits), *lines]


def _ranges(fits: Sequence[Fit]) -> list[str]:
    """Return the meaning of the range of a step's time, if no measurement of the card made it."""
    if fits[0].gpu.shared or fits[0].gpu.calibrated or not any(fit.seconds for fit in fits):
        return []
    return [
        "Step: in brackets at least, and usually at most. Nine of ten trainers and authors that a "
        "range was not made from lay in it."
    ]


def _large(fits: Sequence[Fit]) -> list[str]:
    """Return what the time of a large job rests on."""
    spec, card = fits[0].resolved.spec, fits[0].gpu
    if spec.processes <= LARGE or card.shared or not any(fit.seconds for fit in fits):
        return []
    ring = 1e3 * latency(rates.rates(card, spec.processes), spec.processes)
    return [
        f"Beyond {LARGE} GPUs no measured step was compared with a plan. The time rests on"
        f"{_nodes(spec, card)}, on overlap as the launch file says, and on {ring:.2g} ms that a "
        "collective of all ranks takes however little it sends (NCCL's model of a ring). "
        "--network DIR takes your own measurement."
    ]


def _compiled(fits: Sequence[Fit]) -> list[str]:
    """Return what the figures of compiled rows are; ``_of_each`` has it of each row."""
    told: dict[str, list[str]] = {}
    for fit in fits:
        if note := note_of(fit.resolved):
            told.setdefault(note, []).append(fit.label)
    return [f"{', '.join(labels)}: {note}." for note, labels in told.items()]


def _failing(fits: Sequence[Fit]) -> list[str]:
    """Warn of the attention kernel in which Flux failed (docs/limits.md)."""
    flux = [fit for fit in fits if fit.resolved.spec.model.startswith("flux-")]
    if not any("cudnn" in fit.prediction.attention for fit in flux):
        return []
    return [
        "Flux failed in cuDNN's attention, which torch takes by default on such a card (seen on an "
        "H100 and an H200 with torch 2.11). With attend:kernel=flash it trained."
    ]


def _host_bound(fits: Sequence[Fit]) -> list[str]:
    """Name the rows whose step time the host sets, and the least time that it sets."""
    bound = [fit for fit in fits if fit.seconds and fit.seconds.overhead]
    if not bound:
        return []
    some = "every row" if len(bound) == len(fits) else ", ".join(fit.label for fit in bound)
    least = min(bound, key=lambda fit: fit.seconds.total)
    work, gpu = least.prediction.work, least.gpu
    return [
        f"The host, and not the card, limits the step time of {some}: Python issues "
        f"{issued(work):,} or more operations a step, each in {issue_seconds(gpu) * 1e6:.0f} "
        "microseconds; twice that if backward recomputes it. This floor is "
        f"{least.seconds.total:.2f} s on any card. A larger batch costs no time until the card "
        "becomes the limit."
    ]


def uncertain(fits: Sequence[Fit]) -> Iterator[str]:
    """Yield the basis of each memory range: the measurements of a class, or of all classes."""
    known = {fit.uncertainty for fit in fits if fit.need_bytes is not None}
    order = list(uncertainty.CLASSES)
    for one in sorted(known, key=lambda one: (one.pooled, order.index(one.kind))):
        words, share = uncertainty.CLASSES[one.kind], f"+-{100 * one.share:.0f} %"
        rows = f"{one.rows} public measurements of {one.sources} sources"
        if not one.pooled:
            why = f"from {rows}; nine of ten other sources are expected within it"
        elif one.rows:
            why = f"{rows} are too few, so the range is from all classes"
        else:
            why = uncertainty.UNMEASURED.get(one.kind, "no public measurement is of this class")
            why += ", so the range is from all classes"
        yield f"Memory {share} ({words}): {why}."


def host(fit: Fit) -> list[str]:
    """Return the host memory that verdicts use, and its source."""
    card, processes = fit.gpu, fit.resolved.spec.processes
    if card.shared:
        return []
    size = f"{gib(card.host_bytes(max(processes, 1)))} GiB"
    if card.host_told:
        return [f"Host memory of a machine: {size}, {card.host_told}."]
    share = card.host_share // 2**30
    return [
        f"Host memory: {share} GiB assumed for each GPU. Give a machine's with --host-memory SIZE."
    ]


def _of_each(fits: Sequence[Fit]) -> Iterator[str]:
    """Yield notes on single recipes; a note that several share appears once."""
    told: dict[str, list[str]] = {}
    for fit in fits:
        yield from (f"{fit.label}: {text}" for text in phases(fit))
        for note in fit.prediction.notes:
            told.setdefault(note, []).append(fit.label)
    yield from (f"{', '.join(labels)}: {note}" for note, labels in told.items())


def _beside(fit: Fit) -> list[str]:
    """Return the other models on each GPU, counted, or a public model's own, not counted."""
    if fit.gpu.beside_told:
        return [fit.gpu.beside_told]
    own = resident_models.of(resident_models.usual_of(fit.resolved.spec.model), "")
    if not own:
        return []
    names, total = ", ".join(one.name for one in own), sum(one.bytes for one in own)
    uncounted = "Not counted" + " in the step" * bool(fit.resolved.spec.phases)
    return [
        f"{uncounted}: {names}, {gib(total)} GiB in 16 bits if they stay on the GPU. "
        "--also usual counts them."
    ]


# ---- explained peaks ----
# ``plan --explain`` shows each row's peak: its instant, op and line, and the live tensors.


FINE = GIB // 200
"""Bytes below which a phase is not shown: they round to 0.00 GiB."""


def print_explained(fits: Sequence[Fit], console: Console) -> None:
    """Print each row's peak: its instant, op and line, and the live tensors."""
    for fit in sorted(fits, key=order):
        console.print()
        for line in [*explained(fit.label, fit.prediction), *_step_explained(fit)]:
            console.print(escape(line), highlight=False, soft_wrap=True)


def explained(label: str, prediction: Prediction) -> list[str]:
    """Return one prediction's peak: its place, the largest tensors, and each phase's peak."""
    instant = prediction.peak
    if instant is None:
        return [f"{label}: {prediction.reason}"]
    lines = [f"{label}: {fine(instant.bytes)} GiB of tensors, {where(instant)}"]
    shown = [alike for alike in instant.held if 100 * alike.bytes >= instant.bytes]
    for alike in shown:
        maker = ", ".join(filter(None, (alike.op, alike.site)))
        kind = alike.category.replace("_", " ")
        lines.append(f"  {fine(alike.bytes):>7}  {kind}: {alike.count} x {maker} ({alike.phase})")
    rest = instant.bytes - sum(alike.bytes for alike in shown)
    if 100 * rest >= instant.bytes:
        lines.append(f"  {fine(rest):>7}  the rest")
    phases = ", ".join(
        f"{phase} {fine(size)}" for phase, size in prediction.phases.items() if size >= FINE
    )
    return [*lines, f"  highest of each phase: {phases} GiB"]


def _step_explained(fit: Fit) -> list[str]:
    if not fit.seconds:
        return []
    names = ("compute", "communication", "offload", "overhead")
    parts = ((name, getattr(fit.seconds, name)) for name in names)
    shown = [f"{name} {1e3 * seconds:.0f} ms" for name, seconds in parts if seconds >= 5e-4]
    lines = [f"  a step: {', '.join(shown)}"]
    found = sent_words(fit, 1, 2)
    return lines + ([f"  a GPU sends in it {found}"] if found else [])


def fine(size: int) -> str:
    """Return bytes as GiB to a hundredth, because parts of a peak are small."""
    return f"{size / GIB:.2f}"
