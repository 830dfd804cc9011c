"""Order of a run's steps: first those that measure memory, then those that measure time.

On a CPU the two need different heap settings (``harness.worker.samples``), and no meter runs in a
timed step. A measured run takes its warm-up, one whole step (``steady``) and one step that is
metered by phase. Then some steps settle the other heap, and the timed steps follow. A GPU has the
same steps, and no heap to change.

A training run has no steps to spare: its warm-up is metered and the rest is timed. A trial, which
tests whether a batch fits, is metered throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.memory import dissect
from harness.resolve import Resolved
from harness.worker import samples
from harness.worker.loop import Log, Run, optimizer_step, timed
from harness.worker.meter import Meter
from harness.worker.samples import GpuWatch
from harness.worker.status import Reporter
from harness.worker.training import Training


@dataclass(kw_only=True)
class Bench:
    """One rank's run with the objects that measure and record it."""

    resolved: Resolved
    folder: Path
    reporter: Reporter
    meter: Meter
    run: Run
    log: Log
    watch: GpuWatch = field(default_factory=lambda: GpuWatch(0))

    @property
    def accelerator(self) -> Any:
        """Return the accelerator that prepared the run."""
        return self.run.trained.accelerator

    @property
    def baseline(self) -> tuple[Any, ...]:
        """Return the tensors that the meter's baseline includes.

        On a CPU they are the data, which is opened before the baseline is taken. On a GPU there are
        none, because its allocator counts the data.
        """
        on_gpu = self.accelerator.device.type == "cuda"
        return () if on_gpu else tuple(vars(self.run.feed.dataset).values())

    def step(self) -> None:
        """Run one more optimizer step, which no phase counts."""
        optimizer_step(self.run, self.run.trained.optimizer_steps, self.log)

    def look(self) -> dissect.Look:
        """Return the functions that a memory breakdown needs from this rank."""
        return dissect.Look(self.step, self.meter.synchronize, self.baseline)


SETTLING = 2
"""Steps between the two heap settings. The first faults in the pages that later steps use again; in
the second the addresses of blocks still change."""
READ = 2
"""Steps after the warm-up in which memory is measured."""
WARMUP_PEAKS = {0: "first_step", 1: "warmup"}
"""Index of a warm-up step -> peak phase that begins with it (``PEAK_PHASES``)."""
STEADY = {0: "steady"}
WATCHED_PEAKS = {0: "first_step", 1: "steady"}
"""The same for runs without a metered step after the warm-up."""


def measured_steps(bench: Bench) -> None:
    """Run warm-up, memory, settling and timed steps; a batch of samples is one step."""
    spec, reporter = bench.resolved.spec, bench.reporter
    read, settling = (1, 1) if spec.sampling else (READ, SETTLING)
    reporter.enter("warmup", spec.warmup)
    take(bench, spec.warmup, WARMUP_PEAKS)
    reporter.enter("memory", read)
    take(bench, 1, STEADY)
    if not spec.sampling:  # one more step, with a peak for each of its phases
        trained = bench.run.trained
        with trained.engine.phase_hooks(trained, bench.meter.enter):
            bench.step()
            bench.meter.synchronize()
    bench.meter.close()
    reporter.at(read)
    samples.keep_freed()
    reporter.enter("settle", settling)
    bench.watch.begin("before")
    take(bench, 1)
    bench.watch.end()  # the following steps raise the device's clock again
    take(bench, settling - 1)
    bench.log.timed_from = len(bench.log.seconds)
    reporter.enter("measure", spec.steps)
    take(bench, spec.steps)
    bench.watch.begin("after")


def training_steps(bench: Bench, training: Training) -> None:
    """Run the remaining steps of a training: at most its warm-up, then at least one timed step."""
    spec, taken = bench.resolved.spec, bench.run.trained.optimizer_steps
    left = spec.warmup + spec.steps - taken
    warmup = min(spec.warmup, left - 1)  # a step at the end of a training is timed only
    left -= warmup

    def after(last: bool) -> None:
        training.after_step(bench.run, bench.resolved, bench.log, last=last)

    bench.reporter.enter("warmup", warmup)
    take(bench, warmup, WATCHED_PEAKS, after=lambda last: after(False))
    bench.meter.close()
    watched = None if samples.keep_freed() else STEADY
    bench.log.timed_from = len(bench.log.seconds)
    bench.reporter.enter("measure", left)
    take(bench, left, watched, after)
    bench.meter.close()


def trial_steps(bench: Bench) -> None:
    """Run warm-up and steps only to find out whether they run out of memory."""
    spec = bench.resolved.spec
    bench.reporter.enter("warmup", spec.warmup)
    take(bench, spec.warmup, WARMUP_PEAKS)
    bench.log.timed_from = len(bench.log.seconds)
    bench.reporter.enter("measure", spec.steps)
    take(bench, spec.steps, STEADY)
    bench.meter.close()


def take(
    bench: Bench,
    count: int,
    peaks: dict[int, str] | None = None,
    after: Callable[[bool], None] | None = None,
) -> None:
    """Run ``count`` timed steps. ``after`` is called after each, with whether it was the last.

    Args:
        peaks: index of a step -> the peak phase that begins with it.
    """
    for index in range(count):
        if peaks and index in peaks:
            bench.meter.enter(peaks[index])
        timed(bench.step, bench.run.trained, bench.log, bench.meter)
        more = {"loss": float(bench.log.losses[-1])} if after else {}
        bench.reporter.at(index + 1, **more)
        if after:
            after(index + 1 == count)
