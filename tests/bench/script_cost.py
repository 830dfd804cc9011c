"""Cost of watching a user's script: seconds of a watched step against a bare one.

    PYTHONPATH=. .venv/bin/python tests/bench/script_cost.py [--steps 150]

One process runs the script under ``harness.script.run``. Of the steps that a row times every other
is bare: the patches of ``Accelerator`` and the hooks are taken out. Each watched step is set
against the mean of its two bare neighbours, so that a drift of the machine cancels; the line shows
the median difference and its standard error. Goal: below 1 % of a step. The reporter's thread runs
beside bare steps too, so its processor time is counted by itself.
"""

from __future__ import annotations

import argparse
import builtins
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from harness import ROOT

SCRIPT = ROOT / "tests" / "script" / "scripts" / "train.py"
LOOP = "for (clean,) in loader:\n"
SIZES = {"small": ("32", "3", "2"), "large": ("384", "8", "16")}
"""Width, depth and batch of each model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--size", choices=SIZES, help="run this size in this process")
    given = parser.parse_args()
    if given.size:
        measure(given.size, given.steps)
        return
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for size in SIZES:
        words = [sys.executable, __file__, "--steps", str(given.steps), "--size", size]
        subprocess.run(words, cwd=ROOT, env=env, check=True)


def measure(size: str, steps: int) -> None:
    from harness.script import run, watch

    switch = Switch()

    class Kept(watch.Watch):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            switch.watch = self

    width, depth, batch = SIZES[size]
    with tempfile.TemporaryDirectory() as name, mock.patch.object(run, "Watch", Kept):
        script = Path(name, "train.py")
        marked = f"{LOOP}            mark()\n"
        script.write_text(SCRIPT.read_text().replace(LOOP, marked))
        builtins.mark = switch.mark
        given = ["--recipe", "single", "--steps", str(steps), "--out", name, "--", str(script)]
        given += ["--width", width, "--depth", depth, "--train_batch_size", batch]
        code = run.main([*given, "--output_dir", name, "--max_train_steps", str(4 * steps + 40)])
        assert code == 0 and (Path(name) / "result.json").is_file()
    switch.report(size)


class Switch:
    """Takes the runner's patches out for every other timed step, and times all of them."""

    def __init__(self) -> None:
        self.watch: Any = None
        self.bare = False
        self.marks: list[tuple[bool, float]] = []
        self.methods: dict[str, Any] = {}
        self.out: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.threads = self.began = self.spent = 0.0

    def mark(self) -> None:
        if self.watch.reporter.phase != "measure":
            return
        if not self.marks:
            self.began, self.threads = time.perf_counter(), seconds_of_threads()
        self.set(not self.bare)
        self.marks.append((self.bare, time.perf_counter()))
        self.spent = seconds_of_threads() - self.threads

    def set(self, bare: bool) -> None:
        """Take the patches out, or put them back."""
        from accelerate import Accelerator
        from torch.optim import optimizer

        self.bare = bare
        if not bare:
            for name, patched in self.methods.items():
                setattr(Accelerator, name, patched)
            for place, kept in self.out:
                place.update(kept)
            return
        names = ("accumulate", "backward", "clip_grad_norm_")
        self.methods = {name: getattr(Accelerator, name) for name in names}
        hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        hooks += [model._forward_pre_hooks for model in self.watch.wrapped]
        self.out = [(place, dict(place)) for place in hooks]
        assert all(kept for _, kept in self.out)
        for name, patched in self.methods.items():
            setattr(Accelerator, name, patched.__wrapped__)
        for place in hooks:
            place.clear()

    def report(self, size: str) -> None:
        took = [b[1] - a[1] for a, b in zip(self.marks, self.marks[1:], strict=False)]
        kinds = [bare for bare, _ in self.marks[:-1]]
        watched = [i for i in range(1, len(took) - 1) if not kinds[i]]
        off = [took[i] - (took[i - 1] + took[i + 1]) / 2 for i in watched]
        low, middle, high = statistics.quantiles(off, n=4)
        error = 1.25 * (high - low) / 1.35 / math.sqrt(len(off))
        step = statistics.median(t for t, bare in zip(took, kinds, strict=True) if bare)
        whole = self.marks[-1][1] - self.began
        print(
            f"{size}: a bare step takes {step * 1e3:.2f} ms; watching adds {middle * 1e6:+.0f} "
            f"+- {error * 1e6:.0f} us ({100 * middle / step:+.2f} +- {100 * error / step:.2f} %) "
            f"over {len(off)} steps; other threads of Python: {100 * self.spent / whole:.3f} % "
            "of one core"
        )


def seconds_of_threads() -> float:
    """Return the processor time of Python's threads besides this one, in seconds."""
    ticks = 0
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().split()
            ticks += int(fields[13]) + int(fields[14])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
