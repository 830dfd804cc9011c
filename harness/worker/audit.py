"""Audit: checks that a run did the requested work, and the PNG grid of its samples.

The observed values come from the engine, the optimizer's state and the consumed samples, on every
rank. A row with one failed check is void and never ranked.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from harness.data.feed import sample_order
from harness.json_files import atomic_file
from harness.result import Check, Projections
from harness.void import SHOWN
from harness.worker.loop import Run
from strategies.base import NotInForce
from strategies.engine import TrainingRun
from strategies.evidence import states
from strategies.inventory import EngineReport
from strategies.launch_file import Layout

STEPS_TO_MOVE = 3
"""From adaLN-Zero the first gradient reaches the last layer only, the second the parameters that
open the blocks, the third all."""


def collect_evidence(run: Run) -> tuple[dict[str, Any], list[Check]]:
    """Return each strategy's facts from rank 0, and a check that holds only if every rank shows
    them.

    Every rank computes all evidence, because some of it communicates.
    """
    facts, checks = {}, []
    for part in run.resolved.recipe.strategies:
        try:
            mine, fault = part.evidence(run), ""
        except NotInForce as error:
            mine, fault = {}, str(error)
        except (AttributeError, KeyError, IndexError) as error:
            mine, fault = {}, f"could not be read back ({type(error).__name__}: {error})"
        faults = [f for f in gather(run, fault) if f]
        facts[part.name] = mine
        found = faults[0] if faults else SHOWN
        checks.append(Check(name=f"evidence: {part}", asked=SHOWN, found=found, ok=not faults))
    return facts, checks


def audit(run: Run, losses: list[float], did: Projections | None = None) -> list[Check]:
    """Return the checks that hold for every recipe.

    Args:
        losses: global mean loss of each step.
        did: changes of each parameter by the optimizer, if they were recorded.
    """
    resolved, accelerator, log = run.resolved, run.accelerator, run.log
    spec, layout, told = resolved.spec, resolved.launch.layout, run.engine.report(run)
    batch, size = spec.global_batch, resolved.subject.data.size
    twins = gather(run, [[m.tolist() for m in step] for step in log.positions])
    everyone = _shares(layout, twins)
    steps = len(log.positions)
    micro = {len(m) for rank in everyone for step in rank for m in step}
    fed = [sum(len(m) for rank in everyone for m in rank[i]) for i in range(steps)]
    asked_order = [
        sample_order(spec.seed, size, n * batch, batch)
        for n in range(run.resumed_steps, run.resumed_steps + steps)
    ]
    found_order = [np.array([i for r in everyone for m in r[n] for i in m]) for n in range(steps)]
    rows = [
        ("processes", spec.processes, accelerator.num_processes),
        ("device", spec.device, accelerator.device.type),
        ("engine", resolved.launch.engine.file.kind, accelerator.distributed_type.value),
        ("global batch", [spec.global_batch], sorted(set(fed))),
        ("micro batch", [resolved.micro_batch], sorted(micro)),
        ("accumulation", resolved.recipe.accumulation, len(log.positions[0])),
        # By the engine's count, or by the optimizer's own state.
        (
            "optimizer steps",
            run.optimizer_steps,
            states.counted(run) if told.steps is None else told.steps,
        ),
        ("data order", _order_digest(asked_order), _order_digest(found_order)),
        ("variants of the initial weights", 1, len(set(gather(run, run.digest)))),
        ("gradient clipping", spec.grad_clip, _clipping(run, told)),
    ]
    if layout.data < len(twins):  # ranks that share samples
        alike = all(everyone[layout.share(rank)] == fed_it for rank, fed_it in enumerate(twins))
        rows.append(("samples shared alike", True, alike))
    rows.append(("losses finite", True, all(math.isfinite(x) for x in losses)))
    rows += _stepped(run, did)
    if told.micro_batch is not None:
        rows.append(("engine's micro batch", resolved.micro_batch, told.micro_batch))
    return [Check(name=n, asked=a, found=f, ok=a == f) for n, a, f in rows]


def _shares(layout: Layout, everyone: list[Any]) -> list[Any]:
    """Return the samples that each share of a global batch consumed, from the first rank of each
    share."""
    first = {layout.share(rank): rank for rank in reversed(range(len(everyone)))}
    return [everyone[first[share]] for share in sorted(first)]


def gather(run: TrainingRun, value: Any) -> list[Any]:
    """Return ``value`` of every rank, in order, on every rank."""
    if run.accelerator.num_processes == 1:
        return [value]
    everyone: list[Any] = [None] * run.accelerator.num_processes
    torch.distributed.all_gather_object(everyone, value)
    return everyone


def _stepped(run: Run, did: Projections | None) -> list[tuple[str, Any, Any]]:
    """Return checks that every weight was stepped: each state's step count on every rank, and each
    parameter's change. A flat state counts once for all its parameters; their changes tell them
    apart."""
    counts = sorted({n for rank in gather(run, states.each_count(run)) for n in rank})
    rows: list[tuple[str, Any, Any]] = []
    if counts:
        rows.append(("steps of each weight", [run.optimizer_steps], counts))
    if did is None:
        return rows
    # An unrecorded parameter would be missing from the comparison without notice.
    free = sum(p.requires_grad for p in run.engine.global_parameters(run).values())
    rows.append(("parameters watched", free, len(did.update)))
    if run.optimizer_steps >= STEPS_TO_MOVE and did.moment:
        kinds = (did.update, did.moment)
        still = [name for name in did.update if not any(any(k.get(name, ())) for k in kinds)]
        rows.append(("parameters that were not stepped", [], still))
    return rows


def _clipping(run: Run, told: EngineReport) -> float | str:
    """Return the clipping limit in force: the engine's, or that of the first clipping."""
    if told.clip is not None:
        return told.clip
    if run.log.clipped is None:
        return 0.0
    limit, (before, after) = run.settings.grad_clip, run.log.clipped
    if math.isclose(after, min(before, limit), rel_tol=1e-4):
        return limit
    return f"a norm of {after:.4g} after clipping {before:.4g} to {limit:g}"


def _order_digest(rows: list[np.ndarray]) -> str:
    text = b"".join(np.ascontiguousarray(r, dtype=np.int64).tobytes() for r in rows)
    return hashlib.sha256(text).hexdigest()[:16]


# ---- sample grid ----


SIDE = 96
"""Least width of a sample in pixels; smaller ones are enlarged."""
GAP = 4
FRAME = 96
"""Grey of the gaps: black ones would merge with a digit's black background."""


def write_grid(x_BCHW: Tensor, path: str | Path, columns: int, *, grey: bool = True) -> None:
    """Write samples as one PNG, left to right, top to bottom; replace an existing file atomically.

    Args:
        grey: True shows the mean over channels, -1 black and 1 white (digits). False shows the
            first three channels as colours, each stretched to its own range over all samples
            (latents without a decoder); fewer are repeated to three.

    Raises:
        ValueError: no samples, fewer than one column, or values that are not finite.
    """
    x = x_BCHW.detach().float().cpu().numpy()
    if x.ndim != 4 or x.size == 0 or columns < 1:
        raise ValueError(f"cannot lay out {list(x.shape)} in {columns} columns")
    if not np.isfinite(x).all():
        raise ValueError("samples are not finite; the model has diverged")
    if grey:
        unit = (x.mean(axis=1) + 1) / 2
    else:
        shown = x[:, [min(c, x.shape[1] - 1) for c in range(3)]].transpose(0, 2, 3, 1)
        low, high = (f(shown, axis=(0, 1, 2), keepdims=True) for f in (np.min, np.max))
        unit = (shown - low) / np.maximum(high - low, 1e-12)
    pixels = (np.clip(unit, 0, 1) * 255 + 0.5).astype(np.uint8)  # [B, H, W] or [B, H, W, 3]
    times = max(1, -(-SIDE // pixels.shape[1]))  # each sample is enlarged by whole pixels
    high, wide = times * pixels.shape[1], times * pixels.shape[2]
    rows, mode = -(-len(pixels) // columns), "L" if grey else "RGB"
    size = (columns * (wide + GAP) - GAP, rows * (high + GAP) - GAP)
    sheet = Image.new(mode, size, FRAME if grey else (FRAME,) * 3)
    for n, one in enumerate(pixels):
        picture = Image.fromarray(one).resize((wide, high), Image.Resampling.NEAREST)
        sheet.paste(picture, (n % columns * (wide + GAP), n // columns * (high + GAP)))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as stream:
        sheet.save(stream.buffer, format="PNG")  # type: ignore[attr-defined]
