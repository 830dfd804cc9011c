"""Keys of launch files: what accelerate and DeepSpeed know, refuse and pass over. No torch.

The table ``launch_keys.json`` is made from the libraries' own classes (``docs.make.launch_keys``).
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from strategies.words import nearest

PATH = Path(__file__).with_name("launch_keys.json")
AUTO = "auto"
"""Value that accelerate replaces by the script's."""
TRUE, FALSE = ("true", "1", "on", "yes", "y", "t"), ("false", "0", "off", "no", "n", "f")
BESIDE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
}  # fmt: skip
"""Keys of ``deepspeed_config`` that accelerate refuses beside a DeepSpeed JSON (1.15,
utils/dataclasses.py, ``_deepspeed_config_checks``)."""
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Sharding strategies of FSDP 1."""
BOUNDS = {
    "gt": (operator.gt, "above"),
    "ge": (operator.ge, "at least"),
    "lt": (operator.lt, "below"),
    "le": (operator.le, "at most"),
}
"""Bound of a field -> its comparison and its words."""


class Checked(NamedTuple):
    """Keys of a file: ``faults`` for which its library refuses it, and those ``passed`` over."""

    faults: list[str]
    passed: list[str]


@functools.cache
def table() -> dict[str, Any]:
    """Return the table of both libraries."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def _near(name: str, known: Iterable[str]) -> str:
    """Return the known name that is like another, after a semicolon; empty if none is."""
    hint = nearest(name, known)
    return f"; {hint}" if hint.startswith("did you mean") else ""


def block_of(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a block of settings; empty if it is none."""
    block = content.get(name)
    return block if isinstance(block, dict) else {}


# ---- DeepSpeed ----


def check_deepspeed(config: Mapping[str, Any], processes: int | None = None) -> Checked:
    """Check a DeepSpeed JSON as DeepSpeed does; ``processes`` is None if the number is unknown."""
    known = table()["deepspeed"]
    found = Checked([], [])
    for name, value in config.items():
        if name in known["removed"]:
            found.faults.append(f"{name}: DeepSpeed has removed it; leave it out")
        elif name in known["models"]:
            _check_model(name, value, known["models"][name], found)
        elif name not in known["read"]:
            top = [one for one in known["read"] if "." not in one]
            found.passed.append(f"{name}: DeepSpeed has no such key{_near(name, top)}")
        elif name in ("optimizer", "scheduler") and not isinstance(value, (dict, type(None))):
            found.faults.append(f"{name} is {value!r:.60}; write a block of settings")
        elif isinstance(value, dict):
            inner = [n.partition(".")[2] for n in known["read"] if n.startswith(f"{name}.")]
            found.passed.extend(
                f"{name}.{key}: DeepSpeed has no such key{_near(key, inner)}"
                for key in value
                if inner and key not in inner
            )
    _check_rules(config, found.faults)
    _check_batch(config, processes, found.faults)
    _check_groups(config, processes, found.faults)
    return found


def _check_groups(config: Mapping[str, Any], processes: int | None, faults: list[str]) -> None:
    """Refuse groups of hpZ that do not divide the processes; larger ones are those of all."""
    zero = block_of(config, "zero_optimization")
    if zero.get("stage") != 3 or not processes:
        return
    size = int(as_number(zero.get("zero_hpz_partition_size", 1), integer=True) or 1)
    if size > 0 and processes % min(size, processes):
        faults.append(
            f"zero_optimization.zero_hpz_partition_size is {size}, which does not divide "
            f"{processes} processes; give a divisor"
        )


def _check_model(above: str, given: Any, fields: Mapping[str, Any], found: Checked) -> None:
    if not isinstance(given, dict):
        found.faults.append(f"{above} is {given!r:.60}; write a block of settings")
        return
    for given_name, value in given.items():
        key, name = f"{above}.{given_name}", named(given_name, fields)
        if key in table()["deepspeed"]["removed"]:
            found.faults.append(f"{key}: DeepSpeed has removed it; leave it out")
        elif name not in fields:
            near = _near(name, fields)
            found.faults.append(f"{key}: Extra inputs are not permitted{near or '; leave it out'}")
        elif value is None and fields[name].get("optional"):
            continue
        elif fields[name]["type"] == "model":
            _check_model(key, value, fields[name]["fields"], found)
        elif value != AUTO and (why := wrong(value, fields[name])):
            found.faults.append(f"{key} is {value!r:.60}; {why}")


def named(name: str, fields: Mapping[str, Any]) -> str:
    """Return the key of ``fields`` that ``name`` means.

    DeepSpeed also takes the names of its fields, which lack the prefix of ZeRO-3's keys.
    """
    return f"stage3_{name}" if name not in fields and f"stage3_{name}" in fields else name


def wrong(value: Any, field: Mapping[str, Any]) -> str:
    """Return what to give instead of a value of a field, by pydantic's rules; empty if it is
    right."""
    kind = field["type"]
    if kind == "bool":
        return "" if truth(value) is not None else "give true or false"
    if kind == "enum":
        known = field["choices"]
        near = ", ".join(map(str, known))
        return "" if not isinstance(value, (list, dict)) and value in known else f"one of {near}"
    if kind in ("int", "float"):
        number = as_number(value, integer=kind == "int")
        if number is None:
            return "give a whole number" if kind == "int" else "give a number"
        for name, (holds, words) in BOUNDS.items():
            if name in field and not holds(number, field[name]):
                return f"give a number {words} {field[name]}"
    if kind == "str":
        return "" if isinstance(value, str) else "give a text"
    return ""


def truth(value: Any) -> bool | None:
    """Return a value as true or false, as pydantic reads it; None if it is neither."""
    word = str(value).lower()
    if isinstance(value, (bool, int, str)):
        return True if word in TRUE else False if word in FALSE else None
    return None


def as_number(value: Any, *, integer: bool) -> int | float | None:
    """Return a value as a number, also of digits in quotes; None if it is none."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            return None
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if math.isnan(number) or (integer and not number.is_integer()):
        return None
    return int(number) if integer else number


def enabled(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a block of the JSON is on."""
    return truth(block_of(config, name).get("enabled")) is True


def _check_rules(config: Mapping[str, Any], faults: list[str]) -> None:
    """Check what DeepSpeed asserts of several keys (0.19.8, runtime/config.py)."""
    zero = block_of(config, "zero_optimization")
    stage = as_number(zero.get("stage", 0), integer=True)
    half = {name for name in ("bf16", "fp16") if enabled(config, name)}
    half |= {"bf16"} if enabled(config, "bfloat16") else set()
    if len(half) > 1:
        faults.append("bf16 and fp16 are both on; keep one of them")
    ratio = as_number(block_of(zero, "offload_optimizer").get("ratio", 1), integer=False)
    if ratio is not None and ratio < 1 and stage != 3:
        faults.append(f"offload_optimizer.ratio is {ratio:g}: only stage 3 offloads a part")
    for block, key in (("bf16", "bf16_master_weights_and_grads"), ("bf16", "bf16_optimizer_states"),
                       ("fp16", "fp16_master_weights_and_grads")):  # fmt: skip
        if truth(block_of(config, block).get(key)) and not stage:
            faults.append(f"{block}.{key} needs ZeRO of stage 1, 2 or 3")
    bf16 = block_of(config, "bf16")
    if truth(bf16.get("bf16_optimizer_states")) and not truth(
        bf16.get("bf16_master_weights_and_grads")
    ):
        faults.append("bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads")
    if stage == 3 and str(config.get("gradient_allreduce_op")).lower() == "sum":
        faults.append("gradient_allreduce_op is sum, which stage 3 does not take")
    if truth(zero.get("compute_grad_norm", True)) is False and stage not in (1, 2):
        faults.append("zero_optimization.compute_grad_norm is false: only stages 1 and 2 take that")


BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_of(config: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Return the whole batch, the micro batch and the accumulation that are numbers in the JSON."""
    numbers = (as_number(config.get(name), integer=True) for name in BATCH)
    global_batch, micro, steps = (None if one is None else int(one) for one in numbers)
    return global_batch, micro, steps


def _check_batch(config: Mapping[str, Any], processes: int | None, faults: list[str]) -> None:
    for name in BATCH:
        value = config.get(name, AUTO)
        number = as_number(value, integer=True)
        if value != AUTO and (number is None or number < 1):
            faults.append(f"{name} is {value!r:.60}; give a whole number from 1")
            return
    global_batch, micro, steps = batch_of(config)
    if global_batch is None:
        return
    given = [n for n in (micro, steps) if n is not None]
    parts = [*given, *([processes] if processes else [])]
    product = functools.reduce(int.__mul__, parts, 1)
    exact = processes and len(given) == 2
    if (exact and global_batch != product) or global_batch % product:
        words = " x ".join(map(str, parts))
        faults.append(
            f"train_batch_size is {global_batch}, which is not {words}"
            f" (micro batch x accumulation x processes); make it {product}, or leave it out"
        )


# ---- accelerate ----


def check_accelerate(content: Mapping[str, Any]) -> Checked:
    """Check accelerate's file as ``accelerate launch`` does."""
    known = table()["accelerate"]
    found = Checked([], [])
    for name in content:
        if name not in known["file"] and name not in known["older"]:
            near = _near(str(name), known["file"]) or "; leave it out"
            found.faults.append(f"{name}: accelerate refuses a file with an unknown key{near}")
    for key in ("distributed_type", "mixed_precision"):
        value = content.get(key)
        value = "NO" if value is False else value  # YAML reads a bare NO so
        choices = known[key]
        given = str(value).lower() if key == "mixed_precision" else value
        if value is not None and given not in choices and not (value == "NO" and "no" in choices):
            found.faults.append(f"{key} is {value!r:.60}; one of {', '.join(choices)}")
    if content.get("distributed_type") is None:
        found.faults.append("distributed_type is missing; name one, such as MULTI_GPU")
    for key in ("num_processes", "num_machines", "machine_rank", "main_process_port"):
        value = content.get(key)
        if value is not None and as_number(value, integer=True) is None:
            found.faults.append(f"{key} is {value!r:.60}; give a whole number")
    for block, fields in known["blocks"].items():
        if isinstance(content.get(block), dict):
            _check_block(block, content[block], fields, found)
        elif content.get(block) is not None:
            found.faults.append(f"{block} is {content[block]!r:.60}; write a block of settings")
    _check_beside(content, found.faults)
    _check_fsdp(content, found.faults)
    return found


def keyed(block: str, name: str) -> str:
    """Return the name by which accelerate knows a key of a block: it adds the block's prefix."""
    start = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}.get(block, "")
    return name if name.startswith(start) else f"{start.rstrip('_')}_{name}"


def _check_block(
    block: str, given: Mapping[str, Any], fields: Mapping[str, Any], found: Checked
) -> None:
    for name, value in given.items():
        field = fields.get(keyed(block, str(name)))
        if field is None:
            near = _near(keyed(block, str(name)), fields)
            found.passed.append(f"{block}.{name}: accelerate has no such key{near}")
        elif "choices" in field and not _among(value, field["choices"]):
            choices = ", ".join(map(str, field["choices"]))
            found.faults.append(f"{block}.{name} is {value!r:.60}; one of {choices}")
    counts = ("zero_stage", "gradient_accumulation_steps")
    for name, value in given.items():
        counted = name in counts or str(name).endswith("_size")
        if counted and value not in (None, AUTO) and as_number(value, integer=True) is None:
            found.faults.append(f"{block}.{name} is {value!r:.60}; give a whole number")


def _among(value: Any, choices: list[Any]) -> bool:
    return str(value).lower() in {str(one).lower() for one in choices}


def _check_beside(content: Mapping[str, Any], faults: list[str]) -> None:
    block = block_of(content, "deepspeed_config")
    if not block.get("deepspeed_config_file"):
        return
    twice = [f"deepspeed_config.{name}" for name in block if name in BESIDE]
    twice += ["mixed_precision"] if content.get("mixed_precision") is not None else []
    if twice and content.get("distributed_type") == "DEEPSPEED":
        faults.append(
            f"{', '.join(twice)} beside deepspeed_config_file: accelerate refuses it; set it in "
            "the JSON alone"
        )


def _check_fsdp(content: Mapping[str, Any], faults: list[str]) -> None:
    """Check FSDP's rules (accelerate 1.15, utils/dataclasses.py and utils/launch.py)."""
    if content.get("distributed_type") != "FSDP":
        return
    block = block_of(content, "fsdp_config")
    own = {keyed("fsdp_config", str(name)): value for name, value in block.items()}
    version = as_number(own.get("fsdp_version", 1), integer=True)
    if version not in (1, 2):
        faults.append(f"fsdp_config.fsdp_version is {own['fsdp_version']!r:.60}; give 1 or 2")
    if truth(own.get("fsdp_activation_checkpointing_offload")):
        if not truth(own.get("fsdp_activation_checkpointing")):
            faults.append(
                "fsdp_activation_checkpointing_offload needs fsdp_activation_checkpointing: true"
            )
        elif version != 2:
            faults.append("fsdp_activation_checkpointing_offload needs fsdp_version: 2")
    strategy = str(own.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    if version == 1 and strategy not in STRATEGIES and strategy not in "12345":
        names = ", ".join(STRATEGIES)
        faults.append(f"fsdp_sharding_strategy is {strategy:.60}; one of {names}")
    policy = own.get("fsdp_auto_wrap_policy")
    known = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    if policy is not None and str(policy).upper() not in known:
        faults.append(f"fsdp_auto_wrap_policy is {policy!r:.60}; one of {', '.join(known)}")
    loads = truth(own.get("fsdp_cpu_ram_efficient_loading"))
    if loads and truth(own.get("fsdp_sync_module_states", True)) is False:
        faults.append(
            "fsdp_cpu_ram_efficient_loading is true and fsdp_sync_module_states false; make it true"
        )
    reshard = own.get("fsdp_reshard_after_forward")
    if reshard is not None and version == 2 and truth(reshard) is None:
        faults.append(f"fsdp_reshard_after_forward is {reshard!r:.60}; FSDP2 takes true or false")
