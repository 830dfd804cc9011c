"""Cost of watching a user's script: seconds of a step with the runner against the script alone.

    PYTHONPATH=. .venv/bin/python tests/bench/script_cost.py [--steps 12] [--pairs 4]

Processes of three kinds take turns, each pair in another order:

- alone: the script by itself.
- again: the same once more. Its distance from the first is what this bench cannot resolve.
- watched: the script under ``harness.script.run``, in the steps that a row times.

All have one clock, a hook behind each optimizer step, so that the time between two hooks is one
step with all that the runner does in it. For each pair the medians are set against those of the
script alone; the median of these ratios is printed. Goal: below 1 % of a step. On a busy machine
trust CPU seconds, and the spread of the pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT

KINDS = ("alone", "again", "watched")
SCRIPT = ROOT / "tests" / "script" / "scripts" / "train.py"
SIZE = ("--width", "384", "--depth", "8", "--train_batch_size", "16", "--seed", "1")
WARMUP = 2
FURTHER = 8
"""Steps besides the timed ones; more than a row takes before and after them."""


def main() -> None:
    """Print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--as", dest="kind", choices=KINDS, help="be one of the processes")
    given = parser.parse_args()
    if given.kind:
        print(json.dumps(steps_of(given.kind, given.steps)))
        return
    seen: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for pair in range(given.pairs):
        turn = pair % len(KINDS)
        for kind in KINDS[turn:] + KINDS[:turn]:
            seen[kind].append(asked(kind))
    for kind in KINDS:
        report(kind, seen[kind], seen["alone"])


def asked(kind: str) -> dict[str, float]:
    """Return the medians of one process."""
    words = [sys.executable, *sys.argv, "--as", kind]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def report(kind: str, seen: list[dict[str, float]], alone: list[dict[str, float]]) -> None:
    """Print a kind's medians and its distance from the script alone, with the pairs' spread."""
    middle = {name: statistics.median(one[name] for one in seen) for name in seen[0]}
    print(f"{kind:8} wall {middle['wall'] * 1e3:8.1f} ms  CPU {middle['cpu'] * 1e3:8.1f} ms")
    for name in ("wall", "cpu") if kind != "alone" else ():
        off = sorted(100 * (a[name] / b[name] - 1) for a, b in zip(seen, alone, strict=True))
        spread = f"pairs {off[0]:+.2f} to {off[-1]:+.2f}"
        print(f"         {name} off by {statistics.median(off):+.2f} % ({spread})")


def steps_of(kind: str, steps: int) -> dict[str, float]:
    """Return the medians of this process's steps, in seconds of the clock and of the CPU."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    ends: list[tuple[float, float]] = []
    register_optimizer_step_post_hook(
        lambda *_: ends.append((time.perf_counter(), time.process_time()))
    )
    with tempfile.TemporaryDirectory() as name:
        words = [*SIZE, "--output_dir", f"{name}/output"]
        words += ["--max_train_steps", str(WARMUP + steps + FURTHER)]
        first = watched(Path(name), words, steps) if kind == "watched" else alone(words)
    timed = ends[first - 1 : first + steps]
    apart = [[b - a for a, b in itertools.pairwise(one)] for one in zip(*timed, strict=True)]
    return dict(zip(("wall", "cpu"), map(statistics.median, apart), strict=True))


def alone(words: list[str]) -> int:
    """Run the script by itself; return the index of its first timed step."""
    sys.argv = [str(SCRIPT), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return WARMUP + FURTHER // 2


def watched(folder: Path, words: list[str], steps: int) -> int:
    """Run the script under the runner; return the index of its first timed step."""
    from harness.result import load
    from harness.script import run
    from harness.worker import passes

    given = ["--recipe", "single", "--warmup", str(WARMUP), "--steps", str(steps)]
    code = run.main([*given, "--out", str(folder), "--", str(SCRIPT), *words])
    row = load(folder / "result.json")
    assert code == 0 and len(row.ranks[0].step_seconds) == steps, row.reason
    return WARMUP + passes.READ + passes.SETTLING


if __name__ == "__main__":
    main()
