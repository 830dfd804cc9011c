"""A plan in a terminal: its table, its notes and answer, and the details of ``plan --explain``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from harness import RUN
from harness.planner import resident_models, uncertainty, verdict
from harness.planner.eager import note_of
from harness.planner.edits import adapts
from harness.planner.explore import RULE, reason
from harness.planner.export import trainers
from harness.planner.plan.answer import answered, gib, in_row, kind_of_sample, phases, rate
from harness.planner.speed import rates
from harness.planner.speed.roofline import issue_seconds, issued
from harness.planner.verdict import Fit
from harness.report.data.grid import Column, tabulate
from harness.report.figures.units import GIB
from harness.report.rendering.table import print_grid
from harness.spec import Spec
from harness.system.cards import Card

if TYPE_CHECKING:
    from rich.console import Console

    from harness.planner.explore import Search
    from harness.planner.plan.candidates import Asked


SHOWN = {
    "params": ("parameters", "gathered"),
    "grads": ("gradients", "buckets"),
    "optim": ("optimizer_state",),
    "ema": ("ema",),
    "activ": ("activations", "recomputed", "autocast"),
    "other": ("temporaries",),
}
ON_GPU = (
    "Memory in GiB of one GPU; Host: of a node. Needs: the allocator's reserve, library "
    "workspaces, CUDA context and NCCL. fits: the upper ends of Needs and Host fit too. "
    "tight, host tight: the memory of the GPU, or of the host, lies within the range."
)
ON_CPU = (
    "Memory in GiB. Needs: tensors, interpreters and libraries of all processes, which share "
    "the host's memory."
)
RANGE = (
    "Step: in brackets at least, and usually at most. Nine of ten trainers and authors that a "
    "range was not made from lay in it."
)
IN_CUDNN = (
    "Flux failed in cuDNN's attention, which torch takes by default on such a card (seen on an "
    "H100 and an H200 with torch 2.11). With attend:kernel=flash it trained."
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
SOME = 1
"""Trainers that a row names."""
STAYS = ("", "Needs", "Host", "GPUs", *SPEED.values(), WHY_NOT)
"""Heads of columns that are never hidden: they decide the verdict."""
LOOKS = {"": {"fits": "green", "tight": "yellow", "host tight": "yellow", "step fits": "yellow",
              "host short": "red", "no": "red",
              "not predicted": "dim", "cannot run": "dim"}}  # fmt: skip
"""Styles of the verdicts in the column without a head."""


def print_plan(
    fits: Sequence[Fit],
    proofs: Sequence[Search],
    asked: Asked,
    tried: Sequence[Fit] | None,
    console: Console,
    *,
    whole: bool,
) -> None:
    """Print the answer, the table with the fastest first, rows that cannot run, and notes.
    ``proofs``: of searches, whose predictions are ``fits``. ``whole``: all notes."""
    before = asked.before
    print_lines([setting(fits), *(before.lines if before else ())], console)
    print_lines(answered(fits, proofs, tried), console)
    best = [proof.best for proof in proofs] if proofs else [verdict.fastest(fits)]
    best = [fit for fit in best if fit]
    shown, left = shortened(fits, proofs) if proofs else (fits, [])
    short = before is not None and not before.fits

    def why_not(fit: Fit) -> str:
        """Return why a faster or smaller row is not the answer of its training."""
        alike = (one for one in best if adapts(one.resolved) == adapts(fit.resolved))
        return next((reason(fit, one) for one in alike), "")

    own = columns(["Recipe", "", "Needs", "Free", *SHOWN, "Host", "Step ms", SPEED], fits[0], short)
    if proofs:
        own += [Column(WHY_NOT, why_not), Column("Trainers", _trainers)]
    shown = sorted(shown, key=order)
    marks = [("reference",) if any(fit is one for one in best) else () for fit in shown]
    print_rows(own, shown, console, marks)
    print_lines(left, console)
    for name, cause in asked.refused:
        console.print(f"[yellow]refused[/yellow] {escape(name)}: {escape(cause)}")
    for text in unpredicted(fits):
        console.print(escape(text), highlight=False)
    print_notes(fits, console, whole, [RULE if whole else RULE_IN_SHORT] if proofs else [])


def print_notes(
    fits: Sequence[Fit], console: Console, whole: bool, first: Sequence[str] = ()
) -> None:
    """Print notes after the ``first``: all, or the three that matter most."""
    for text in [*first, *short_notes(fits), *(more_notes(fits) if whole else [MORE_NOTES])]:
        console.print(escape(text), style="dim", highlight=False)


MOST = 10
"""Most rows of the table of a search."""


def shortened(fits: Sequence[Fit], proofs: Sequence[Search]) -> tuple[list[Fit], list[str]]:
    """Return the rows of a search that its table shows, and a line on the others of each kind.
    Rows that fit are shown, the answers first; if there are none, the nearest ones are."""
    heads = [fit for proof in proofs for fit in (proof.best, *proof.others.values(), proof.nearest)]
    first = {id(fit): fit for fit in heads if fit}
    rest = sorted((fit for fit in fits if fit.may_fit and id(fit) not in first), key=order)
    shown = [*first.values(), *rest[: max(0, MOST - len(first))]]
    left = [fit for fit in fits if not any(fit is one for one in shown)]
    more = sum(fit.may_fit for fit in left)
    none = sum(fit.verdict in ("no", "host") for fit in left)
    lines = [f"{more} more rows fit, or may: --json FILE has them."] if more else []
    return shown, [*lines, *([f"{none} more recipes do not fit."] if none else [])]


def columns(heads: Sequence[Any], first: Fit, short: bool = False) -> list[Column]:
    """Return the columns ``heads`` of a table of fits; ``SPEED`` stands for that of ``first``.
    ``short``: what comes before the step does not fit."""
    word, split = {"fits": BEFORE} if short else {}, by_category
    speed = SPEED[kind_of_sample(first)]
    known = [
        Column("Recipe", lambda fit: fit.label + " (as eager)" * bool(note_of(fit.resolved))),
        Column("", lambda fit: word.get(fit.verdict, in_row(fit)), "flag"),
        Column("Needs", _needs, "number"),
        Column("Free", lambda fit: gib(fit.margin_bytes), "number"),
        *(Column(head, lambda fit, head=head: gib(split(fit).get(head)), "number")
          for head in SHOWN),
        Column("Host", lambda fit: gib(fit.host_bytes), "number"),
        Column("Step ms", lambda fit: fit.seconds.words if fit.seconds else "-", "number"),
        Column(speed, lambda fit: rate(fit) if fit.seconds else "-", "number"),
    ]  # fmt: skip
    found = {column.head: column for column in known}
    return [found[speed if head is SPEED else head] for head in heads]


def _needs(fit: Fit) -> str:
    known = fit.need_bytes is not None
    return f"{gib(fit.need_bytes)} \u00b1{gib(fit.spread_bytes)}" if known else "-"


def of_fit(own: Sequence[Column]) -> list[Column]:
    """Return columns of fits as columns of rows that have a ``fit``."""
    return [replace(one, take=lambda row, take=one.take: take(row.fit)) for one in own]


def print_rows(
    own: Sequence[Column],
    rows: Sequence[Any],
    console: Console,
    marks: Sequence[tuple[str, ...]] | None = None,
) -> None:
    """Print a table of the plan: a line for each row, the verdicts coloured."""
    grid = tabulate("plan", "", own, rows, marks=marks)
    print_grid(grid, console, least_worth=LEAST_WORTH, stays=STAYS, styles=LOOKS)


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
    A recipe that is longer than a line is broken after a plus sign."""
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


def more_notes(fits: Sequence[Fit]) -> list[str]:
    """Return the notes that ``--notes`` adds: the basis of the numbers, and what they leave out."""
    card, alone = fits[0].gpu, {fit.resolved.spec.processes == 1 for fit in fits}
    told = ((fit.label, text) for fit in fits for text in (*phases(fit), *fit.prediction.notes)
            if text != note_of(fit.resolved))  # fmt: skip
    found = [
        "Columns between Free and Host: live tensors at the peak of a step.",
        *uncertain(fits),
        "Recipes of one process train the whole global batch on one GPU." * (len(alone) > 1),
        verdict.assumed(card),
        RANGE * (any(fit.seconds for fit in fits) and not (card.shared or card.calibrated)),
        _host_bound(fits),
        *_of_each(told),
    ]
    return [*filter(None, found)]


def short_notes(fits: Sequence[Fit]) -> list[str]:
    """Return the notes without which the table misleads."""
    share, card = max(fit.uncertainty.share for fit in fits), fits[0].gpu
    reach = f"Ranges of memory are +-{100 * share:.0f} %, the worst of public rows."
    eager = ((fit.label, f"{note}.") for fit in fits if (note := note_of(fit.resolved)))
    found = [
        ON_CPU if card.shared else ON_GPU,
        f"{reach} {rates.words(card)}",
        " ".join(filter(None, [host(fits[0]), _beside(fits[0])])),
        _large(fits),
        *_of_each(eager),
        _failing(fits),
    ]
    return [*filter(None, found)]


def _of_each(told: Iterable[tuple[str, str]]) -> list[str]:
    """Return notes on single recipes, each a (label, text); one that several share appears once."""
    labels: dict[str, list[str]] = {}
    for label, text in told:
        labels.setdefault(text, []).append(label)
    return [f"{', '.join(names)}: {text}" for text, names in labels.items()]


def unpredicted(fits: Sequence[Fit]) -> list[str]:
    """Return a line for each reason why rows cannot run on the card or were not predicted."""
    lacking = [f"Cannot run: {one}" for one in _of_each((f.label, f.lack) for f in fits if f.lack)]
    failed = [fit for fit in fits if not fit.lack and fit.prediction.method != "trace"]
    return lacking + [f"Not predicted: {fit.label}: {fit.prediction.reason}" for fit in failed]


def _large(fits: Sequence[Fit]) -> str:
    """Return what the time of a large job rests on."""
    spec, card = fits[0].resolved.spec, fits[0].gpu
    if spec.processes <= LARGE or card.shared or not any(fit.seconds for fit in fits):
        return ""
    return (
        f"Beyond {LARGE} GPUs no measured step was compared with a plan. The time rests on"
        f"{_nodes(spec, card)}; --network GB/s takes your own."
    )


def _failing(fits: Sequence[Fit]) -> str:
    """Warn of the attention kernel in which Flux failed (docs/limits.md)."""
    flux = [fit for fit in fits if fit.resolved.spec.model.startswith("flux-")]
    return IN_CUDNN * any("cudnn" in fit.prediction.attention for fit in flux)


def _host_bound(fits: Sequence[Fit]) -> str:
    """Name the rows whose step time the host sets, and the least time that it sets."""
    bound = [fit for fit in fits if fit.seconds and fit.seconds.overhead]
    if not bound:
        return ""
    some = "every row" if len(bound) == len(fits) else ", ".join(fit.label for fit in bound)
    least = min(bound, key=lambda fit: fit.seconds.total)
    return (
        f"The host limits the step time of {some}: Python issues {issued(least.prediction.work):,} "
        f"or more operations a step, each in {issue_seconds(least.gpu) * 1e6:.0f} microseconds, "
        "twice that if backward recomputes it. A larger batch costs no time until the card limits."
    )


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


def host(fit: Fit) -> str:
    """Return the host memory that verdicts use, and its source."""
    card, share = fit.gpu, fit.gpu.host_share // 2**30
    if card.shared:
        return ""
    if card.host_told:
        size = gib(card.host_bytes(max(fit.resolved.spec.processes, 1)))
        return f"Host memory of a machine: {size} GiB, {card.host_told}."
    return (
        f"Host memory: {share} GiB assumed for each GPU. Give a machine's with --host-memory SIZE."
    )


def _beside(fit: Fit) -> str:
    """Return the other models on each GPU, counted, or a public model's own, not counted."""
    own = resident_models.of(resident_models.usual_of(fit.resolved.spec.model), "")
    if fit.gpu.beside_told or not own:
        return fit.gpu.beside_told
    names, total = ", ".join(one.name for one in own), sum(one.bytes for one in own)
    uncounted = "Not counted" + " in the step" * bool(fit.resolved.spec.phases)
    return (
        f"{uncounted}: {names}, {gib(total)} GiB in 16 bits if they stay on the GPU. "
        "--also usual counts them."
    )


FINE = GIB // 200
"""Bytes below which a phase is not shown: they round to 0.00 GiB."""


def print_explained(fits: Sequence[Fit], console: Console) -> None:
    """Print each row's peak: its instant, op and line, and the live tensors."""
    for fit in sorted(fits, key=order):
        console.print()
        for line in explained(fit):
            console.print(escape(line), highlight=False, soft_wrap=True)


def explained(fit: Fit) -> list[str]:
    """Return a row's peak, its place, largest tensors and phases, and the parts of a step's time
    with what a GPU sends in it."""
    label, prediction, instant = fit.label, fit.prediction, fit.prediction.peak
    if instant is None:
        return [f"{label}: {prediction.reason}"]
    place = ", ".join(filter(None, (instant.op, instant.site)))
    lines = [f"{label}: {fine(instant.bytes)} GiB of tensors, in {instant.phase} at {place}"]
    shown = [alike for alike in instant.held if 100 * alike.bytes >= instant.bytes]
    for alike in shown:
        maker = ", ".join(filter(None, (alike.op, alike.site)))
        kind = alike.category.replace("_", " ")
        lines.append(f"  {fine(alike.bytes):>7}  {kind}: {alike.count} x {maker} ({alike.phase})")
    rest = instant.bytes - sum(alike.bytes for alike in shown)
    if 100 * rest >= instant.bytes:
        lines.append(f"  {fine(rest):>7}  the rest")
    sizes = {phase: size for phase, size in prediction.phases.items() if size >= FINE}
    told = ", ".join(f"{phase} {fine(size)}" for phase, size in sizes.items())
    lines.append(f"  highest of each phase: {told} GiB")
    if not fit.seconds:
        return lines
    names = ("compute", "communication", "offload", "overhead")
    parts = ((name, getattr(fit.seconds, name)) for name in names)
    shown = [f"{name} {1e3 * seconds:.0f} ms" for name, seconds in parts if seconds >= 5e-4]
    place = "NVLink domain" if fit.gpu.domain else "node"
    tried = {f"within its {place}": fit.sent.within, f"to other {place}s": fit.sent.across}
    told = " and ".join(f"{fine(size)} GiB {way}" for way, size in tried.items() if size)
    lines.append(f"  a step: {', '.join(shown)}")
    return [*lines, *([f"  a GPU sends in it {told}"] if told else [])]


def fine(size: int) -> str:
    """Return bytes as GiB to a hundredth, because parts of a peak are small."""
    return f"{size / GIB:.2f}"
