"""Several recipes' set-up, one after another in one start: first weights, and the peak of loading.

Started by accelerate as ``tests.children.traced`` is. Each rank writes ``loaded-RANK.json``: recipe
-> digest, bytes of tensors at the peak of "load", parameters that are not the subject's draws,
and notes. A recipe that ends in " whole" is one whose subject draws nothing by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from harness import train
from harness.json_files import write_json
from harness.memory.record import phase_peaks
from harness.memory.tracer import Tracer
from harness.spec import Spec, from_arguments
from harness.subjects.dit.subject import Dit
from harness.worker import setup
from tests.children.traced import ready

WHOLE = " whole"


def loaded(spec: Spec, folder: Path) -> dict[str, Any]:
    """What one rank has when ``spec`` is set up, and what it took."""
    gc.collect()
    resolved, accelerator, feed = ready(spec)
    tracer = Tracer({"cpu": "device"})
    with tracer:
        run = setup.prepare(resolved, feed, accelerator, folder / "nvme", tracer.enter)
    wanted = dict(setup.build_model(resolved).named_parameters())
    names = [n for n, _ in run.trained.module.named_parameters()]
    whole = run.trained.engine.whole(run.trained, list(run.trained.module.parameters()))
    # An adapter's layer has another name, and the adapter is not the subject's.
    first = {
        n.replace(".base_layer", ""): p.detach().clone() for n, p in zip(names, whole, strict=True)
    }
    odd = [n for n, p in first.items() if n in wanted and not p.equal(wanted[n].to(p.dtype))]
    missing = sorted(wanted.keys() - first.keys())
    peak = phase_peaks(tracer.record, "device")["load"]
    return {"digest": run.digest, "peak": peak, "odd": odd + missing, "notes": run.notes}


def main() -> None:
    cut = sys.argv.index("--several")
    options = train.parse_options(sys.argv[1:cut])
    spec, found = from_arguments(options), {}
    for recipe in sys.argv[cut + 1 :]:
        one = dataclasses.replace(spec, recipe=recipe.removesuffix(WHOLE))
        with contextlib.ExitStack() as stack:
            if recipe.endswith(WHOLE):
                stack.enter_context(mock.patch.object(Dit, "draws", lambda *given: None))
            found[recipe] = loaded(one, options.out)
    write_json(options.out / f"loaded-{os.environ['RANK']}.json", found)


if __name__ == "__main__":
    main()
