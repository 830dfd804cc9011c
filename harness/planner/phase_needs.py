"""Memory needs of a training's phases beside its step: loading, encoding, validation.
Pure functions; does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from harness.phases import planned
from harness.planner.resident_models import BYTES, STORED
from harness.prediction import Aside, Prediction
from harness.resolve import Resolved
from harness.system.cards import Card

STEP = "step"


class Need(NamedTuple):
    """Memory that one phase needs, in bytes.
    ``gpu``: of a GPU. ``least``: the smallest amount that suffices. ``host``: of a node's host
    memory, or None if unknown. ``what``: the contents, in words."""

    gpu: int
    least: int
    host: int | None
    what: str


def needs(
    resolved: Resolved, found: Prediction, card: Card, step: Need, more: int
) -> dict[str, Need]:
    """Return the need of each phase in the order of execution, ``step`` included.
    ``more``: bytes of libraries and the CUDA context."""
    if found.between is None or not resolved.spec.phases:
        return {STEP: step}
    needed: dict[str, Need] = {}
    for phase, ways in planned(resolved.spec.phases).items():
        if phase == "load":
            needed[phase] = _load(resolved, card, ways, more)
        elif phase == "encode":
            # Alone, beside the weights that the training keeps, or beside all tensors that live
            # between two steps.
            one, resident, where = found.asides[phase], 0, "alone"
            if "step" in ways:
                resident, where = found.between, "in the step"
            elif "loaded" in ways:
                resident, where = found.steady.categories.get("parameters", 0), "beside the model"
            needed[phase] = _together(one, resident, card, more, f"{one.what} {where}")
        else:
            # The VAE's decoding, or the denoising pass without gradients; both run beside all
            # tensors that live between two steps.
            one, what = found.asides["validate"], "denoising without gradients"
            needed[phase] = _together(one, found.between, card, more, one.what)
            if found.denoising is not None:
                still = Aside(weights=one.weights, allocated=0, reserved=0, what=what)
                pass_ = _together(still, found.denoising, card, more, what)
                needed[phase] = max(needed[phase], pass_)
    before = {name: needed[name] for name in ("load", "encode") if name in needed}
    return before | {STEP: step} | {name: one for name, one in needed.items() if name not in before}


def _load(resolved: Resolved, card: Card, ways: tuple[str, ...], more: int) -> Need:
    """Return the need of loading the weights.
    diffusers' ``from_pretrained`` fills a whole model in host memory in each process, or in rank 0
    alone. A script with the way ``card`` also puts it on each GPU. DeepSpeed moves the whole module
    to each GPU in its training dtype, unless ``zero.Init`` built it, which diffusers' classes do
    not use. Source: DeepSpeed 0.19.8, runtime/engine.py, ``_configure_distributed_model``. FSDP2
    moves and shards one block at a time, so the trace has its need. Source: torch 2.13,
    _fully_shard/_fsdp_init.py, ``_move_states_to_device``."""
    spec, traits, count = resolved.spec, resolved.launch.traits, resolved.subject.parameters
    kind = next((way for way in ways if way in BYTES), STORED)
    copies = 1 if "rank0" in ways else min(card.node, spec.processes)
    host = int(copies * count * BYTES[kind])
    what = f"all weights in {kind} in host memory, {copies} times a node"
    on_card = 0
    if "card" in ways:
        on_card, what = int(count * BYTES[kind]), f"{what}, and on each GPU"
    elif "flat_weights" in traits:
        half = "half_compute" in traits
        on_card = count * (2 if half else 4)
        what += f", and on each GPU in {'16 bits' if half else 'fp32'}, as DeepSpeed moves them"
    gpu = on_card + card.beside + more
    return Need(gpu, gpu, host, what)


def _together(one: Aside, resident: int, card: Card, more: int, what: str) -> Need:
    there = resident + max(one.weights, card.beside) + more
    return Need(there + one.reserved, there + one.allocated, None, what)
