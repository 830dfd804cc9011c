"""The sizes that an engine's buffers follow from, as a run would find them: of what is trained.

Where a strategy freezes, adds or replaces weights they are known once the model is edited: on
tensors without storage, in a process of its own (``python -m harness.export.sizes SPEC``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from harness import ROOT
from harness.launch import command
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from strategies.base import BadInput
from strategies.sizes import Sizes

__all__ = ["trained_sizes"]

EDITED = {"frozen_weights", "replaced_layers", "quantized_weights", "other_products"}
"""Traits of recipes that train other weights than the model's own, all of them."""
TIMEOUT = 600.0


def trained_sizes(resolved: Resolved) -> Sizes:
    """Sizes in elements, of all that takes a gradient.

    Raises:
        BadInput: the model could not be edited without storage; the last line of why.
    """
    if not EDITED & resolved.launch.traits:
        return resolved.subject.sizes
    words = [sys.executable, "-m", "harness.export.sizes"]
    words.append(json.dumps(dataclasses.asdict(resolved.spec)))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = command.inherited() | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        raise BadInput(
            f"{resolved.recipe}: what it trains of {resolved.spec.model} could not be counted "
            f"({said[-1] if said else 'no word of why'}); take a recipe without an adapter, or "
            "another --model"
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    return Sizes(**found | {"weights": tuple(found["weights"])})


def main(argv: Sequence[str]) -> int:
    """Edit the model of a spec without storage and print its sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.predict.tracing.storageless import storageless
    from harness.worker.building import Building

    resolved = resolve(Spec(**json.loads(argv[0])))
    with storageless(), FakeTensorMode(allow_non_fake_inputs=True):
        building = Building(resolved)
        building.edit()
        print(json.dumps(resolved.subject.sizes_of(building.module)._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
