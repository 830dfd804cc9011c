"""Verdict on a prediction for one card: whether it runs and fits, and how fast.
Pure functions; does not import torch. Plans and reports (``harness.report.figures.predicted``) both
use ``decide`` to compare a range of bytes with the available memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.phases import planned
from harness.planner import uncertainty as residuals
from harness.planner.eager import note_of
from harness.planner.overhead import WORDS, fixed_overhead, preferred
from harness.planner.phase_needs import STEP, Need, needs
from harness.planner.speed.roofline import Seconds, Sent, seconds, sent
from harness.prediction import Prediction
from harness.resolve import Resolved
from harness.system.cards import Card, alike
from harness.system.requirements import card_lacks

VERDICTS = ("fits", "tight", "host", "no", "unknown", "cannot")
"""Values of ``Fit.verdict``, the best first."""
ERRS = {"more": "the trainer needs more, for ", "less": "the trainer needs less, for ",
        "none": "without effect: ", "": "not compared; "}  # fmt: skip
"""Direction in which a prediction errs -> words."""
USERS = re.compile(r"@[^+]*?([^/+]+?)(?:/launch\.yaml|\.ya?ml|\.json)(?=[+:]|$)")
"""Path of a user's launch file in a recipe; the group is its name, or its copy's folder."""
UNSURE = {"fits": {"more", ""}, "no": {"less", ""}, "host": {"less", ""}}
"""Verdict -> directions of ``Uncounted.errs`` that leave it open."""


@dataclass(frozen=True)
class Uncounted:
    """A setting ``what`` that a prediction leaves out, and why; ``errs`` is a key of ``ERRS``."""

    what: str
    why: str
    errs: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {ERRS[self.errs]}{self.why}"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A prediction judged against one card.

    ``need_bytes``: of a GPU. ``least_bytes``: the smallest amount that suffices. ``host_bytes``: of
    one node, which has ``host_memory``. ``phases`` has the needs of each counted phase; the fields
    above are their maxima, and ``binds`` is the phase that needs the most of the GPU.
    ``uncertainty`` is relative to these needs, without the models that stay beside the training,
    whose sizes are known.

    ``verdict`` is one of:

    - fits: the upper end of the range fits.
    - tight: the available memory lies within the range, or the allocator must often return cached
      memory to the device, which is slow, or what is ``uncounted`` decides.
    - host: the GPU's memory may suffice, but the host's does not.
    - no: the need exceeds the available memory.
    - unknown: nothing was predicted.
    - cannot: the card cannot run it at all; ``lack`` says why.
    """

    resolved: Resolved
    prediction: Prediction
    gpu: Card
    verdict: str
    need_bytes: int | None
    least_bytes: int | None
    host_bytes: int | None
    seconds: Seconds | None
    uncertainty: residuals.Share
    host_memory: int
    phases: Mapping[str, Need] = field(default_factory=dict)
    lack: str = ""
    uncounted: tuple[Uncounted, ...] = ()

    @property
    def label(self) -> str:
        """Recipe, with a user's launch file by its name alone."""
        return USERS.sub(r"@\1", str(self.resolved.recipe))

    @property
    def binds(self) -> str:
        """Phase that needs the most memory of a GPU."""
        return max(self.phases, key=lambda name: self.phases[name].gpu, default=STEP)

    @property
    def fits(self) -> bool:
        """True if the upper ends of the ranges fit."""
        return self.verdict == "fits"

    @property
    def may_fit(self) -> bool:
        """True if it fits, or the available memory lies within a range."""
        return self.verdict in ("fits", "tight")

    @property
    def tight_in(self) -> str:
        """Memory that lies within its range: GPU, host, or GPU and host; empty if none does."""
        both = _decided(self) if self.verdict == "tight" else ("", "")
        places = zip(("host" if self.gpu.shared else "GPU", "host"), both, strict=True)
        return " and ".join(at for at, word in places if word == "tight")

    @property
    def margin_bytes(self) -> int | None:
        """Bytes of the card that remain beyond the need; negative if it does not fit."""
        return None if self.need_bytes is None else self.gpu.memory_bytes - self.need_bytes

    @property
    def spread_bytes(self) -> int | None:
        """Uncertainty of ``need_bytes``, plus or minus."""
        if self.need_bytes is None:
            return None
        copies = self.resolved.spec.processes if self.gpu.shared else 1
        return int(self.uncertainty.share * (self.need_bytes - copies * self.gpu.beside))

    @property
    def low_bytes(self) -> int | None:
        """Lower end of the need; of a compiled row, that of what stays between two steps."""
        if self.need_bytes is None:
            return None
        low, found = self.need_bytes - self.spread_bytes, self.prediction
        if not note_of(self.resolved) or found.between is None or found.reserved is None:
            return low
        return min(low, max(0, self.need_bytes - found.reserved + found.between))

    @property
    def most_bytes(self) -> int | None:
        """Upper end of the need."""
        return None if self.need_bytes is None else self.need_bytes + self.spread_bytes

    @property
    def host_most(self) -> int | None:
        """Upper end of the host's need."""
        return self.host_bytes and int((1 + self.uncertainty.share) * self.host_bytes)

    @property
    def shortage(self) -> float:
        """Upper end of the need over what there is, of the GPU or the host; the larger."""
        of_host = (self.host_most or 0) / self.host_memory
        return max(self.most_bytes / self.gpu.memory_bytes, of_host)

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second of the whole job."""
        return self.resolved.spec.global_batch / self.seconds.total if self.seconds else None

    @property
    def sent(self) -> Sent:
        """Bytes that a GPU sends in a step."""
        return sent(self.prediction.work, self.resolved.spec.processes, self.gpu.linked)


def judge(resolved: Resolved, prediction: Prediction, gpu: Card) -> Fit:
    """Return the verdict on a prediction for a card."""
    phases = _needs(resolved, prediction, gpu)
    if gpu.unified:  # one memory: what the host holds is missing on the device
        for name, one in phases.items():
            gpu_too, least = one.gpu + (one.host or 0), one.least + (one.host or 0)
            phases[name] = one._replace(gpu=gpu_too, least=least, host=None)
    kind = residuals.class_of(resolved.launch.traits, prediction)
    hosts = [one.host for one in phases.values() if one.host is not None]
    fit = Fit(
        resolved=resolved,
        prediction=prediction,
        gpu=gpu,
        verdict="unknown",
        need_bytes=max((one.gpu for one in phases.values()), default=None),
        least_bytes=max((one.least for one in phases.values()), default=None),
        host_bytes=max(hosts, default=None),
        seconds=_seconds(resolved, prediction, gpu),
        uncertainty=residuals.shares()[kind],
        host_memory=gpu.host_bytes(resolved.spec.processes),
        phases=phases,
    )
    if fit.need_bytes is None:
        return fit
    if fit.binds != STEP:
        fit = dataclasses.replace(fit, uncertainty=residuals.shares()["beside the step"])
    on_gpu, on_host = _decided(fit)
    worst = "host" if on_host == "no" else max(on_gpu, on_host, key=VERDICTS.index)
    # The host counts only if the GPU may suffice.
    return dataclasses.replace(fit, verdict=on_gpu if on_gpu == "no" else worst)


def _decided(fit: Fit) -> tuple[str, str]:
    """Return fits, tight or no for the GPU's memory and for the host's."""
    low = min(fit.low_bytes, fit.least_bytes)
    on_gpu = decide(low, fit.most_bytes, fit.gpu.memory_bytes)
    if not fit.host_bytes or fit.gpu.shared:
        return on_gpu, "fits"
    low_host = 2 * fit.host_bytes - fit.host_most
    return on_gpu, decide(low_host, fit.host_most, fit.host_memory)


def with_uncounted(fit: Fit, uncounted: Sequence[Uncounted]) -> Fit:
    """Return a fit with what its prediction leaves out, which may leave the verdict open."""
    open_ = any(one.errs in UNSURE.get(fit.verdict, ()) for one in uncounted)
    verdict = "tight" if open_ else fit.verdict
    return dataclasses.replace(fit, verdict=verdict, uncounted=tuple(uncounted))


def decide(low: int, most: int, have: int) -> str:
    """Return fits, tight or no, for a need from ``low`` to ``most`` of ``have`` bytes."""
    return "fits" if most <= have else "tight" if low <= have else "no"


def lack_of(resolved: Resolved, gpu: Card) -> str:
    """Return what the recipe needs and ``gpu`` is too old for, with a hint; empty if nothing."""
    lack = card_lacks(resolved.needs, gpu.name, gpu.capability)
    return f"{lack.text} -> {lack.hint}" if lack else ""


def cannot(resolved: Resolved, gpu: Card, lack: str) -> Fit:
    """Return the fit of a recipe that the card cannot run; nothing is predicted."""
    device = resolved.spec.device
    nothing = Prediction(recipe=str(resolved.recipe), device=device, method="none", reason=lack)
    return dataclasses.replace(judge(resolved, nothing, gpu), verdict="cannot", lack=lack)


def assumed(gpu: Card) -> str:
    """Return the plan's assumptions about the card, as sentences.
    They name the attention kernels. A card of unknown capability is assumed to run everything."""
    if gpu.shared:
        return (
            "All processes share the CPU's cores and memory. Attention uses the kernel that "
            "torch takes on this CPU."
        )
    how = WORDS[preferred(gpu.capability)]
    if gpu.capability is not None:
        return f"Attention kernel that torch 2.13 takes on this card: {how}."
    text = (
        "The card's compute capability is unknown, so bf16, tf32, fp8 and flash "
        f"attention were not checked. Assumed attention, as from capability 8.0 on: {how}."
    )
    if not gpu.like:
        return text
    near = alike(gpu.memory_bytes)
    times = near[-1].flops("bfloat16") / near[0].flops("bfloat16")
    names = ", ".join(card.name for card in near)
    return (
        f"{text} No card was named, so times are those of {gpu.like}; cards of this size are up "
        f"to {times:.1f} times as fast. Name yours with --gpu: {names}."
    )


def _needs(resolved: Resolved, prediction: Prediction, gpu: Card) -> dict[str, Need]:
    """Return the needs of each counted phase; empty if nothing was predicted.
    The step needs the allocator's reserve and the fixed overhead. On a CPU it needs the tensors of
    all processes and their interpreters."""
    processes, hosted = resolved.spec.processes, prediction.host
    host = hosted.bytes * min(gpu.node, processes) if hosted else None
    more = fixed_overhead(gpu, processes, resolved.recipe.sharding.alike()).total
    if gpu.shared and prediction.bytes is not None:
        need = processes * (prediction.bytes + fixed_overhead(gpu, 1).total + gpu.beside)
        return {STEP: Need(need, need, host, "")}
    if prediction.reserved is None:
        return {}
    there = more + gpu.beside
    step = Need(prediction.reserved + there, prediction.least + there, host, "set-up and steps")
    return needs(resolved, prediction, gpu, step, more)


def _seconds(resolved: Resolved, prediction: Prediction, gpu: Card) -> Seconds | None:
    """Return the seconds of a step, with the passes of encoders that run in each micro-batch."""
    if not prediction.work:
        return None
    work, ways = list(prediction.work), planned(resolved.spec.phases).get("encode", ())
    if "step" in ways and (aside := prediction.asides.get("encode")):
        if not aside.work:  # kept before passes were counted
            return None
        times = resolved.recipe.accumulation
        work += [dataclasses.replace(one, count=times * one.count) for one in aside.work]
    return seconds(work, gpu, resolved.spec.processes, str(resolved.recipe))


def fastest(fits: Sequence[Fit]) -> Fit | None:
    """Return the fastest row that fits.
    If none fits, return the fastest tight one, and first of those whose need itself fits."""
    timed = [fit for fit in fits if fit.may_fit and fit.samples_per_second]
    able = [fit for fit in timed if fit.fits] or [f for f in timed if f.margin_bytes >= 0] or timed
    return max(able, key=lambda fit: fit.samples_per_second, default=None)


def nearest(fits: Sequence[Fit]) -> Fit | None:
    """Return the row that fits and needs the least of a GPU.
    If none fits, return the one with the smallest shortage, of GPU or host memory."""
    known = [fit for fit in fits if fit.need_bytes is not None]
    return min(known, key=lambda fit: (max(1.0, fit.shortage), fit.need_bytes), default=None)
