"""Why one recipe is faster than others on several nodes: what each computes, waits and sends."""

from __future__ import annotations

from collections.abc import Sequence

from harness.predict import verdict
from harness.predict.speed.roofline import seconds, sent
from harness.predict.verdict import Fit
from harness.report.figures.units import GIB

__all__ = ["why"]


def why(fits: Sequence[Fit]) -> list[str]:
    """A line for each recipe that was predicted, the fastest that fits first, where GPUs of several
    nodes are planned; none otherwise."""
    known = [fit for fit in fits if fit.seconds and fit.prediction.method == "trace"]
    if not known or not any(fit.resolved.spec.processes > fit.gpu.node for fit in known):
        return []
    best = verdict.fastest(fits)
    ordered = sorted(known, key=lambda fit: (fit is not best, not fit.fits, fit.seconds.total))
    return ["Where a step goes, and what a GPU sends in it:", *map(_line, ordered)]


def _line(fit: Fit) -> str:
    step, idle = fit.seconds, idle_seconds(fit)
    parts = [f"{step.compute - idle + step.overhead:.1f} s computes"]
    if idle:
        share = idle / step.total
        parts.append(f"{idle:.1f} s ({100 * share:.0f} %) idle, waits for other stages")
    if step.communication >= 0.05:
        parts.append(f"{step.communication:.1f} s waits for links")
    if step.offload >= 0.05:
        parts.append(f"{step.offload:.1f} s moves to and from the host")
    fate = "" if fit.fits else " (does not fit)"
    return f"  {fit.label}{fate}: {', '.join(parts)}; {_links(fit)}"


def idle_seconds(fit: Fit) -> float:
    """Seconds of a step in which a GPU waits for other stages of its pipeline."""
    work, processes = fit.prediction.work, fit.resolved.spec.processes
    busy = [one for one in work if one.kind != "chain"]
    whole, alone = (seconds(some, fit.gpu, processes).compute for some in (work, busy))
    return fit.seconds.compute * (1 - alone / whole) if whole else 0.0


def _links(fit: Fit) -> str:
    spec = fit.resolved.spec
    found = sent(fit.prediction.work, spec.processes, fit.gpu.node)
    ways = [("within its node", found.within), ("to other nodes", found.across)]
    told = [f"{size / GIB:.1f} GiB {where}" for where, size in ways if size >= GIB / 20]
    return f"sends {' and '.join(told)}" if told else "sends next to nothing"
