"""Several recipes one after another in one start: what lives at the traced peak of each.

Started by accelerate as DeepSpeed workers are, with the harness's own words and then the recipes:
two processes, or one that stands for two. Rank 0 writes ``traced.json``: recipe -> categories.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from harness import train
from harness.data.feed import Feed
from harness.json_files import write_json
from harness.memory.traced_step import trace_step
from harness.resolve import Resolved, resolve
from harness.spec import Spec, from_arguments
from harness.worker import setup
from harness.worker.loop import Log, optimizer_step
from strategies.engine import Engine

STEPS = 2


def engine_of(engine: Engine) -> dict[str, str]:
    """The variables by which accelerate tells its workers which engine to take."""
    if engine.file.kind == "FSDP":
        own = {key.upper(): str(value) for key, value in engine.file.content["fsdp_config"].items()}
        return {"ACCELERATE_USE_DEEPSPEED": "false", **own}
    if engine.file.kind != "DEEPSPEED":
        return {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_USE_CPU": "true"}
    name = f"launch_configs/{engine.file.path.stem}.json"
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": name}


def living() -> list[torch.Tensor]:
    """Every tensor of the process, without those that only cycles keep alive."""
    gc.collect()
    return [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]


def ready(spec: Spec) -> tuple[Resolved, Accelerator, Feed]:
    """What a recipe is prepared with, as in a process of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    resolved = resolve(spec)
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.update(engine_of(resolved.launch.engine))
    accelerator = setup.make_accelerator(resolved)
    return resolved, accelerator, setup.build_feed(resolved, accelerator)


def categories(spec: Spec, folder: Path) -> dict[str, Any]:
    """Two steps of ``spec``, then one that rank 0 traces; what earlier recipes left behind is not
    its."""
    before, log = living(), Log()
    resolved, accelerator, feed = ready(spec)
    run = setup.prepare(resolved, feed, accelerator, folder / "nvme", lambda phase: None)
    for step in range(STEPS):
        optimizer_step(run, step, log)
    if not accelerator.is_main_process:
        optimizer_step(run, STEPS, log)
        return {}
    held = [*vars(feed.dataset).values(), *before]
    found = trace_step(run.trained, "cpu", lambda: optimizer_step(run, STEPS, log), held)
    return {**dataclasses.asdict(found), "total": found.total}


def each_recipe(look: Callable[[Spec, Path], dict[str, Any]], name: str) -> None:
    """What ``look`` finds of each recipe that is asked for, in a file of rank 0."""
    cut = sys.argv.index("--several")
    options = train.parse_options(sys.argv[1:cut])
    spec = from_arguments(options)
    each = [dataclasses.replace(spec, recipe=recipe) for recipe in sys.argv[cut + 1 :]]
    found = {one.recipe: look(one, options.out) for one in each}
    if int(os.environ["RANK"]) == 0:
        write_json(options.out / name, found)


if __name__ == "__main__":
    each_recipe(categories, "traced.json")
