"""``plan --check``: a guard in front of a training, one line and an exit code.

0: it is predicted to fit, by the upper end of its range. 1: it is not, what there is lies within
the range, it cannot run on the card, or there is no prediction. 2: bad input.
"""

from __future__ import annotations

from harness.commands.planning.plan.answer import (
    gib,
    lacks,
    largest,
    phases,
    rate_in_words,
    reach,
)
from harness.predict import verdict
from harness.predict.verdict import Fit
from harness.predict.ways_out import Ways

__all__ = ["check_line"]


def check_line(fit: Fit, ways: Ways | None) -> str:
    """Whether it fits, why and by how much, and the nearest that does."""
    if fit.lack:
        return f"cannot run: {fit.label}: {fit.lack}"
    if fit.need_bytes is None:
        return f"not predicted: {fit.label}: {fit.prediction.reason}"
    if fit.fits:
        free = f"{gib(fit.margin_bytes)} GiB free"
        return "; ".join([f"fits: {_size(fit)}, {free}{_host(fit)}", *phases(fit)])
    if fit.may_fit:
        return f"tight: {_size(fit)}, may fit and may not{_host(fit)}{_why(fit)}; {_way(ways)}"
    if fit.verdict == "host":
        return f"does not fit: {_size(fit)}, and {lacks(fit)}; {_way(ways)}"
    short = gib(-fit.margin_bytes)
    return f"does not fit: {_size(fit)}, {short} GiB more than it has{_why(fit)}; {_way(ways)}"


def _size(fit: Fit) -> str:
    spec, card = fit.resolved.spec, fit.gpu
    return (
        f"{spec.model} with {fit.label}, global batch {spec.global_batch}, needs "
        f"{reach(fit)} ({spec.processes} x {card.name})"
    )


def _host(fit: Fit) -> str:
    """The host memory that was judged."""
    if not fit.host_bytes or fit.gpu.shared:
        return ""
    told = fit.gpu.host_told or "assumed"
    return f", {gib(fit.host_bytes)} of {gib(fit.host_memory)} GiB of host memory ({told})"


def _why(fit: Fit) -> str:
    """The largest of what lived at the peak; of several phases, what each needs."""
    instant = fit.prediction.peak
    if told := phases(fit):
        return f" ({told[0]})"
    if instant is None:
        return ""
    parts = [f"{gib(size)} {name}" for name, size in largest(instant, 2)]
    return f" (at its peak in {instant.phase} {', '.join(parts)})"


def _way(ways: Ways | None) -> str:
    """The nearest that fits: on these GPUs, else on more of them, else how far the least is off."""
    able = ways.able if ways else []
    if able:
        return f"fits: {_offer(able[0])}"
    wider = next((fit for fit in ways.wider if fit.fits), None) if ways else None
    if wider:
        spec = wider.resolved.spec
        batch = f"global batch {spec.global_batch}"
        return f"on {spec.processes} GPUs, {batch}, fits: {_offer(wider)}"
    least = verdict.nearest(ways.tried) if ways else None
    if least is None:
        return "nothing else was found"
    return (
        f"nothing that was tried fits, the least is {least.label} with {gib(least.need_bytes)} GiB"
    )


def _offer(fit: Fit) -> str:
    speed = f", {rate_in_words(fit)}" if fit.seconds else ""
    speed += f" (speed assumed: {fit.gpu.like})" if speed and fit.gpu.like else ""
    return f"{fit.label}, {gib(fit.need_bytes)} GiB{speed}"
