"""Traces of text encoders and VAEs on tensors without storage: memory and work of their passes.
``resident_models.yaml`` names the classes of transformers and diffusers. They are traced without a
training, because the memory beside them is constant during a pass."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.phases import planned
from harness.planner import resident_models
from harness.planner.tracing.cuda_calls import cuda_like
from harness.planner.tracing.op_cache import OpCache
from harness.planner.tracing.simulate import denoised_samples, denoises, kernel_scratch, pooled
from harness.planner.tracing.trace import Counter, StoragelessTracer
from harness.planner.tracing.world import GPU, built
from harness.prediction import Aside, Prediction, Work
from harness.resolve import Resolved
from harness.subjects.library.families import Space

COPIES = {4: 2, 5: 1}
"""Dimensions of a convolution's weight -> bytes that cuDNN allocates, as a multiple of input and
output. Its 16-bit kernels copy both to channels last. The figures were fitted to public rows of
SD's and Qwen-Image's VAEs (docs/public-phases.yaml)."""
CLIP_TOKENS = 77


def of(resolved: Resolved, kind: str) -> dict[str, Aside]:
    """Return phase -> its encoders and VAE, for the planned phases that use any, on a ``kind`` of
    card."""
    names = resident_models.usual_of(resolved.spec.model)
    found: dict[str, Aside] = {}
    for phase, ways in planned(resolved.spec.phases).items():
        if phase == "encode":
            part = resident_models.part_in(ways)
            some = resident_models.part_of(resolved.spec.model, part)
            found[phase] = _fullest(resolved, kind, some, some, "encode", ways)
        elif phase == "validate":
            vaes = [name for name in names if "latent" in resident_models.table()[name]]
            there = names if "encoders" in ways else vaes
            found[phase] = _fullest(resolved, kind, there, vaes, "decode", ways)
    return found


def beside_step(resolved: Resolved, kind: str, step: Prediction) -> Prediction | None:
    """Return the prediction of a row from that of its ``step``, which was traced without phases.
    None if the denoising pass of a validation may need more than its decoding, because only a trace
    of the training has that pass."""
    asides, bound = of(resolved, kind), 0.0
    if denoises(resolved) and step.denoising is None:
        # A denoising pass cannot exceed the forward pass of training, which keeps activations for
        # backward; its temporaries grow at most with the samples.
        bound = math.inf
        if step.between is not None and "forward" in step.phases:
            times = max(1, math.ceil(denoised_samples(resolved.subject) / resolved.micro_batch))
            bound = step.between + times * (step.phases["forward"] - step.between)
    if bound > (step.between or 0) + (asides["validate"].reserved if bound else 0):
        return None
    return dataclasses.replace(step, asides=asides, recorded="")


def _fullest(
    resolved: Resolved,
    kind: str,
    there: Sequence[str],
    run: Sequence[str],
    how: str,
    ways: Sequence[str],
) -> Aside:
    """Return the weights of all models in ``there``, and the largest of the passes in ``run``.
    The models run one after the other. Encoding takes a micro batch, decoding one sample."""
    space: Space = resolved.subject.space
    pixels = space.height * resolved.subject.factor, space.width * resolved.subject.factor
    frames = 1 + (space.frames - 1) * max(1, resolved.subject.family.every)
    batch = 1 if how == "decode" else resolved.micro_batch
    size = (batch, frames, *pixels)
    tiled, wide = "tiled" in ways, "fp32" in ways
    passes = {name: passed(name, how, size, space.text, tiled, wide, kind) for name in run}
    name = max(passes, key=lambda one: passes[one].reserved)
    work = [one for each in passes.values() for one in each.work] if how == "encode" else []
    shown = f"{frames} x {pixels[0]}x{pixels[1]}" if frames > 1 else f"{pixels[0]}x{pixels[1]}"
    what = f"{name} {how}s {'' if batch == 1 else f'{batch} of '}{shown}{' in tiles' * tiled}"
    if "latent" not in resident_models.table()[name]:
        what = f"{name} encodes {batch} x {_tokens(name, space.text)} tokens"
    rows = [resident_models.table()[one] for one in there]
    weights = sum(row["elements"] * (4 if wide and "latent" in row else 2) for row in rows)
    allocated, reserved, _ = passes[name]
    return Aside(weights=weights, allocated=allocated, reserved=reserved, what=what, work=work)


def _tokens(name: str, text: int) -> int:
    return CLIP_TOKENS if name.startswith("CLIP") else text


class Passed(NamedTuple):
    """Bytes of a forward pass beyond its weights, and its work."""

    allocated: int
    reserved: int
    work: tuple[Work, ...]


@functools.cache
def passed(
    name: str,
    how: str,
    size: tuple[int, int, int, int],
    text: int,
    tiled: bool,
    wide: bool,
    kind: str,
) -> Passed:
    """Return the memory and the work of one forward pass of ``name``.
    ``size``: samples, frames, height and width in pixels. ``how``: encode or decode."""
    is_vae = "latent" in resident_models.table()[name]
    dtype = torch.float32 if wide and is_vae else torch.bfloat16
    module = built(name).to(dtype).eval().requires_grad_(False)
    counter = Counter(GPU, "cpu")
    tracer = StoragelessTracer({GPU: "device"}, temporary=scratch, witness=counter.see)
    with contextlib.ExitStack() as stack:
        stack.enter_context(cuda_like(kind))
        fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        tracer.op_cache = OpCache(fake)
        stack.enter_context(tracer)
        stack.enter_context(torch.no_grad())
        if is_vae:
            if tiled:
                module.enable_tiling()
            given = torch.zeros(_shape(name, how, size), dtype=dtype, device=GPU)
            if how == "decode" and getattr(module.config, "timestep_conditioning", False):
                module.decode(given, temb=torch.zeros(given.shape[0], dtype=dtype, device=GPU))
            elif how == "decode":
                module.decode(given)
            else:
                module.encode(given).latent_dist.sample()
        else:
            ids = torch.zeros((size[0], _tokens(name, text)), dtype=torch.long, device=GPU)
            module(ids, attention_mask=torch.ones_like(ids))
    found = pooled(list(tracer.record.pool_events("device")))
    work = tuple(dataclasses.replace(one, phase="encode") for one in counter.work())
    return Passed(found["allocated"], found["reserved"], work)


def _shape(name: str, how: str, size: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return the shape of a VAE's input, without a frame dimension if it is an image VAE."""
    row = resident_models.table()[name]
    channels, every, down = row["latent"]
    batch, frames, height, width = size
    if how == "decode":
        height, width, frames = height // down, width // down, 1 + (frames - 1) // every
    of_images = every == 1
    shape = (batch, row.get("colors", 3) if how == "encode" else channels, frames, height, width)
    return shape[:2] + shape[3:] if of_images else shape


def scratch(func: Any, args: Any, out: Any) -> int:
    """Return the bytes that a CUDA kernel of this op holds while it runs, cuDNN's convolutions
    included."""
    if func is torch.ops.aten.convolution.default and args[1].shape[-1] == 3:
        times = COPIES[args[1].dim()] if args[3][-1] == 1 else 1
        return times * (args[0].nbytes + out.nbytes)
    return kernel_scratch(func, args, out)
