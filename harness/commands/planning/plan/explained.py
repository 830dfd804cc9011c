"""``plan --explain``: of each row when its peak was, at which op and line, and what lived then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from harness.commands.planning.plan.answer import where
from harness.commands.planning.plan.held import held_back
from harness.commands.planning.plan.table import order
from harness.predict.prediction import Prediction
from harness.predict.speed.roofline import behind_attention, sent
from harness.predict.verdict import Fit
from harness.report.figures.units import GIB

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["explained", "print_explained", "second_step"]

FINE = GIB // 200
"""Bytes below which a phase is not worth a word where hundredths are shown."""

MORE = 1.02
"""What the second step must hold, of the first, to be worth a word."""


def print_explained(fits: Sequence[Fit], console: Console) -> None:
    """Of each row when its peak was, at which op and line, and what lived then."""
    for fit in sorted(fits, key=order):
        console.print()
        lines = explained(fit.label, fit.prediction)
        for line in [
            *lines,
            *second_step(fit.prediction),
            *_held_explained(fit),
            *_step_explained(fit),
        ]:
            console.print(escape(line), highlight=False, soft_wrap=True)


def explained(label: str, prediction: Prediction) -> list[str]:
    """The peak of one prediction: its place, the largest tensors and the highest of each phase."""
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


def second_step(prediction: Prediction) -> list[str]:
    """What the second step adds to the first, which begins without optimizer state."""
    first, later = prediction.first_step, prediction.steady
    if not first or later is None or later.bytes < MORE * first:
        return []
    return [
        f"  the second step adds {fine(later.bytes - first)} GiB to the first's {fine(first)}: a "
        "peak read after one step is too low"
    ]


def _held_explained(fit: Fit) -> list[str]:
    """What a GPU may hold beside, where an engine gives memory back by the GPU's clock."""
    size = held_back(fit)
    told = f"  up to {fine(size)} GiB more may be held: gathered weights, until the GPU used them"
    return [told] if size >= FINE else []


def _step_explained(fit: Fit) -> list[str]:
    """What a step takes, and what a GPU sends in it."""
    if not fit.seconds:
        return []
    names = ("compute", "communication", "offload", "overhead")
    parts = ((name, getattr(fit.seconds, name)) for name in names)
    shown = [f"{name} {1e3 * seconds:.0f} ms" for name, seconds in parts if seconds >= 5e-4]
    found = sent(fit.prediction.work, fit.resolved.spec.processes, fit.gpu.node)
    ways = [("within its node", found.within), ("to other nodes", found.across)]
    told = [f"{fine(size)} GiB {where}" for where, size in ways if size]
    lines = [f"  a step: {', '.join(shown)}", *_passed_explained(fit)]
    return lines + ([f"  a GPU sends in it {' and '.join(told)}"] if told else [])


def _passed_explained(fit: Fit) -> list[str]:
    """Of what is sent while attention is computed, how much that hides."""
    count = fit.resolved.spec.processes
    taken, hid = behind_attention(fit.prediction.work, fit.gpu, count)
    if not taken:
        return []
    return [f"  sent beside attention: {1e3 * taken:.1f} ms, of which {hid / taken:.0%} hidden"]


def fine(size: int) -> str:
    """Bytes as GiB, to a hundredth: the parts of a peak are smaller than a card."""
    return f"{size / GIB:.2f}"
