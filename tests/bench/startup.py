"""What the harness costs a run: start-up by phase, from one real launch of each recipe.

    PYTHONPATH=. .venv/bin/python tests/bench/startup.py [RECIPE ...]

``outside`` is what the worker does not see of the wall time: accelerate's own start, the
interpreter, imports before the first status, and the shutdown.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness.launch import launch
from harness.phases import RUN_PHASES
from harness.resolve import resolve
from harness.spec import Spec

PHASES = [phase for phase in RUN_PHASES if phase not in ("profile", "done")]


def main() -> None:
    recipes = sys.argv[1:] or ["single", "ddp", "zero2", "zero3"]
    print("seconds".ljust(16), *(f"{p:>9}" for p in (*PHASES, "outside", "wall")))
    for recipe in recipes:
        processes = 1 if recipe.startswith("single") else 2
        spec = Spec(recipe=recipe, model="DiT-T/4", global_batch=8, processes=processes)
        with tempfile.TemporaryDirectory() as folder:
            result = launch.run(resolve(spec), Path(folder) / "run", timeout=300)
        if not result.ranks or result.launch is None:
            print(recipe.ljust(16), result.status.value, result.reason)
            continue
        seconds = [result.ranks[0].phase_seconds.get(p, 0.0) for p in PHASES]
        wall = result.launch.wall_seconds
        print(recipe.ljust(16), *(f"{s:9.2f}" for s in (*seconds, wall - sum(seconds), wall)))


if __name__ == "__main__":
    main()
