"""A user's own launch file: accelerate's YAML or JSON, or a DeepSpeed JSON alone. No torch.

It is read as its library reads it: what the library refuses is refused, defaults count, and older
names are replaced (``settings_of``). A run starts from a copy with absolute paths (``write``).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from strategies.files import parse_yaml
from strategies.launch_file import LaunchFile, LaunchFileError, text_of
from strategies.launch_keys import (
    AUTO,
    BATCH,
    Checked,
    as_number,
    block_of,
    check_accelerate,
    check_deepspeed,
    keyed,
    named,
    table,
    truth,
)

ZERO, BLOCK, BESIDE = "DEEPSPEED", "deepspeed_config", "deepspeed_config_file"
YAML, JSON = "launch.yaml", "deepspeed.json"
FORCE = "zero_force_ds_cpu_optimizer"
OFFLOADS = ("offload_optimizer", "offload_param")
USUAL_STAGE = 2
"""Stage of accelerate's file that names none (1.15, utils/dataclasses.py, ``DeepSpeedPlugin``)."""


def read(path: Path, processes: int | None = None) -> tuple[LaunchFile, list[str]]:
    """Read a user's launch file; return it, and the keys that its library passes over.

    Args:
        processes: number with which a JSON's batch is compared; None: the file's own, if any.

    Raises:
        LaunchFileError: unreadable, of an unknown kind, or refused by its library; has all faults.
    """
    content, config = _data(path), None
    if "zero_optimization" in content:
        content, config = {"distributed_type": ZERO, BLOCK: {BESIDE: str(path)}}, content
    elif name := block_of(content, BLOCK).get(BESIDE):
        config = _deepspeed_json(path, name)
    count = as_number(content.get("num_processes"), integer=True)
    sure = processes or (int(count) if count and count > 0 else None)
    return launch_file_of(path, content, config, sure)


def _data(path: Path) -> dict[str, Any]:
    text = text_of(path)
    try:
        data = json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except (ValueError, RecursionError) as error:
        raise LaunchFileError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise LaunchFileError(f"{path}: no settings; give accelerate's file or a DeepSpeed JSON")
    return data


def _deepspeed_json(path: Path, name: Any) -> dict[str, Any]:
    """Return the DeepSpeed JSON that a file names, relative to it or to the current folder."""
    for place in (path.parent / str(name), Path(str(name))):
        if place.is_file():
            return _data(place)
    raise LaunchFileError(f"{path}: {BESIDE} is {name!s:.80}, which is not there; give its path")


def launch_file_of(
    path: Path,
    content: Mapping[str, Any],
    config: Mapping[str, Any] | None,
    processes: int | None = None,
) -> tuple[LaunchFile, list[str]]:
    """Return the launch file of accelerate's settings and a DeepSpeed JSON, and the keys that their
    libraries pass over.

    Raises:
        LaunchFileError: a library refuses them; has all faults.
    """
    checked = _checks(content, config, processes)
    if checked.faults:
        raise LaunchFileError(f"{path}: {'; '.join(checked.faults)}")
    kind, plain = kind_of(content), dict(copy.deepcopy(content))
    settings = settings_of(content, config) if kind == ZERO else {}
    plain |= {"distributed_type": kind}
    if kind == ZERO:
        plain[BLOCK] = plain.get(BLOCK) or {}
    if "fsdp_config" in plain:
        plain["fsdp_config"] = fsdp_of(plain)
    title = f"launch file {path.name}"
    file = LaunchFile(
        path=path, kind=kind, title=title, content=plain, settings=settings, own=False
    )
    return file, checked.passed


def kind_of(content: Mapping[str, Any]) -> str:
    """Return accelerate's distributed type; YAML reads a bare NO as false."""
    kind = content.get("distributed_type")
    return "NO" if kind is False else str(kind)


def _checks(
    content: Mapping[str, Any], config: Mapping[str, Any] | None, processes: int | None
) -> Checked:
    """Check both files; ``processes`` is None if their number is unknown."""
    found = check_accelerate(content)
    if config is not None:
        more = check_deepspeed(config, processes)
        found.faults.extend(more.faults)
        found.passed.extend(more.passed)
        if kind_of(content) == ZERO and "zero_optimization" not in config:
            found.faults.append("zero_optimization is missing; accelerate needs the block")
    return found


def fsdp_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return FSDP's settings by accelerate's full names, with truths in place of their texts."""
    block = content.get("fsdp_config") or {}
    found = {keyed("fsdp_config", str(name)): value for name, value in block.items()}
    truths = ("offload_params", "reshard_after_forward", "activation_checkpointing",
              "activation_checkpointing_offload", "cpu_ram_efficient_loading")  # fmt: skip
    for name in (f"fsdp_{one}" for one in truths):
        if isinstance(found.get(name), str) and truth(found[name]) is not None:
            found[name] = truth(found[name])
    if (version := as_number(found.get("fsdp_version"), integer=True)) is not None:
        found["fsdp_version"] = version
    return found


def on_cpu(file: LaunchFile) -> LaunchFile:
    """Return the file as accelerate needs it on a machine without a GPU, where its GPU types train
    unconnected models (``launch_configs/ddp.cpu.yaml``)."""
    if file.kind not in ("NO", "MULTI_GPU"):
        return file
    more: dict[str, Any] = {"use_cpu": True}
    if file.kind == "MULTI_GPU":
        more |= {"distributed_type": "MULTI_CPU", "mpirun_config": {"multi_gpu": True}}
    content = {**file.content, **more}
    return dataclasses.replace(file, content=content, kind=content["distributed_type"])


# ---- DeepSpeed ----


def settings_of(content: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a DeepSpeed JSON with plain values by their present names; without one, what
    accelerate makes of its own keys."""
    made = copy.deepcopy(dict(config)) if config is not None else _of_keys(content)
    fields = table()["deepspeed"]["models"]["zero_optimization"]
    zero = _plain(block_of(made, "zero_optimization"), fields)
    for older, name in {"cpu_offload": OFFLOADS[0], "cpu_offload_param": OFFLOADS[1]}.items():
        if zero.pop(older, None):
            zero.setdefault(name, {"device": "cpu"})
    zero.setdefault("stage", 0)
    made["zero_optimization"] = zero
    if "bfloat16" in made:
        made.setdefault("bf16", made.pop("bfloat16"))
    for name in ("bf16", "fp16"):
        made[name] = {"enabled": AUTO if config is None else False, **(made.get(name) or {})}
    for name in BATCH:
        made.setdefault(name, AUTO)
    made[FORCE] = False  # else accelerate makes the CPU Adam anew, without its settings
    return made


def _plain(given: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block with numbers and truths in place of their texts."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = named(key, fields)
        field = fields.get(name, {"type": "any"})
        kind = field["type"]
        if value == AUTO or value is None:
            found |= {name: value} if value is not None else {}
        elif kind == "model":
            found[name] = _plain(value, field["fields"])
        elif kind == "bool":
            found[name] = truth(value)
        elif kind in ("int", "float"):
            found[name] = as_number(value, integer=kind == "int")
        else:
            found[name] = value
    return found


def _of_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON that accelerate makes without one (``DeepSpeedPlugin``, 1.15)."""
    own = content.get(BLOCK) or {}
    zero: dict[str, Any] = {"stage": as_number(own.get("zero_stage", USUAL_STAGE), integer=True)}
    for name in OFFLOADS:
        device = str(own.get(f"{name}_device") or "none").lower()
        path = own.get(f"{name}_nvme_path")
        zero[name] = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    steps = as_number(own.get(BATCH[2], AUTO), integer=True)
    return {BATCH[2]: AUTO if steps is None else steps, "zero_optimization": zero}


# ---- copies ----


def opened(file: LaunchFile) -> LaunchFile:
    """Return a file that leaves batch, clipping and precision to a recipe, as those in
    ``launch_configs`` do."""
    content = {k: v for k, v in file.content.items() if k not in ("mixed_precision", "fp16")}
    settings = file.settings
    if file.kind == ZERO:
        half = {name: {"enabled": AUTO} for name in ("bf16", "fp16")}
        settings = {**settings, **dict.fromkeys(BATCH, AUTO), **half, "gradient_clipping": 0.0}
    return dataclasses.replace(file, content=content, settings=settings)


def write(file: LaunchFile, folder: Path) -> Path:
    """Write a user's file, and the DeepSpeed JSON of its settings, to ``folder``; return the
    YAML's path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = copy.deepcopy(file.content)
    if file.kind == ZERO:
        own = {k: v for k, v in (content.get(BLOCK) or {}).items() if k in KEPT}
        own.setdefault("zero3_init_flag", False)
        content[BLOCK] = {**own, BESIDE: os.path.abspath(folder / JSON)}
        content.pop("mixed_precision", None)
        text = json.dumps(file.settings, indent=1)
        (folder / JSON).write_text(text, encoding="utf-8")
    content.setdefault("num_processes", 1)
    (folder / YAML).write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder / YAML


KEPT = ("zero3_init_flag", "deepspeed_moe_layer_cls_names")
"""Keys of ``deepspeed_config`` that a copy beside a JSON keeps."""
