"""Bytes of one rank's tensors at the peak of "load", in ``loaded-RANK.json``.

Started by accelerate instead of ``harness.train``. With ``WHOLE`` set the subject draws nothing by
name.
"""

from __future__ import annotations

import os
import sys

from harness import train
from harness.json_files import write_json
from harness.memory.record import phase_peaks
from harness.memory.tracer import Tracer
from harness.resolve import resolve
from harness.spec import from_arguments
from harness.subjects.dit.subject import Dit
from harness.worker import setup


def main() -> None:
    options = train.parse_options(sys.argv[1:])
    resolved = resolve(from_arguments(options))
    if os.environ.get("WHOLE"):
        Dit.draws = lambda *given: None
    accelerator = setup.make_accelerator(resolved)
    feed, tracer = setup.build_feed(resolved, accelerator), Tracer({"cpu": "device"})
    with tracer:
        setup.prepare(resolved, feed, accelerator, options.out / "nvme", tracer.enter)
    peak = phase_peaks(tracer.record, "device")["load"]
    write_json(options.out / f"loaded-{os.environ['RANK']}.json", peak)


if __name__ == "__main__":
    main()
