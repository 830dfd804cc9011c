"""Set what a launch file leaves open for a script: process group, clipping, buffer sizes.

Without it some launches train something else, without an error:

- accelerate finds no backend on a CPU, and each rank trains alone (``accelerate.state``).
- accelerate registers transformers' ZeRO-3 configuration also if the file says
  ``zero3_init_flag: false``; ``from_pretrained`` then shards frozen models that no engine gathers.
- DeepSpeed clips by its JSON alone: ``clip_grad_norm_`` only returns a norm.
- accelerate cannot fill the JSON's "auto" buffer sizes without the model's hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from harness.launch.command import GROUP_SECONDS
from harness.result import Check
from harness.script.model import averages_here, blocks_of
from harness.script.row import ScriptRow
from harness.worker.setup import with_timeout
from strategies.base import BadInput
from strategies.engine import Workload
from strategies.survey import sizes_of

PLUGINS = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin",
    "torch_tp_plugin", "parallelism_config",
)  # fmt: skip
"""Arguments of ``Accelerator`` that override a launch file."""


class Stop(BaseException):
    """Ends the script. It is no Exception, so that a script's own handlers do not catch it."""


class Finished(Stop):
    """The last measured step has ended."""


class Refused(Stop):
    """The script cannot run under this launch file. ``str`` has the reason and the remedy."""


class Void(Stop):
    """The run is not the requested one: a failed check of the audit, and the remedy."""

    def __init__(self, name: str, asked: Any, found: Any, way_out: str) -> None:
        super().__init__(f"{name}: expected {asked}, found {found}; {way_out}")
        self.check = Check(name=name, asked=asked, found=found, ok=False)
        self.way_out = way_out


KEEP = "do not set device, backend or rank variables in the script; accelerate sets them"
MET = "processes that train together (if 1, the ranks never met)"
"""Name of the check that all started ranks share one process group."""


# ---- the Accelerator ----


def accelerator_arguments(
    row: ScriptRow, given: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the script's ``Accelerator`` as this launch needs them, and what the
    script sets against the launch file, one line each.

    Raises:
        Refused: the script brings a plugin of its own.
    """
    plugin = next((n for n in PLUGINS if given.get(n) is not None and not _own(given[n])), None)
    if plugin is not None:
        file = row.launch.engine.file.path.name
        text = f"the script passes a {plugin} to Accelerator, which overrides {file}"
        raise Refused(f"{text}; run it under that file alone, without {plugin}")
    notes, own = [], given.get("mixed_precision")
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if own is not None and str(own) != asked:
        notes.append(f"the script sets mixed_precision={own}, the launch file {asked}")
    backend = given.get("dynamo_backend") or getattr(given.get("dynamo_plugin"), "backend", "no")
    if str(getattr(backend, "value", backend)).lower() != "no":
        notes.append("the script compiles its model by accelerate's dynamo arguments")
    found, engine = dict(given), row.launch.engine
    for key, value in engine.accelerator_kwargs(row.launch).items():
        if key != "kwargs_handlers":
            found[key] = value
            continue
        own_handlers = found[key] = list(found.get(key) or ())
        for handler in value:  # accelerate refuses two of a class
            same = [one for one in own_handlers if type(one) is type(handler)]
            for one in same:
                one.backend = handler.backend
            if not same:
                own_handlers.append(handler)
    return with_timeout(found, os.environ.get(GROUP_SECONDS)), notes


def _own(plugin: Any) -> bool:
    """Return whether a plugin is the launch file's own, made from its variables, as transformers'
    Trainer passes it."""
    if isinstance(plugin, (list, dict)):
        return False
    kinds = (bool, int, float, str, dict, list, type(None))  # plain settings, and DeepSpeed's JSON
    try:
        mine, its = (
            {k: v for k, v in vars(one).items() if not k.startswith("_") and isinstance(v, kinds)}
            for one in (plugin, type(plugin)())
        )
    except (ValueError, TypeError, ImportError):
        return False
    return mine == its


def check_variables(row: ScriptRow) -> None:
    """Check that the script has kept the launcher's variables, by which the ranks meet.

    Raises:
        Void: each rank would train alone.
    """
    started, known = row.spec.processes, int(os.environ.get("WORLD_SIZE", "1"))
    if known != started:
        raise Void(MET, started, known, KEEP)


def check_ranks(accelerator: Any, row: ScriptRow) -> None:
    """Check that the ranks of the launch have met, under the engine of the launch file.

    Raises:
        Void: they train alone, or under another engine.
    """
    started, met = row.spec.processes, accelerator.num_processes
    if met != started:
        raise Void(MET, started, met, KEEP)
    wanted, found = row.launch.engine.file.kind, accelerator.distributed_type.value
    if not row.launch.engine.runs(accelerator):
        text = "find the plugin or variable in the script that chooses another engine"
        raise Void("engine of the launch file", wanted, found, text)


# ---- prepare ----


def settle_prepare(
    accelerator: Any, row: ScriptRow, models: list[nn.Module], micro: int | None, scratch: Path
) -> None:
    """Fill in what the engine needs before it prepares ``models``; ``micro`` is the batch of the
    loader in the same call.

    Raises:
        Refused: this engine cannot take them.
    """
    for module in models:
        blocks = blocks_of(module)
        work = Workload(
            micro_batch=micro or 0,
            clip=row.clip or 0.0,
            sizes=sizes_of(module, blocks),
            scratch=scratch,
            layout=row.launch.layout,
        )
        try:
            row.launch.engine.adopt_model(accelerator, module, blocks, work)
        except BadInput as error:
            raise Refused(str(error)) from None


def check_objects(
    row: ScriptRow,
    models: Sequence[nn.Module],
    frozen: Sequence[nn.Module],
    optimizers: Sequence[Any],
    earlier: int,
    placed: bool,
) -> None:
    """Check the objects of one ``prepare`` call.

    Args:
        models: those with trained weights; ``frozen`` has the others.
        earlier: number of models with trained weights that other calls prepared before.
        placed: whether the call has ``device_placement``.

    Raises:
        Refused: this engine cannot take them.
    """
    traits, text, count = row.launch.traits, "", len(models) + earlier
    shards = "shards" in traits
    if placed and "own_step" in traits:
        text = "does not support device_placement, which the script passes to prepare"
        text += "; take ddp or fsdp2"
    elif frozen and shards:
        kind = type(frozen[0]).__name__
        text = f"takes one model, with its optimizer, and the script prepares {kind} without "
        text += "trained weights; take single, or ddp on GPUs"
    elif models and shards and count > 1:
        text = f"takes one model, and the script prepares {count}; train one of them, or take ddp"
    elif models and shards and len(optimizers) != 1:
        text = "takes a model with one optimizer in one prepare call, and the script gives "
        text += f"{len(optimizers)} optimizers; take ddp"
    elif models and "split_parameters" in traits and averages_here():
        text = "shards the parameters that the script's EMA reads whole; turn the script's EMA "
        text += "off, or take zero2 or ddp"
    if text:
        raise Refused(f"{row.launch.sharding} {text}")
