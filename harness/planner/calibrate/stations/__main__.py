"""One station: ``python -m harness.planner.calibrate.stations NAME OUT [--device D] [--small]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.json_files import write_json
from harness.planner.calibrate.stations import collective, kernels
from harness.planner.calibrate.stations.kernels import Asked
from harness.system import machine
from harness.system.process import die_with_parent

MEASURES: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "products": kernels.measure,
    "streams": kernels.measure_streams,
    "standing": kernels.measure_overhead,
    "attention": kernels.measure_attention,
    "copies": kernels.measure_copies,
    "collective": collective.measure,
    "rank": collective.take_part,
}


def main(argv: Sequence[str]) -> int:
    """Measure and write the numbers; a failure is the exit code and the last line of stderr."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m harness.planner.calibrate.stations")
    parser.add_argument("name", choices=MEASURES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(argv)
    on_gpu = given.device == "cuda"
    if not on_gpu and given.name != "rank":
        torch.set_num_threads(machine.cores())
    ranks = torch.cuda.device_count() if on_gpu else 1
    asked = Asked(device=torch.device(given.device), small=given.small, ranks=ranks)
    found = MEASURES[given.name](asked)
    if given.name != "rank":
        write_json(given.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
