"""What measuring costs a step: the loop with meter, clock and status files against the bare loop.

    PYTHONPATH=. .venv/bin/python tests/bench/meter_cost.py [--model DiT-S/4] [--steps 20]

Both kinds of step alternate in one process, so that the machine's noise hits them alike; the
ratio of the medians is what counts. Target: under 1 % of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.resolve import resolve
from harness.spec import Spec
from harness.worker import setup
from harness.worker.loop import Log, optimizer_step, timed_step
from harness.worker.meter import make_meter
from harness.worker.status import Reporter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="DiT-S/4")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    spec = Spec(
        recipe="single", model=given.model, global_batch=given.global_batch, device=given.device
    )
    resolved = resolve(spec)
    accelerator = setup.make_accelerator(resolved)
    with tempfile.TemporaryDirectory() as folder:
        compare(resolved, accelerator, Path(folder), given.steps)


def compare(resolved, accelerator, folder: Path, steps: int) -> None:
    """Alternate bare and measured steps, print both medians and their ratio."""
    feed = setup.build_feed(resolved, accelerator)
    meter, reporter = make_meter(accelerator.device), Reporter(folder, 0)
    reporter.peak = meter.peak_bytes
    run = setup.prepare(resolved, feed, accelerator, folder, meter.enter)
    log, bare, measured = Log(), [], []
    reporter.enter("measure", 10**9)
    meter.enter("steady")
    for step in range(2 * steps + 4):
        at = run.trained.optimizer_steps
        if step % 2:
            seconds = clock(lambda at=at: optimizer_step(run, at, log), meter.synchronize)
        else:
            seconds = clock(
                lambda at=at: (timed_step(run, at, log, meter), reporter.at(at)), meter.synchronize
            )
        if step >= 4:
            (bare if step % 2 else measured).append(seconds)
    plain, with_meter = statistics.median(bare), statistics.median(measured)
    print(f"bare step      {plain * 1e3:9.2f} ms")
    print(f"measured step  {with_meter * 1e3:9.2f} ms")
    print(f"meter's cost   {(with_meter / plain - 1) * 100:+9.2f} %   ({steps} steps each)")


def clock(work: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Seconds of ``work`` with the device idle at both ends."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
