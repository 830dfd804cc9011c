"""``plan --measured 6.2s,21.5GiB``: a person's own step beside its prediction: normal, or why not.
Each cause has the number that it would need to explain the difference, and counts only where that
number is plausible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from harness.planner import resident_models
from harness.planner.eager import note_of
from harness.planner.plan.answer import gib, reach
from harness.planner.speed.rates import rates
from harness.planner.speed.roofline import issued, seconds
from harness.planner.verdict import Fit
from harness.report.figures.units import GIB
from harness.system.cards import parse_bytes
from strategies.base import BadInput

SLOW_HOST = (60e-6, 400e-6)
"""Plausible seconds an operation of a host that is busy, slow or runs a profiler."""
PAGEABLE = (1e9, 12e9)
"""Plausible bytes a second between a GPU and memory that is not pinned, or that a driver spills to
(docs/explanation/predictions.md has the rate of pinned memory)."""
KERNELS = (1.5, 12.0)
"""How much longer attention takes in plausible other kernels: full score matrices at the most."""
COMPILED = (0.55, 0.95)
"""Plausible time of compiled blocks, relative to eager ones."""
NEAR = 0.15
"""How near the measured memory has to be to what a cause adds up to."""
WHOLE = 0.1
"""How near a ratio of times has to be to a whole number of micro batches."""


class Measured(NamedTuple):
    """A person's seconds of an optimizer step and bytes of a GPU; either may be None."""

    seconds: float | None
    bytes: int | None


def read(text: str) -> Measured:
    """Return the numbers of ``6.2s,21.5GiB``, or of one of them.

    Raises:
        BadInput: a part is neither seconds above 0 nor a size.
    """
    time, size = None, None
    for word in filter(None, text.replace(" ", "").split(",")):
        found = re.fullmatch(r"([0-9.]+)(m?)s", word)
        if not found:
            size = parse_bytes(word, "measured")
            continue
        try:
            time = float(found[1]) / (1000 if found[2] else 1)
        except ValueError:
            time = 0.0
        if not time:
            raise BadInput(f"measured has {word!r}; write seconds a step, as 6.2s or 850ms")
    if time is None and size is None:
        raise BadInput("measured is empty; write seconds a step and GiB, as 6.2s,21.5GiB")
    return Measured(time, size)


def lines(fit: Fit, told: Measured) -> list[str]:
    """Return whether the measured step is normal, and else what would explain it."""
    if fit.need_bytes is None:
        return [f"Not predicted, so nothing can be said: {fit.lack or fit.prediction.reason}"]
    found: list[str] = []
    step, size = fit.seconds, told.bytes
    if told.seconds is not None and not step:
        found = ["Time: not predicted."]
    elif told.seconds is not None:
        ratio = told.seconds / step.total
        head = f"Time: {told.seconds:.3g} s a step, predicted {step.total:.3g} s "
        head += f"({step.low:.3g} to {step.high:.3g}): {ratio:.2g} times"
        causes = _slower(fit, told) if ratio > 1 else _faster(fit, told.seconds)
        found = _judged(head, step.low <= told.seconds <= step.high, causes)
    if size is not None:
        head = f"Memory: {gib(size)} GiB, predicted {reach(fit)}"
        causes = _larger(fit, size) if size > fit.need_bytes else _smaller(fit, size)
        found += _judged(head, fit.low_bytes <= size <= fit.most_bytes, causes)
    return found


def _judged(head: str, normal: bool, causes: Iterator[str]) -> list[str]:
    if normal:
        return [f"{head}. Normal."]
    return [f"{head}. Not normal. What would explain it:", *(f"- {text}" for text in causes)]


def _slower(fit: Fit, told: Measured) -> Iterator[str]:
    """Yield causes of a longer step, with the number that each would need."""
    step, work, gpu = fit.seconds, fit.prediction.work, fit.gpu
    more, count = told.seconds - step.total, issued(work)
    used = max(told.bytes or 0, fit.need_bytes)
    over = used - gpu.memory_bytes
    if over > 0 and _within(2 * over / more, PAGEABLE):
        yield (f"spilled to host memory: {gib(used)} GiB are used and the card has "
               f"{gib(gpu.memory_bytes)}; {gib(over)} GiB copied twice a step at "
               f"{2 * over / more / 1e9:.2g} GB/s. Try first: forbid it in the driver (Windows: "
               "CUDA sysmem fallback policy), and a recipe that fits")  # fmt: skip
    moved = sum(w.bytes * w.count for w in work if w.kind in ("transfer", "streamed"))
    if moved:
        rate, pinned = moved / (more + step.offload or 1), rates(gpu, 1).to_host
        if _within(rate, PAGEABLE) and rate < pinned:
            yield (f"offload from pageable memory: {gib(moved)} GiB a step at {rate / 1e9:.2g} "
                   f"GB/s, pinned {pinned / 1e9:.3g}. Try first: pin it (more host "
                   "memory), and see the slot's lanes in nvidia-smi -q")  # fmt: skip
    kernels, processes = [w for w in work if w.kind == "attention"], fit.resolved.spec.processes
    attention = seconds(kernels, gpu, processes, fit.label).compute if kernels else 0.0
    if attention and _within(times := 1 + more / attention, KERNELS):
        yield (
            f"another attention kernel: attention takes {attention:.2g} s of the step, and would "
            f"take {times:.2g} times that. Try first: attend:kernel=flash, no dense mask"
        )
    if count and _within(each := told.seconds / count, SLOW_HOST):
        yield (f"the host: {count:,} operations a step at {each * 1e6:.0f} microseconds each. Try "
               "first: a larger micro batch, compile, no profiler or per-step .item()")  # fmt: skip
    share = step.total / told.seconds
    yield (f"waiting for data or encoding in the step: {more:.2g} s; then nvidia-smi shows the GPU "
           f"busy some {100 * share:.0f} %. Try first: cached latents and texts")  # fmt: skip
    steps = round(told.seconds / step.total)
    if steps > 1 and abs(told.seconds / step.total - steps) < WHOLE:
        yield f"{steps} micro batches in each step: the prediction has {_micro(fit)}"


def _faster(fit: Fit, measured: float) -> Iterator[str]:
    """Yield causes of a shorter step."""
    share = measured / fit.seconds.total
    if not note_of(fit.resolved) and _within(share, COMPILED):
        yield f"compiled blocks: {share:.2g} of the eager step's time, which was predicted"
    steps = round(1 / share)
    if steps > 1 and abs(1 / share - steps) < WHOLE:
        yield f"a micro batch of {steps} was timed, or a step: the prediction has {_micro(fit)}"
    yield "fewer pixels, frames or tokens of text than the prediction has (--resolution, --frames)"


def _larger(fit: Fit, measured: int) -> Iterator[str]:
    names = resident_models.usual_of(fit.resolved.spec.model)
    beside = sum(resident_models.named(name).bytes for name in names)
    more = measured - fit.need_bytes
    if beside and abs((fit.need_bytes + beside) / measured - 1) < NEAR:
        yield (
            f"encoders that stay on the GPU: {', '.join(names)}, {gib(beside)} GiB in 16 bits. "
            "Try first: cache their outputs, then free them (--also usual plans them)"
        )
    live = fit.prediction.peak.categories if fit.prediction.peak else {}
    names = ("activations", "recomputed", "autocast", "temporaries")
    growing = sum(live.get(name, 0) for name in names)
    if growing > GIB // 10:
        yield (f"a larger micro batch or sample: what grows with it takes {gib(growing)} GiB, and "
               f"would take {1 + more / growing:.2g} times that")  # fmt: skip
    if "recomputes" not in fit.resolved.launch.traits:
        yield "nothing: the recipe keeps all activations; try first: checkpoint"
    else:
        yield "checkpointing that is not in force: look for warnings about gradient checkpointing"
    yield f"a validation, or memory that torch holds and does not use: {gib(more)} GiB more"


def _smaller(fit: Fit, measured: int) -> Iterator[str]:
    tensors = fit.prediction.bytes
    if tensors and abs(measured / tensors - 1) < NEAR:
        yield (f"the number is of torch.cuda.max_memory_allocated: tensors alone are predicted at "
               f"{gib(tensors)} GiB; a GPU needs the reserve and the context too")  # fmt: skip
    yield "weights in fewer bits, fewer pixels or frames than the prediction has"


def _micro(fit: Fit) -> str:
    steps = fit.resolved.recipe.accumulation
    return f"{steps} of {fit.resolved.micro_batch} sample" + "s" * (fit.resolved.micro_batch > 1)


def _within(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] <= value <= ends[1]
