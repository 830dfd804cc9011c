"""What one rank has when a recipe is set up: ``loaded-RANK.json`` has the digest of first weights,
bytes of tensors at the peak of "load", and parameters that are not the subject's draws.

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
        run = setup.prepare(resolved, feed, accelerator, options.out / "nvme", tracer.enter)
    wanted = dict(setup.build_model(resolved).named_parameters())
    names = [n for n, _ in run.module.named_parameters()]
    whole = run.engine.whole(run, list(run.module.parameters()))
    # An adapter's layer has another name, and the adapter is not the subject's.
    first = {
        n.replace(".base_layer", ""): p.detach().clone() for n, p in zip(names, whole, strict=True)
    }
    odd = [n for n, p in first.items() if n in wanted and not p.equal(wanted[n].to(p.dtype))]
    odd += sorted(wanted.keys() - first.keys())
    peak = phase_peaks(tracer.record, "device")["load"]
    found = {"digest": run.digest, "peak": peak, "odd": odd}
    write_json(options.out / f"loaded-{os.environ['RANK']}.json", found)


if __name__ == "__main__":
    main()
