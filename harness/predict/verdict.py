"""Can this card run it, does it fit, and how fast would it be? Pure functions. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from harness.predict.attention import WORDS, preferred
from harness.predict.prediction import Prediction
from harness.predict.speed.cards import Card, alike
from harness.predict.speed.roofline import AS_TYPICAL, Seconds, Slower, seconds
from harness.predict.workspace import standing
from harness.resolve import Resolved
from harness.system.requirements import card_lacks

__all__ = ["Fit", "assumed", "at_the_ends", "cannot", "fastest", "judge", "lack_of", "lacking",
           "nearest"]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A prediction against one card. Bytes of a GPU; ``host_bytes`` of one node.

    ``verdict``: fits; tight (fits, but the allocator must give cache back to the device again and
    again, which is slow); no; unknown; cannot (run there at all: ``lack`` says what is missing).
    """

    resolved: Resolved
    prediction: Prediction
    gpu: Card
    verdict: str
    need_bytes: int | None
    least_bytes: int | None
    host_bytes: int | None
    seconds: Seconds | None
    lack: str = ""

    @property
    def label(self) -> str:
        return str(self.resolved.recipe)

    @property
    def fits(self) -> bool:
        """Whether it would train, if need be with an allocator that is short of room."""
        return self.verdict in ("fits", "tight")

    @property
    def margin_bytes(self) -> int | None:
        """What is left of the card; negative where it does not fit."""
        return None if self.need_bytes is None else self.gpu.memory_bytes - self.need_bytes

    @property
    def samples_per_second(self) -> float | None:
        """Of the whole job."""
        return self.resolved.spec.global_batch / self.seconds.total if self.seconds else None


def judge(resolved: Resolved, prediction: Prediction, gpu: Card) -> Fit:
    """Set a prediction against a card."""
    need, least = _needs(resolved, prediction, gpu)
    if need is None:
        verdict = "unknown"
    elif need <= gpu.memory_bytes:
        verdict = "fits"
    else:
        verdict = "tight" if least is not None and least <= gpu.memory_bytes else "no"
    return Fit(
        resolved=resolved,
        prediction=prediction,
        gpu=gpu,
        verdict=verdict,
        need_bytes=need,
        least_bytes=least,
        host_bytes=_host(resolved, prediction, gpu),
        seconds=_seconds(resolved, prediction, gpu),
    )


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


def _needs(resolved: Resolved, prediction: Prediction, gpu: Card) -> tuple[int | None, int | None]:
    """(comfortably, at the least) what a card must have: the allocator's reserve and the rest. On
    a CPU the tensors of all processes, and their interpreters."""
    processes = resolved.spec.processes
    beside = standing(gpu, processes).total + gpu.beside
    if gpu.shared and prediction.bytes is not None:
        need = processes * (prediction.bytes + standing(gpu, 1).total + gpu.beside)
        return need, need
    if prediction.reserved is not None:
        return prediction.reserved + beside, prediction.least + beside
    return None, None


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
    library = resolved.subject.of_library
    return seconds(prediction.work, gpu, resolved.spec.processes, tf32, library, slower)


def fastest(fits: Sequence[Fit]) -> Fit | None:
    """The fastest that fits; a tight one only where nothing fits with room."""
    for verdict in ("fits", "tight"):
        able = [fit for fit in fits if fit.verdict == verdict and fit.samples_per_second]
        if able:
            return max(able, key=lambda fit: fit.samples_per_second)
    return None


def nearest(fits: Sequence[Fit]) -> Fit | None:
    """The one that needs least, whether it fits or not."""
    known = [fit for fit in fits if fit.need_bytes is not None]
    return min(known, key=lambda fit: fit.need_bytes, default=None)
