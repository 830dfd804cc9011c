"""CPU seconds, memory and page size of a report and a comparison of many rows.

    PYTHONPATH=.:tests .venv/bin/python tests/bench/large_report.py [ROWS] [GROUPS] [--predictions]

ROWS (default 5,000) are spread over GROUPS (default 1); with ``--predictions`` each row has one.
The goal: 5,000 rows within 30 s of CPU and 500 MB, and a page below 5 MB.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from made.results import large_set

from harness import ROOT
from harness.report.figures.predicted import FILE

PREDICTION = ROOT / "docs/results/cpu-2-cores/runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="?", default=5000)
    parser.add_argument("groups", type=int, nargs="?", default=1)
    parser.add_argument("--predictions", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder that keeps the set and its page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        write(folder, options)
        measure("report", folder)
        page = (folder / "report.html").stat().st_size
        print(
            f"page {page / 1e6:.1f} MB, markdown {(folder / 'report.md').stat().st_size / 1e6:.1f}"
        )
        measure("compare", folder, folder)


def write(folder: Path, options: argparse.Namespace) -> None:
    """Write the result files; a group differs in its global batch."""
    prediction = next(PREDICTION.glob(f"*/{FILE}"))
    each = -(-options.rows // options.groups)
    for index, (name, result) in enumerate(large_set(options.rows)):
        batch = 16 * (1 + index // each)
        recipe = "ddp" if index % each == 0 else result.spec.recipe
        spec = dataclasses.replace(result.spec, global_batch=batch, recipe=recipe)
        run = folder / "runs" / f"{name}-{spec.key}"
        run.mkdir(parents=True)
        dataclasses.replace(result, spec=spec).write(run / "result.json")
        if options.predictions:
            shutil.copy(prediction, run / FILE)


def measure(*words: object) -> None:
    """Run a command and print the CPU seconds and the peak memory of its process."""
    code = (
        "import resource, sys; from harness import cli; cli.main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF);"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)"
    )
    line = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    print(words[0], done.stderr.splitlines()[-1], len(done.stdout.splitlines()), "lines")


if __name__ == "__main__":
    main()
