"""What measuring costs a step, the allocator's settings included: how far is a timed step of a run
from the same step of a process that is not measured at all?

    PYTHONPATH=. .venv/bin/python tests/bench/meter_cost.py [--steps 12] [--pairs 4]

Processes of three kinds take turns, each pair in another order, so that the machine's noise and
what a neighbour leaves behind hit them alike: "plain" has no variable, no meter and bare optimizer
steps; "again" is plain once more, and what it is off by cannot be told from nothing; "measured" is
a run of the harness. For each pair the medians of wall and of CPU seconds are set against plain's.
Goal: below 1 % of a step. On a busy machine trust CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT
from harness.launch.command import ALLOCATOR
from harness.resolve import resolve
from harness.spec import Spec
from harness.worker import samples, setup
from harness.worker.loop import optimizer_step
from harness.worker.meter import make_meter
from harness.worker.passes import SETTLING, measured_steps, take
from harness.worker.status import Reporter

KINDS = ("plain", "again", "measured")
WARMUP = 2
BEFORE = WARMUP + 2 + SETTLING
"""Steps that a measured run takes before its first timed one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="single")
    parser.add_argument("--model", default="DiT-S/4")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--as", dest="kind", choices=KINDS, help="be one of the processes")
    given = parser.parse_args()
    if given.kind:
        print(json.dumps(steps_of(given)))
        return
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for pair in range(given.pairs):
        turn = pair % len(KINDS)
        for kind in KINDS[turn:] + KINDS[:turn]:
            env = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
            env |= ALLOCATOR if kind == "measured" else {}
            words = [sys.executable, *sys.argv, "--as", kind]
            done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            seen[kind].append(json.loads(done.stdout.splitlines()[-1]))
    for kind, found in seen.items():
        wall, cpu = (statistics.median(one[name] for one in found) for name in ("wall", "cpu"))
        print(f"{kind:9} wall {wall * 1e3:8.1f} ms  CPU {cpu * 1e3:8.1f} ms")
        for name in ("wall", "cpu") if kind != "plain" else ():
            pairs = zip(found, seen["plain"], strict=True)
            off = sorted(100 * (a[name] / b[name] - 1) for a, b in pairs)
            spread = f"pairs {off[0]:+.2f} to {off[-1]:+.2f}"
            print(f"          {name} off by {statistics.median(off):+.2f} % ({spread})")


def steps_of(given: argparse.Namespace) -> dict[str, float]:
    """Medians of the seconds and CPU seconds of this process's steps."""
    chosen = {"recipe": given.recipe, "model": given.model, "global_batch": given.global_batch}
    resolved = resolve(Spec(**chosen, steps=given.steps, warmup=WARMUP, device=given.device))
    accelerator = setup.make_accelerator(resolved)
    feed = setup.build_feed(resolved, accelerator)
    setup.rehearse(resolved, accelerator)
    meter = make_meter(accelerator.device)
    measured = given.kind == "measured"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = meter.enter if measured else lambda phase: None
        run = setup.prepare(resolved, feed, accelerator, folder / "nvme", begun)
        log = run.log
        if measured:
            run.folder, run.reporter, run.meter = folder, Reporter(folder, 0), meter
            run.reporter.peak = meter.peak_bytes
            take(run, measured_steps(run))
        else:
            samples.keep_freed()
            for _ in range(BEFORE + given.steps):  # nothing but a clock around them
                before, start = samples.now(), time.perf_counter()
                optimizer_step(run, run.optimizer_steps)
                meter.synchronize()
                log.seconds.append(time.perf_counter() - start)
                log.used.append(samples.now() - before)
            log.timed_from = BEFORE
    cpu = statistics.median(step.cpu_seconds for step in log.used[log.timed_from :])
    return {"wall": statistics.median(log.seconds[log.timed_from :]), "cpu": cpu}


if __name__ == "__main__":
    main()
