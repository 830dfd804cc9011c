"""A recipe's launch file as text, with every number resolved."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness import ROOT
from harness.launch import command
from harness.planner.adapters import adapter_of
from harness.planner.adapters.base import ResolvedConfig
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from strategies.base import BadInput, Sizes, Slot
from strategies.engine import Workload

YAML = "accelerate.yaml"


def mixed_precision(resolved: Resolved) -> str:
    """Return accelerate's word for the recipe's precision: no, bf16 or fp16."""
    part = resolved.recipe.in_slot(Slot.PRECISION)
    if part.name == "fp16":  # its own words need torch, for the loss scale
        return "fp16"
    return part.accelerator_kwargs(resolved.launch).get("mixed_precision", "no")


EDITED = {"frozen_weights", "replaced_layers", "quantized_weights", "other_products"}
"""Traits of recipes that do not train all of the model's own weights."""
TIMEOUT = 600.0


def trained_sizes(resolved: Resolved) -> Sizes:
    """Return the sizes, in elements, of all weights with a gradient: an engine's buffers follow.

    If a strategy freezes, adds or replaces weights, the model is edited on tensors without storage,
    in its own process (``python -m harness.planner.export.settled``).

    Raises:
        BadInput: the model could not be edited without storage; has the last line of the error.
    """
    if not EDITED & resolved.launch.traits:
        return resolved.subject.sizes
    words = [sys.executable, "-m", "harness.planner.export.settled"]
    words.append(json.dumps(dataclasses.asdict(resolved.spec)))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = command.inherited() | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        raise BadInput(
            f"{resolved.recipe}: the trained parameters of {resolved.spec.model} could "
            f"not be counted ({said[-1] if said else 'no message'}); take a recipe "
            "without an adapter, or another --model"
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    return Sizes(**found | {"weights": tuple(found["weights"])})


def main(argv: Sequence[str]) -> int:
    """Edit a spec's model without storage and print its sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.planner.tracing.shortcuts import storageless
    from harness.worker.setup import Building

    resolved = resolve(Spec(**json.loads(argv[0])))
    with storageless(), FakeTensorMode(allow_non_fake_inputs=True):
        building = Building(resolved)
        building.edit()
        print(json.dumps(resolved.subject.sizes_of(building.module)._asdict()))
    return 0


def settle(resolved: Resolved, folder: Path) -> ResolvedConfig:
    """Return the engine's resolved launch file; the files will be in ``folder``."""
    recipe, launch = resolved.recipe, resolved.launch
    precision = recipe.in_slot(Slot.PRECISION)

    def work(scratch: Path) -> Workload:
        return Workload(
            micro_batch=resolved.micro_batch,
            clip=resolved.settings.grad_clip,
            sizes=trained_sizes(resolved),
            scratch=scratch,
            layout=launch.layout,
        )

    def configure(accelerator: Any) -> None:
        precision.configure(accelerator, None, launch)  # by the launch alone, without a model

    word = mixed_precision(resolved)
    adapter = adapter_of(launch.engine)
    return adapter.resolved_config(launch, work, word, configure, folder)


def as_yaml(content: Mapping[str, Any], title: str, source: str) -> str:
    """Return accelerate's file, with its title and source as comments."""
    head = "".join(f"# {line}\n" for line in (title, f"Source: {source}") if line)
    return head + yaml.safe_dump(dict(content), sort_keys=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
