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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from harness.launch.command import GROUP_SECONDS
from harness.result import Check
from harness.script.model import blocks_of, sizes_of
from harness.script.row import ScriptRow
from harness.worker.setup import with_timeout
from strategies.base import BadInput
from strategies.engine import Workload

PLUGINS = (
    "deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin",
    "torch_tp_plugin", "parallelism_config",
)  # fmt: skip
"""Arguments of ``Accelerator`` that override a launch file."""


class Refused(BaseException):
    """The script cannot run under this launch file. ``str`` has the reason and the remedy.

    It is no Exception, so that a script's own handlers do not catch it.
    """


class Void(BaseException):
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
        raise Refused(
            f"the script passes a {plugin} to Accelerator, which overrides "
            f"{row.launch.engine.file.path.name}; run it under that file alone, without "
            f"{plugin}"
        )
    notes, own = [], given.get("mixed_precision")
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if own is not None and str(own) != asked:
        notes.append(f"the script sets mixed_precision={own}, the launch file {asked}")
    if _compiles(given):
        notes.append("the script compiles its model by accelerate's dynamo arguments")
    found = dict(given)
    for key, value in row.launch.engine.accelerator_kwargs(row.launch).items():
        found[key] = _handlers(found.get(key), value) if key == "kwargs_handlers" else value
    return with_timeout(found, os.environ.get(GROUP_SECONDS)), notes


def _own(plugin: Any) -> bool:
    """Return whether a plugin is the launch file's own, made from its variables, as transformers'
    Trainer passes it."""
    if isinstance(plugin, (list, dict)):
        return False
    try:
        other = type(plugin)()
    except (ValueError, TypeError, ImportError):
        return False
    return _plain(plugin) == _plain(other)


def _plain(plugin: Any) -> dict[str, Any]:
    """Return the plain settings of a plugin, and DeepSpeed's JSON."""
    kinds = (bool, int, float, str, dict, list, type(None))
    found = {name: value for name, value in vars(plugin).items() if not name.startswith("_")}
    return {name: value for name, value in found.items() if isinstance(value, kinds)}


def _compiles(given: Mapping[str, Any]) -> bool:
    """Return whether the arguments of ``Accelerator`` compile the model."""
    backend = given.get("dynamo_backend") or getattr(given.get("dynamo_plugin"), "backend", "no")
    return str(getattr(backend, "value", backend)).lower() != "no"


def _handlers(own: list[Any] | None, added: list[Any]) -> list[Any]:
    """Return the script's handlers with the process group's backend; two of a class are refused."""
    own = list(own or ())
    for handler in added:
        same = next((one for one in own if type(one) is type(handler)), None)
        if same is None:
            own.append(handler)
        else:
            same.backend = handler.backend
    return own


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


def check_objects(row: ScriptRow, models: int, optimizers: int, earlier: int) -> None:
    """Check the objects of one ``prepare`` call that has a trained model.

    Args:
        earlier: number of models with trained weights that other calls prepared before.

    Raises:
        Refused: this engine takes one model, with its optimizer.
    """
    if "shards" not in row.launch.traits:
        return
    name = row.launch.sharding
    if models + earlier > 1:
        raise Refused(
            f"{name} takes one model, and the script prepares {models + earlier}; train one of "
            "them, or take ddp"
        )
    if optimizers != 1:
        raise Refused(
            f"{name} takes a model with one optimizer in one prepare call, and the script gives "
            f"{optimizers} optimizers; take ddp"
        )
