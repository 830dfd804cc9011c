"""Can this card run it, does it fit, and how fast would it be? Pure functions. No torch.

The one owner of "does it fit": ``decide`` sets a range of bytes against what there is, for plans
and for reports (``harness.report.figures.predicted``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.planner import uncertainty as residuals
from harness.planner.overhead import WORDS, preferred, standing
from harness.planner.phase_needs import STEP, Need, needs
from harness.planner.prediction import Prediction
from harness.planner.speed.cards import Card, alike
from harness.planner.speed.roofline import AS_TYPICAL, Seconds, Slower, seconds
from harness.resolve import Resolved
from harness.system.requirements import card_lacks

VERDICTS = ("fits", "tight", "host", "no", "unknown", "cannot")
"""Words of ``Fit.verdict``, the best first."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A prediction against one card. Bytes of a GPU; ``host_bytes`` of one node, which has
    ``host_memory``. Both needs are plus or minus the ``share`` of ``uncertainty`` (of a GPU without
    the models that stay beside the training, whose sizes are known). ``phases`` has the needs of
    each phase that counts, of which those above are the largest; the GPU's is that of ``binds``.

    ``verdict``: fits (the upper end of the range does); tight (the range ends on both sides of what
    there is, or the allocator must give cache back to the device again and again, which is slow);
    host (the GPU's memory may do, and the host's does not); no; unknown; cannot (run there at all:
    ``lack`` says what is missing).
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

    @property
    def label(self) -> str:
        return str(self.resolved.recipe)

    @property
    def binds(self) -> str:
        """The phase that needs the most of a GPU."""
        return max(self.phases, key=lambda name: self.phases[name].gpu, default=STEP)

    @property
    def fits(self) -> bool:
        """Whether it trains there by the upper ends of its ranges."""
        return self.verdict == "fits"

    @property
    def may_fit(self) -> bool:
        """Whether it may train there: it fits, or what there is lies within its range."""
        return self.verdict in ("fits", "tight")

    @property
    def margin_bytes(self) -> int | None:
        """What is left of the card; negative where it does not fit."""
        return None if self.need_bytes is None else self.gpu.memory_bytes - self.need_bytes

    @property
    def spread_bytes(self) -> int | None:
        """Plus or minus, of ``need_bytes``."""
        if self.need_bytes is None:
            return None
        return int(self.uncertainty.share * (self.need_bytes - self._beside))

    @property
    def most_bytes(self) -> int | None:
        """The upper end of the need."""
        return None if self.need_bytes is None else self.need_bytes + self.spread_bytes

    @property
    def room_bytes(self) -> int | None:
        """What is left of the card at the upper end; negative where it does not fit."""
        return None if self.need_bytes is None else self.gpu.memory_bytes - self.most_bytes

    @property
    def capacity_bytes(self) -> int:
        """The largest need whose upper end fits."""
        free = self.gpu.memory_bytes - self._beside
        return int(free / (1 + self.uncertainty.share)) + self._beside

    @property
    def host_most(self) -> int | None:
        """The upper end of the host's need."""
        return self.host_bytes and int((1 + self.uncertainty.share) * self.host_bytes)

    @property
    def shortage(self) -> float:
        """How many times what there is the upper end of a need takes: the GPU's or the host's."""
        of_host = (self.host_most or 0) / self.host_memory
        return max(self.most_bytes / self.gpu.memory_bytes, of_host)

    @property
    def _beside(self) -> int:
        copies = self.resolved.spec.processes if self.gpu.shared else 1
        return copies * self.gpu.beside

    @property
    def samples_per_second(self) -> float | None:
        """Of the whole job."""
        return self.resolved.spec.global_batch / self.seconds.total if self.seconds else None


def judge(resolved: Resolved, prediction: Prediction, gpu: Card) -> Fit:
    """Set a prediction against a card."""
    phases = _needs(resolved, prediction, gpu)
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
    return dataclasses.replace(fit, verdict=_verdict(fit))


def _verdict(fit: Fit) -> str:
    """The word for a need that is known; a host that is short only counts where the GPU is not."""
    low = min(fit.need_bytes - fit.spread_bytes, fit.least_bytes)
    on_gpu = decide(low, fit.most_bytes, fit.gpu.memory_bytes)
    if on_gpu == "no" or not fit.host_bytes or fit.gpu.shared:
        return on_gpu
    low_host = 2 * fit.host_bytes - fit.host_most
    on_host = decide(low_host, fit.host_most, fit.host_memory)
    return "host" if on_host == "no" else max(on_gpu, on_host, key=VERDICTS.index)


def decide(low: int, most: int, have: int) -> str:
    """fits, tight or no: a need between ``low`` and ``most`` against what there is, in bytes."""
    return "fits" if most <= have else "tight" if low <= have else "no"


def at_the_ends(fit: Fit) -> tuple[float, float] | None:
    """Seconds of a step at two ends of its uncertainty: a quick card with slow links between the
    ranks, which hide least, and a slow card with quick links; None where none were predicted."""
    if fit.seconds is None:
        return None
    card, links = (1 + fit.seconds.shares[part] for part in ("compute", "communication"))
    ends = (Slower(1 / card, links), Slower(card, 1 / links))
    return tuple(_seconds(fit.resolved, fit.prediction, fit.gpu, end).total for end in ends)


def lack_of(resolved: Resolved, gpu: Card) -> str:
    """What a recipe needs of a card and ``gpu`` is too old for, with the way out; or nothing."""
    lack = card_lacks(resolved.needs, gpu.name, gpu.capability)
    return f"{lack.reason} -> {lack.way_out}" if lack else ""


def cannot(resolved: Resolved, gpu: Card, lack: str) -> Fit:
    """A recipe that a card cannot run: nothing is predicted."""
    device = resolved.spec.device
    nothing = Prediction(recipe=str(resolved.recipe), device=device, method="none", reason=lack)
    return dataclasses.replace(judge(resolved, nothing, gpu), verdict="cannot", lack=lack)


def assumed(gpu: Card) -> str:
    """What a plan takes for granted of the card: its kernels of attention; or that it is taken for
    one that can run everything."""
    if gpu.shared:
        return "All processes share the CPU's cores and memory. Attention as torch takes it there."
    how = WORDS[preferred(gpu.capability)]
    if gpu.capability is not None:
        return f"Attention as torch 2.13 takes it on this card: {how}."
    return (
        "The compute capability of the card is not known: whether it can run bf16, tf32, fp8 or "
        f"flash attention was not judged. Attention as from 8.0 on: {how}.{_speed_of(gpu)}"
    )


def _speed_of(gpu: Card) -> str:
    """Whose speed a card has that is known by its memory alone, and how far others' differ."""
    if not gpu.like:
        return ""
    near = alike(gpu.memory_bytes)
    times = near[-1].flops("bfloat16") / near[0].flops("bfloat16")
    names = ", ".join(card.name for card in near)
    return (
        f" No card was named, so times are {gpu.like}'s; cards of this size are up to {times:.1f} "
        f"times as fast. Name yours with --gpu: {names}."
    )


def lacking(fits: Sequence[Fit]) -> list[str]:
    """What the card lacks, each with the recipes that it keeps from running there."""
    labels_of: dict[str, list[str]] = {}
    for fit in fits:
        if fit.lack:
            labels_of.setdefault(fit.lack, []).append(fit.label)
    return [f"Cannot run: {', '.join(labels)}: {lack}" for lack, labels in labels_of.items()]


def _needs(resolved: Resolved, prediction: Prediction, gpu: Card) -> dict[str, Need]:
    """Needs of each phase that counts; of the step the allocator's reserve and the rest, on a CPU
    the tensors of all processes and their interpreters. Empty if nothing was predicted."""
    processes, host = resolved.spec.processes, _host(resolved, prediction, gpu)
    more = standing(gpu, processes).total
    if gpu.shared and prediction.bytes is not None:
        need = processes * (prediction.bytes + standing(gpu, 1).total + gpu.beside)
        return {STEP: Need(need, need, host, "")}
    if prediction.reserved is None:
        return {}
    there = more + gpu.beside
    step = Need(prediction.reserved + there, prediction.least + there, host, "set-up and steps")
    return needs(resolved, prediction, gpu, step, more)


def _host(resolved: Resolved, prediction: Prediction, gpu: Card) -> int | None:
    if prediction.host is None:
        return None
    return prediction.host.bytes * min(gpu.node, resolved.spec.processes)


def _seconds(
    resolved: Resolved, prediction: Prediction, gpu: Card, slower: Slower = AS_TYPICAL
) -> Seconds | None:
    if not prediction.work:
        return None
    tf32 = any(part.name == "tf32" for part in resolved.recipe.strategies)
    return seconds(prediction.work, gpu, resolved.spec.processes, tf32, slower)


def fastest(fits: Sequence[Fit]) -> Fit | None:
    """The fastest that fits; a tight one only where nothing fits, and then first one whose need
    itself is there."""
    timed = [fit for fit in fits if fit.may_fit and fit.samples_per_second]
    able = [fit for fit in timed if fit.fits] or [f for f in timed if f.margin_bytes >= 0] or timed
    return max(able, key=lambda fit: fit.samples_per_second, default=None)


def nearest(fits: Sequence[Fit]) -> Fit | None:
    """Of those that fit the one that needs the least of a GPU; where none does, the one that lacks
    the least, of a GPU or of the host."""
    known = [fit for fit in fits if fit.need_bytes is not None]
    return min(known, key=lambda fit: (max(1.0, fit.shortage), fit.need_bytes), default=None)
