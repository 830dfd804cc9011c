"""Table of the keys of launch files that accelerate and DeepSpeed know, made from their classes.

Run it after an update of either library: python -m docs.make.launch_keys
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
import types
import typing
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed looks for a GPU's driver

from strategies.launch_keys import PATH

BOUNDS = ("gt", "ge", "lt", "le")
BLOCKS = {
    "deepspeed": "deepspeed_config", "fsdp": "fsdp_config", "fp8": "fp8_config",
    "parallelism_config": "parallelism_config", "megatron_lm": "megatron_lm_config",
    "mpirun": "mpirun_config",
}  # fmt: skip
"""Beginning of the title of a group of options of ``accelerate launch`` -> block of its file."""


class Recorder(dict[str, Any]):
    """Settings that record the names by which they are read."""

    def __init__(self, data: Mapping[str, Any], above: str, read: set[str]) -> None:
        super().__init__(data)
        self.above, self.read = above, read

    def _seen(self, key: str, value: Any) -> Any:
        self.read.add(self.above + key)
        return Recorder(value, f"{self.above}{key}.", self.read) if type(value) is dict else value

    def get(self, key: Any, default: Any = None) -> Any:
        return self._seen(key, super().get(key, default))

    def __getitem__(self, key: Any) -> Any:
        return self._seen(key, super().__getitem__(key))

    def __contains__(self, key: Any) -> bool:
        return self._seen(str(key), True) and super().__contains__(key)

    def keys(self) -> Any:
        return self  # "NAME in settings.keys()" is recorded too

    def __copy__(self) -> Recorder:
        return self


def _plain(value: Any) -> Any:
    """Return a default as JSON has it; None if it is no plain value."""
    value = getattr(value, "value", value)
    return value if isinstance(value, (bool, int, float, str)) else None


def field(info: Any) -> dict[str, Any]:
    """Return the type, choices, bounds and default of a field of a pydantic model."""
    found = _of_type(info.annotation)
    for bound in info.metadata:
        found |= {name: getattr(bound, name) for name in BOUNDS if hasattr(bound, name)}
    extra = info.json_schema_extra or {}
    if extra.get("deprecated"):
        found["deprecated"] = str(extra.get("new_param", ""))
    if (default := _plain(info.default)) is not None:
        found["default"] = default
    return found


def _of_type(kind: Any) -> dict[str, Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [one for one in typing.get_args(kind) if one is not type(None)]
        optional = {"optional": True} if len(members) < len(typing.get_args(kind)) else {}
        return {**(_of_type(members[0]) if len(members) == 1 else {"type": "any"}), **optional}
    if typing.get_origin(kind) is typing.Literal:
        return {"type": "enum", "choices": list(typing.get_args(kind))}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"type": "enum", "choices": [one.value for one in kind]}
    if hasattr(kind, "model_fields"):
        return {"type": "model", "fields": model(kind)}
    known = {bool: "bool", int: "int", float: "float", str: "str"}
    return {"type": known.get(kind, "any")}


def model(kind: Any) -> dict[str, Any]:
    """Return the fields of a pydantic model by the names that a file gives them."""
    return {info.alias or name: field(info) for name, info in kind.model_fields.items()}


def of_deepspeed() -> dict[str, Any]:
    """Return DeepSpeed's models by block, other keys that it reads, and removed ones."""
    import deepspeed
    from deepspeed.compile.config import CompileConfig
    from deepspeed.runtime import config, precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "fp16": precision_config.DeepSpeedFP16Config,
        "bf16": precision_config.DeepSpeedBF16Config,
        "compile": CompileConfig,
    }
    removed = config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    above = {f"zero_optimization.{n}": t for n, t in config._REMOVED_ZERO_CONFIG_KEYS.items()}
    return {
        "version": deepspeed.__version__.partition("+")[0],
        "models": {name: model(kind) for name, kind in models.items()},
        "read": sorted(_read(config, set(models)) - set(removed)),
        "removed": {**dict.fromkeys(removed, ""), **dict.fromkeys(above, "")},
    }


def _read(config: Any, models: set[str]) -> set[str]:
    """Return the names that DeepSpeed reads outside of its models, nested ones joined by dots."""
    read: set[str] = set()
    blocks = ("optimizer", "scheduler", "activation_checkpointing", "data_types", "checkpoint",
              "aio", "torch_autocast", "timers", "data_efficiency", "hybrid_engine",
              "tensor_parallel", "tensorboard", "wandb", "csv_monitor", "comet")  # fmt: skip
    given: dict[str, Any] = {"train_batch_size": 1, **{name: {} for name in blocks}}
    given["optimizer"] = {"type": "adam", "params": {}}
    config.DeepSpeedConfig(Recorder(given, "", read))
    read |= {"optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params"}
    return {name for name in read if name.split(".")[0] not in models or name in models}


def of_accelerate() -> dict[str, Any]:
    """Return the fields of accelerate's file, the keys of its blocks, and those that it refuses
    beside a DeepSpeed JSON."""
    import accelerate
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.dataclasses import DistributedType, PrecisionType

    blocks: dict[str, dict[str, Any]] = {}
    titles = [group for group in launch_command_parser()._action_groups if group.title]
    for group in titles:
        for action in group._group_actions:
            starts = [start for start in BLOCKS if action.dest.startswith(start)]
            name = BLOCKS[starts[0]] if starts else ""
            name = "deepspeed_config" if group.title.startswith("DeepSpeed") else name
            name = "dynamo_config" if action.dest.startswith("dynamo_") else name
            if name:
                told = {"choices": list(action.choices)} if action.choices else {}
                default = _plain(action.default)
                told |= {"default": default} if default not in (None, "==SUPPRESS==") else {}
                blocks.setdefault(name, {})[action.dest] = told
    # Read by getattr alone (utils/launch.py, prepare_multi_gpu_env).
    blocks["fsdp_config"].setdefault("fsdp_ignored_modules", {})
    return {
        "version": accelerate.__version__,
        "file": {f.name: str(f.type) for f in dataclasses.fields(ClusterConfig)},
        "older": ["fp16", "dynamo_backend"],
        "blocks": {name: blocks[name] for name in sorted(blocks)},
        "distributed_type": [one.value for one in DistributedType],
        "mixed_precision": list(PrecisionType.list()),
    }


def made() -> dict[str, Any]:
    """Return the table."""
    return {"accelerate": of_accelerate(), "deepspeed": of_deepspeed()}


def main() -> None:
    """Write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PATH.write_text(json.dumps(made(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
