"""Order of a run's steps: first those that measure memory, then those that measure time.

On a CPU the two need different heap settings (``harness.worker.samples``), and no meter runs in a
timed step. A measured run takes its warm-up, one whole step (``steady``) and one step that is
metered by phase. Then some steps settle the other heap, and the timed steps follow. A GPU has the
same steps, and no heap to change.

A training run has no steps to spare: its warm-up is metered and the rest is timed. A trial, which
tests whether a batch fits, is metered throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.worker import samples
from harness.worker.loop import Run, timed
from harness.worker.training import Training

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


Order = Iterator[bool]
"""Steps as they come: at each yield the caller takes one, with a clock if it is True."""


def measured_steps(run: Run) -> Order:
    """Order warm-up, memory, settling and timed steps; a batch of samples is one step."""
    spec, reporter = run.resolved.spec, run.reporter
    read, settling = (1, 1) if spec.sampling else (READ, SETTLING)
    reporter.enter("warmup", spec.warmup)
    yield from steps(run, spec.warmup, WARMUP_PEAKS)
    reporter.enter("memory", read)
    yield from steps(run, 1, STEADY)
    if not spec.sampling:  # one more step, with a peak for each of its phases
        with run.engine.phase_hooks(run, run.meter.enter):
            yield False
            run.meter.synchronize()
    run.meter.close()
    reporter.at(read)
    samples.keep_freed()
    reporter.enter("settle", settling)
    run.gpus.begin("before")
    yield from steps(run, 1)
    run.gpus.end()  # the following steps raise the device's clock again
    yield from steps(run, settling - 1)
    run.log.timed_from = len(run.log.seconds)
    reporter.enter("measure", spec.steps)
    yield from steps(run, spec.steps)
    run.gpus.begin("after")


def training_steps(run: Run, training: Training) -> Order:
    """Order the remaining steps of a training: at most its warm-up, then at least one timed
    step."""
    spec, taken = run.resolved.spec, run.optimizer_steps
    left = spec.warmup + spec.steps - taken
    warmup = min(spec.warmup, left - 1)  # a step at the end of a training is timed only
    left -= warmup

    def after(last: bool) -> None:
        training.after_step(run, last=last)

    run.reporter.enter("warmup", warmup)
    yield from steps(run, warmup, WATCHED_PEAKS, after=lambda last: after(False))
    run.meter.close()
    watched = None if samples.keep_freed() else STEADY
    run.log.timed_from = len(run.log.seconds)
    run.reporter.enter("measure", left)
    yield from steps(run, left, watched, after)
    run.meter.close()


def trial_steps(run: Run) -> Order:
    """Order warm-up and steps only to find out whether they run out of memory."""
    spec = run.resolved.spec
    run.reporter.enter("warmup", spec.warmup)
    yield from steps(run, spec.warmup, WARMUP_PEAKS)
    run.log.timed_from = len(run.log.seconds)
    run.reporter.enter("measure", spec.steps)
    yield from steps(run, spec.steps, STEADY)
    run.meter.close()


def steps(
    run: Run,
    count: int,
    peaks: dict[int, str] | None = None,
    after: Callable[[bool], None] | None = None,
) -> Order:
    """Order ``count`` timed steps. ``after`` is called after each, with whether it was the last.

    Args:
        peaks: index of a step -> the peak phase that begins with it.
    """
    for index in range(count):
        if peaks and index in peaks:
            run.meter.enter(peaks[index])
        yield True
        more = {"loss": float(run.log.losses[-1])} if after else {}
        run.reporter.at(index + 1, **more)
        if after:
            after(index + 1 == count)


def take(run: Run, order: Order) -> None:
    """Take the steps of an order."""
    for clocked in order:
        if clocked:
            timed(run)
        else:
            run.step()
