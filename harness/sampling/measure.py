"""A measured sampling run: prepare, draw batches, collect evidence, audit, and write the result.

The phases are those of a training run (``harness.phases``), with a batch of samples as the
step. The first batch is the warm-up; ``steady`` is a whole batch, from noise to samples, under
the meter.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.resolve import Resolved
from harness.result import Check, Drawn, Result
from harness.worker import audit as grid
from harness.worker import samples, setup
from harness.worker.audit import collect_evidence, gather
from harness.worker.loop import Log, Run, timed
from harness.worker.measure import altered, measured_rank, result_of, traced_steps
from harness.worker.meter import cards_before, make_meter
from harness.worker.passes import Bench
from harness.worker.samples import GpuWatch
from harness.worker.sampling import Drawing, digest, labels_of, noise_of, prepare
from harness.worker.status import Reporter
from strategies.evidence.rules import relative_error
from strategies.evidence.watching import observe_step

# ---- audit ----
# The checks read the model's calls and the samples. A row with one failed check is void, and never
# ranked.


AGAIN = 1e-3
"""Relative distance allowed between a batch and its repetition; a larger one means the model
changed.
"""


def audit(resolved: Resolved, drawing: Drawing, kept: Tensor) -> list[Check]:
    """Return the checks that hold for every recipe.

    Args:
        drawing: after a watched batch.
        kept: this rank's samples of the last timed batch. Every rank must call this.
    """
    spec, trained = resolved.spec, drawing.trained
    accelerator, shape = trained.accelerator, resolved.subject.data.sample_shape
    apart = relative_error(drawing.drawn.double(), kept.double())
    gradients = [p for p in trained.module.parameters() if p.requires_grad or p.grad is not None]
    ranks = gather(trained, digest(kept))
    found_calls = {str(size): count for size, count in Counter(drawing.calls).items()}
    rows = [
        ("processes", spec.processes, accelerator.num_processes),
        ("device", spec.device, accelerator.device.type),
        ("engine", resolved.launch.engine.file.kind, accelerator.distributed_type.value),
        ("samples", [spec.global_batch, *shape], list(kept.shape)),
        ("calls of the model", _asked_calls(resolved), found_calls),
        ("noise", digest(noise_of(resolved)), drawing.began),
        ("samples finite", True, bool(torch.isfinite(kept).all())),
        ("eval mode", True, not trained.module.training),
        ("parameters with a gradient", 0, len(gradients)),
        ("samples drawn again are equal", True, apart <= AGAIN),
    ]
    if len(ranks) > 1:
        rows.append(("variants of the ranks' samples", 1, len(set(ranks))))
    return [Check(name=n, asked=a, found=f, ok=a == f) for n, a, f in rows]


def _asked_calls(resolved: Resolved) -> dict[str, int]:
    """Return samples per call -> expected calls, by closed form."""
    halves = 1 if resolved.spec.scale == 1 else 2  # guidance: with conditions, and without
    return {str(resolved.spec.global_batch * halves): resolved.evaluations}


PICTURE = "samples.png"
KEPT = 4
"""Samples whose latents the result stores."""
COLUMNS = 8


@dataclass(kw_only=True)
class DrawingBench(Bench):
    """A bench whose step is a batch of samples."""

    drawing: Drawing
    kept: Tensor | None = None

    @property
    def baseline(self) -> tuple[Any, ...]:
        """The samples kept for the result, which count as held before the step."""
        return () if self.kept is None else (self.kept,)

    def step(self) -> None:
        self.drawing.step()


def measure(resolved: Resolved, folder: Path, reporter: Reporter) -> Result | None:
    """Draw samples from noise and measure them, on one process or on ranks that share each sample.

    The result is on rank 0, None elsewhere.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    bench = _begin(resolved, folder, reporter)
    drawing, trained = bench.drawing, bench.run.trained
    touched = altered(bench.run)
    _batches(bench)
    kept = bench.kept = drawing.drawn
    reporter.enter("anatomy")
    categories = traced_steps(bench)
    observe_step(trained, resolved.recipe.strategies, drawing.watched_step)
    reporter.enter("evidence")
    evidence, checks = collect_evidence(resolved, trained)
    checks = touched + checks + audit(resolved, drawing, kept)
    reporter.enter("save")
    ranks = gather(trained, measured_rank(bench, categories))
    if not bench.accelerator.is_main_process:
        return None
    grid.write_grid(kept, folder / PICTURE, COLUMNS, grey=resolved.spec.data == "digits")
    result = result_of(
        bench, ranks, [], checks,
        {"started": started, "evidence": evidence},
    )  # fmt: skip
    result.parameters = resolved.subject.parameters  # packed codes are fewer than the weights
    result.drawn = _drawn(resolved, kept)
    return result


def _begin(resolved: Resolved, folder: Path, reporter: Reporter) -> DrawingBench:
    """Do everything before the first batch."""
    before = cards_before(resolved.spec.device)
    accelerator = setup.make_accelerator(resolved)
    setup.rehearse(resolved, accelerator)
    meter = make_meter(accelerator.device, before)
    reporter.peak = meter.peak_bytes

    def enter(phase: str) -> None:
        reporter.enter(phase)
        meter.enter(phase)

    drawing, building = prepare(resolved, accelerator, enter)
    meter.notes += building.notes
    run = Run(
        trained=drawing.trained,
        feed=None,
        objective=None,
        digest=building.digest,
        notes=building.notes,
    )
    asks = accelerator.device.type == "cuda" and accelerator.is_main_process
    watch = GpuWatch(resolved.spec.local_processes if asks else 0)
    return DrawingBench(
        resolved=resolved, folder=folder, reporter=reporter, meter=meter, run=run, log=Log(),
        watch=watch, drawing=drawing,
    )  # fmt: skip


def _batches(bench: DrawingBench) -> None:
    """Run warm-up, memory, settling and timed batches, as the steps of a training."""
    spec, meter, reporter = bench.resolved.spec, bench.meter, bench.reporter
    reporter.enter("warmup", spec.warmup)
    meter.enter("first_step")
    _take(bench, 1)
    if spec.warmup > 1:
        meter.enter("warmup")
        _take(bench, spec.warmup - 1)
    reporter.enter("memory", 1)
    meter.enter("steady")
    _take(bench, 1)
    meter.close()
    samples.keep_freed()
    reporter.enter("settle", 1)
    bench.watch.begin("before")
    _take(bench, 1)
    bench.watch.end()
    bench.log.timed_from = len(bench.log.seconds)
    reporter.enter("measure", spec.steps)
    _take(bench, spec.steps)
    bench.watch.begin("after")


def _take(bench: DrawingBench, count: int) -> None:
    for index in range(count):
        timed(bench.step, bench.run.trained, bench.log, bench.meter)
        bench.reporter.at(index + 1)


def _drawn(resolved: Resolved, kept: Tensor) -> Drawn:
    some = kept[:KEPT].detach().float().cpu().contiguous()
    values = some.numpy().astype("<f4").tobytes()
    return Drawn(
        samples=len(kept),
        evaluations=resolved.evaluations,
        products=len(resolved.subject.linears),
        shape=list(some.shape),
        latents=base64.b64encode(values).decode("ascii"),
        labels=labels_of(resolved).tolist(),
        noise=digest(noise_of(resolved)),
    )
