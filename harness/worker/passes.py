"""The steps of a run: first those in which memory is read, then those in which time is.

The two want different heaps of a process on CPUs (``heap``), and a meter has nothing to do in a
timed step. So a measured run takes its warm-up, a step as a whole (``steady``) and one
that is cut into its phases under the meter, then some steps that settle the other heap, then the
timed ones. On a GPU nothing has to change between them, and the steps are the same.

A training run has no steps to give away: its warm-up is watched, and the rest is timed. A trial
whether it fits is watched throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.memory import dissect
from harness.resolve import Resolved
from harness.worker import samples
from harness.worker.loop import Log, Run, optimizer_step, timed_step
from harness.worker.meter import Meter
from harness.worker.samples import GpuWatch
from harness.worker.status import Reporter
from harness.worker.training import Training

# ---- bench ----
# One rank's run, and what measures and records it.


@dataclass(kw_only=True)
class Bench:
    """One rank's run, and what measures and records it."""

    resolved: Resolved
    folder: Path
    reporter: Reporter
    meter: Meter
    run: Run
    log: Log
    watch: GpuWatch = field(default_factory=lambda: GpuWatch(0))

    @property
    def accelerator(self) -> Any:
        """accelerate's, which the run was prepared with."""
        return self.run.trained.accelerator

    @property
    def baseline(self) -> tuple[Any, ...]:
        """Tensors that the meter's baseline holds already. On a CPU the data, which is opened
        before the baseline is taken; on a GPU none, for its allocator counts the data."""
        on_gpu = self.accelerator.device.type == "cuda"
        return () if on_gpu else tuple(vars(self.run.feed.dataset).values())

    def step(self) -> None:
        """One optimizer step more, which no phase counts."""
        optimizer_step(self.run, self.run.trained.optimizer_steps, self.log)

    def infer(self) -> None:
        """One micro batch through the model."""
        batch = next(iter(self.run.feed.micro_batches(self.run.trained.optimizer_steps)))
        trained = self.run.trained
        trained.subject.predict(trained.model, trained.cut(batch.x), batch.t, batch.conditions)

    def look(self) -> dissect.Look:
        """What a portrait needs of this rank."""
        return dissect.Look(self.step, self.infer, self.meter.synchronize, self.baseline)


SETTLING = 2
"""Steps between the two heaps: the first faults in the pages that later ones take again, and in
the second the places of blocks still move."""
READ = 2
"""Steps whose memory is read after the warm-up."""
WARMUP_PEAKS = {0: "first_step", 1: "warmup"}
"""A step of the warm-up -> the phase of peaks that begins with it. (``PEAK_PHASES``)"""
STEADY = {0: "steady"}
WATCHED_PEAKS = {0: "first_step", 1: "steady"}
"""The same where no step after the warm-up is watched."""


def measured_steps(bench: Bench) -> None:
    """Warm-up, memory, settling, clock."""
    spec, reporter = bench.resolved.spec, bench.reporter
    reporter.enter("warmup", spec.warmup)
    _take(bench, spec.warmup, WARMUP_PEAKS)
    reporter.enter("memory", READ)
    _take(bench, 1, STEADY)
    _cut_step(bench)
    reporter.at(READ)
    samples.keep_freed()
    reporter.enter("settle", SETTLING)
    bench.watch.begin("before")
    _take(bench, 1)
    bench.watch.end()  # the steps after it bring the device's clock up again
    _take(bench, SETTLING - 1)
    bench.log.timed_from = len(bench.log.seconds)
    reporter.enter("measure", spec.steps)
    _take(bench, spec.steps)
    bench.watch.begin("after")


def training_steps(bench: Bench, training: Training) -> None:
    """What is left of a training: its warm-up and one step more, or the one that is left."""
    spec, taken = bench.resolved.spec, bench.run.trained.optimizer_steps
    left = spec.warmup + spec.steps - taken
    warmup = min(spec.warmup, left - 1)  # one at the end of a training is timed, and nothing else
    left -= warmup

    def after(last: bool) -> None:
        training.after_step(bench.run, bench.resolved, bench.log, last=last)

    bench.reporter.enter("warmup", warmup)
    _take(bench, warmup, WATCHED_PEAKS, after=lambda last: after(False))
    bench.meter.close()
    watched = None if samples.keep_freed() else STEADY
    bench.log.timed_from = len(bench.log.seconds)
    bench.reporter.enter("measure", left)
    _take(bench, left, watched, after)
    bench.meter.close()


def trial_steps(bench: Bench) -> None:
    """Warm-up and steps of which only matters whether their memory is there."""
    spec = bench.resolved.spec
    bench.reporter.enter("warmup", spec.warmup)
    _take(bench, spec.warmup, WARMUP_PEAKS)
    bench.log.timed_from = len(bench.log.seconds)
    bench.reporter.enter("measure", spec.steps)
    _take(bench, spec.steps, STEADY)
    bench.meter.close()


def _take(
    bench: Bench,
    count: int,
    peaks: dict[int, str] | None = None,
    after: Callable[[bool], None] | None = None,
) -> None:
    """``count`` steps by the clock; ``after`` each, it is told whether that was the last.

    Args:
        peaks: index of a step -> the phase of peaks that begins with it.
    """
    run, log = bench.run, bench.log
    for index in range(count):
        if peaks and index in peaks:
            bench.meter.enter(peaks[index])
        timed_step(run, run.trained.optimizer_steps, log, bench.meter)
        more = {"loss": float(log.losses[-1])} if after else {}
        bench.reporter.at(index + 1, **more)
        if after:
            after(index + 1 == count)


def _cut_step(bench: Bench) -> None:
    """One more step, with a peak for each of its phases; the meter rests after it."""
    trained = bench.run.trained
    with trained.engine.marks(trained, bench.meter.enter):
        bench.step()
        bench.meter.synchronize()
    bench.meter.close()
