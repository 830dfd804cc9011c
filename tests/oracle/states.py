"""What lives all the time, and what the optimizer adds to it, in bytes. No torch."""

from __future__ import annotations

from strategies.base import Slot
from strategies.step.ema import PIECE
from tests.oracle import gradients
from tests.oracle.layers import stored
from tests.oracle.sizes import Sizes

__all__ = ["standing", "stepping"]


def standing(s: Sizes) -> float:
    """Bytes alive all the time: states, the data that lives on the device, a step's inputs."""
    total = s.resident + 4 * s.latents + 4 * s.drawn + (4 * s.share if s.averaged else 0)
    if s.stage == 0:
        replicas = "replicas" in s.resolved.launch.traits
        weights = s.weight * (s.trained + s.frozen)
        return total + weights + 8 * s.trained + (4 * s.trained if replicas else 0)
    if s.stage == 3:
        # Weights and reduced gradients are shared out alike, and offloaded alike.
        total += gradients.bucket(s)
        total += 0 if s.offloads else s.weight * (2 * s.share + s.frozen // s.ways)
    else:
        total += s.weight * (s.trained + s.frozen)
    total += 0 if s.offloads else 12 * s.share
    return total + (_offloaded(s) if s.offloads else 0)


def _offloaded(s: Sizes) -> float:
    """DeepSpeed's own buffer of an offloaded optimizer on the device: the one through which the
    largest gradient goes."""
    return s.weight * max(layer.weight for layer in s.layers) if s.stage < 3 else 0


def stepping(s: Sizes) -> float:
    """Bytes of the optimizer's fullest instant, beside what stands."""
    impl = getattr(s.resolved.recipe.in_slot(Slot.OPTIMIZE), "impl", "fused")
    at_once = {"foreach": 4, "plain": 8}.get(impl, 0)  # bytes an element of a tensor, or of all
    if s.stage == 0:
        largest = max(x.weight for x in s.layers)
        return s.weight * s.trained + at_once * (largest if impl == "plain" else s.trained)
    piece = _piece(s) if s.stage == 3 else s.share
    if s.offloads:
        # The average on the device takes each master there, in pieces, to follow it.
        return 4 * min(piece, PIECE) if s.averaged else 0
    flat = s.weight * piece + (gradients.own(s) if s.stage < 3 else 0)
    cast = 4 * piece if s.weight == 2 else 0
    return max(flat + cast, (4 + at_once) * piece)


def _piece(s: Sizes) -> int:
    """Elements of the largest sub-group, which stage 3 steps one after the other."""
    largest = piece = 0
    for layer in stored(s.layers):
        for size in (layer.weight, layer.bias):
            piece += -(-size // s.ways)
            largest = max(largest, piece)
            piece = 0 if piece >= s.zero["sub_group_size"] else piece
    return largest
