"""A recipe's launch file with every number in place, as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harness.export.lines import mixed_precision
from harness.export.sizes import trained_sizes
from harness.resolve import Resolved
from strategies.base import Slot
from strategies.engine import Workload
from strategies.settled import Settled

__all__ = ["YAML", "as_json", "as_yaml", "settle"]

YAML = "accelerate.yaml"


def settle(resolved: Resolved, folder: Path) -> Settled:
    """What the recipe's engine makes of its launch file; the files will lie in ``folder``."""
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
        precision.configure(accelerator, None, launch)  # of the launch alone: no model is there

    word = mixed_precision(resolved)
    return launch.engine.settled(launch, work, word, configure, folder)


def as_yaml(content: Mapping[str, Any], title: str, source: str) -> str:
    """accelerate's file, with what it is above it."""
    head = "".join(f"# {line}\n" for line in (title, f"Source: {source}") if line)
    return head + yaml.safe_dump(dict(content), sort_keys=False)


def as_json(content: Mapping[str, Any]) -> str:
    """A file that the YAML names."""
    return json.dumps(content, indent=2) + "\n"
