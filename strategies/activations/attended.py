"""Which attention ran, read off the operators: of one forward pass, and of a whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies.activations.kernels import KERNELS
from strategies.base import demand
from strategies.engine import Trained

__all__ = ["WRITTEN_OUT", "in_a_step", "layers", "ran_by", "score_matrices"]

FUSED = "aten::_scaled_dot_product_{}_attention"
WRITTEN_OUT = ("naive", "math")


def in_a_step(trained: Trained, kernel: str) -> dict[str, Any]:
    """Calls of the kernel in the forward and backward passes of the watched step."""
    if trained.observed is None or not trained.observed.ran:
        return {}
    micro = trained.observed.micro_steps
    reached = not trained.launch.traits & {"frozen_blocks", "sampling"}
    least = layers(trained) * micro
    found = {}
    for phase, wanted in (("forward", least), ("backward", least * reached)):
        ran = [r for r in trained.observed.ran if r.phase == phase]
        backward = phase == "backward"
        calls = {name: sum(ran_by(name, r.name, backward) for r in ran) for name in KERNELS}
        calls["naive"] = score_matrices(trained, ran) - calls["math"] * (not backward)
        others = {k: n for k, n in calls.items() if n and not _allows(kernel, k, backward)}
        demand(not others, f"in {phase} of a training step ran {others}, not {kernel}")
        mine = calls["naive" if backward and kernel in WRITTEN_OUT else kernel]
        demand(mine >= wanted, f"{kernel} ran {mine} times in {phase}, not {wanted}")
        found[f"calls_in_{phase}"] = mine
    return found


def _allows(asked: str, ran: str, backward: bool) -> bool:
    """Whether a step of kernel ``asked`` may run ``ran``: what is written out has a backward of
    plain products."""
    both = ran in WRITTEN_OUT and asked in WRITTEN_OUT
    return ran == asked or (backward and both)


def layers(trained: Trained) -> int:
    """Attentions of one forward pass."""
    subject = trained.subject
    if "attend" in subject.parts:
        return len(subject.attentions(trained.module))
    return len(subject.survey.attention)


def score_matrices(trained: Trained, ran: Sequence[Any]) -> int:
    """Products that took a matrix [queries, keys] a head: the scores, times v.

    Where a head is as wide as there are keys, q looks alike, and is one more a layer.
    """
    calls = trained.subject.survey.attention
    scores = {(call.queries, call.keys) for call in calls}
    square = sum(o.name == "aten::bmm" and tuple(o.shapes[0][1:]) in scores for o in ran)
    alike = any((call.queries, call.width) in scores for call in calls)
    return square // 2 if alike else square


def ran_by(kernel: str, operation: str, backward: bool = False) -> bool:
    """Whether an operation is the forward of ``kernel``, or, where ``backward``, either of the two:
    a recomputed forward runs there as well."""
    if backward and operation.startswith("aten::_scaled_dot_product"):
        operation = operation.removesuffix("_backward")
    if kernel == "flex":
        return operation.startswith("triton_") and "flex_attention" in operation
    if kernel == "math":  # its softmax is the one that handles fully masked rows
        return operation == "aten::_safe_softmax"
    name = FUSED.format(kernel)
    return operation in (name, f"{name}_for_cpu")
