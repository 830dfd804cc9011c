"""Peak memory by formula: a cross-check of the trace, and what is said where there is none.

What a block keeps for backward was counted from ``harness.model.Block``, tensor by tensor; the
rest are the states of ZeRO's paper (arXiv:1910.02054) and DeepSpeed's buffers. A part of a recipe
that these formulas do not know is ignored, and named. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness import presets
from harness.predict.prediction import Prediction
from harness.resolve import Resolved
from strategies import sharding
from strategies.base import Slot

__all__ = ["fallback", "peak_bytes", "unknown_parts"]

KNOWN = {"fp32", "tf32", "bf16", "checkpoint", "adamw", "accumulate", "ema"}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the formulas are made of, in elements and bytes."""

    trained: int  # elements that take gradients
    frozen: int  # elements of the position table
    tokens: int  # elements of [B, T, D]: the unit of activations
    scores: int  # elements of [B, T, heads]
    depth: int
    block: int  # elements of a block's weights
    weight: int  # bytes of a stored weight
    kept: int  # bytes a block keeps for backward, per element of [B, T, D]
    stream: int  # bytes of an element of the residual stream
    working: int  # bytes of backward's intermediate results, per element of [B, T, D]
    ending: int  # the same while the last segment is recomputed


def _sizes(resolved: Resolved) -> Sizes:
    spec, shape, facts = resolved.spec, resolved.shape, resolved.facts
    tokens = shape.tokens(facts.input_size)
    half = any(part.name == "bf16" for part in resolved.recipe.strategies)
    zero, on_gpu = resolved.launch.zero_stage > 0, spec.device == "cuda"
    # Residual stream in, norm, modulated norm, qkv (3), attention, projection, stream, norm,
    # modulated norm, fc1 (4), gelu (4), fc2: twenty elements. Under autocast the stream and the
    # norms stay float32; CUDA's also turns what addcmul takes into float32.
    autocast = 52 if on_gpu else 48
    kept = 80 if not half else 40 if zero else autocast
    return Sizes(
        trained=resolved.parameters - tokens * shape.hidden_size,
        frozen=tokens * shape.hidden_size,
        tokens=resolved.micro_batch * tokens * shape.hidden_size,
        scores=resolved.micro_batch * tokens * shape.num_heads,
        depth=shape.depth,
        block=_block(resolved),
        weight=2 if half and zero else 4,
        kept=kept,
        stream=2 if half and zero else 4,
        working=14 if half and zero else 26 if not half else 18,
        ending=10 if half and zero else 26 if not half else 13,
    )


def _block(resolved: Resolved) -> int:
    return presets.largest_block_count(resolved.shape)


def peak_bytes(resolved: Resolved) -> int | None:
    """Bytes of the fullest instant of a step on one rank; None for parts it does not know."""
    if unknown_parts(resolved):
        return None
    s = _sizes(resolved)
    return max(_start_of_backward(resolved, s), _end_of_backward(resolved, s), _step(resolved, s))


def unknown_parts(resolved: Resolved) -> list[str]:
    """Parts of the recipe whose effect on memory no formula here holds."""
    known = KNOWN | set(sharding.sharding_kinds())
    return [part.name for part in resolved.recipe.strategies if part.name not in known]


# ---- what lives ----


def _states(resolved: Resolved, s: Sizes) -> float:
    """Weights, optimizer state, average and buckets: alive all the time."""
    launch, ways = resolved.launch, resolved.spec.processes
    on_gpu = resolved.spec.device == "cuda"
    average = resolved.recipe.in_slot(Slot.AVERAGE)
    place = getattr(average, "place", "none")
    host_counts = not on_gpu  # without a GPU, host memory is the device
    total = (s.trained + s.frozen) * s.weight
    if launch.zero_stage == 0:
        total += 8 * s.trained
        total += 4 * s.trained if place == "device" or (place == "cpu" and host_counts) else 0
        return total + (4 * s.trained if launch.engine.startswith("MULTI") else 0)
    share = s.trained / ways
    if launch.zero_stage == 3:
        total = (s.trained + s.frozen) / ways * s.weight
    if launch.offload_optimizer == "none" or host_counts:
        total += 12 * share
    kept = place == "device" or (place == "cpu" and host_counts)
    total += 4 * share if kept else 0
    return total + _bucket(resolved, s)


def _bucket(resolved: Resolved, s: Sizes) -> float:
    largest = max(s.block * 6 // 18, 1)
    sizes = sharding.zero_sizes(s.trained, s.block, largest, 1)
    return sizes["reduce_bucket_size"] * s.weight


def _gradients(resolved: Resolved, s: Sizes) -> float:
    """All of a rank's gradients."""
    stage, ways = resolved.launch.zero_stage, resolved.spec.processes
    if stage in (0, 1):
        return s.trained * s.weight
    if resolved.launch.offload_optimizer != "none" and resolved.spec.device == "cuda":
        return 0.0
    return s.trained * (s.weight if resolved.recipe.accumulation == 1 else 4) / ways


def _segment(resolved: Resolved, s: Sizes) -> int:
    """Blocks that are recomputed together; 0 without recomputation."""
    part = resolved.recipe.in_slot(Slot.RECOMPUTE)
    if part is None:
        return 0
    every = getattr(part, "every", 1)
    return round(math.sqrt(s.depth)) if every == "sqrt" else int(every)


def _copies(resolved: Resolved, s: Sizes, blocks: int) -> float:
    """Autocast's bfloat16 copies of the weights of so many blocks."""
    half = any(part.name == "bf16" for part in resolved.recipe.strategies)
    return 2.0 * s.block * blocks if half and s.weight == 4 else 0.0


def _blocks(s: Sizes, count: int) -> float:
    """What so many blocks keep for backward: their tensors, and attention's log-sum-exp."""
    return count * (s.kept * s.tokens + 4 * s.scores)


def _start_of_backward(resolved: Resolved, s: Sizes) -> float:
    length = _segment(resolved, s)
    total = _states(resolved, s) + s.working * s.tokens
    if resolved.recipe.accumulation > 1:
        total += _gradients(resolved, s)
    if not length:
        return total + _blocks(s, s.depth) + _copies(resolved, s, s.depth)
    inputs = math.ceil(s.depth / length) * s.stream * s.tokens
    last = s.depth - (math.ceil(s.depth / length) - 1) * length
    return total + inputs + _blocks(s, last) + _copies(resolved, s, last)


def _end_of_backward(resolved: Resolved, s: Sizes) -> float:
    length = _segment(resolved, s) or 1
    # The first blocks and the embedders, behind them, have no gradients yet.
    behind = s.trained - s.depth * s.block + length * s.block
    arrived = 1.0 if resolved.recipe.accumulation > 1 else 1 - behind / s.trained
    total = _states(resolved, s) + arrived * _gradients(resolved, s) + s.ending * s.tokens
    return total + s.stream * s.tokens + _blocks(s, length) + _copies(resolved, s, length)


def _step(resolved: Resolved, s: Sizes) -> float:
    """The optimizer: its kernel's intermediate results, if it is not one kernel."""
    part = resolved.recipe.in_slot(Slot.OPTIMIZE)
    whole = getattr(part, "impl", "fused") == "foreach"
    share = s.trained / (resolved.spec.processes if resolved.launch.zero_stage else 1)
    return _states(resolved, s) + _gradients(resolved, s) + (4 * share if whole else 0)


def fallback(resolved: Resolved, reason: str) -> Prediction:
    """A prediction by formula where the trace failed, or none at all; says why."""
    size, lost = peak_bytes(resolved), unknown_parts(resolved)
    notes = [f"no formula for {', '.join(lost)}"] if size is None else []
    return Prediction(
        recipe=str(resolved.recipe),
        device=resolved.spec.device,
        method="none" if size is None else "closed form",
        reason=reason,
        closed_form=size,
        notes=notes,
    )
