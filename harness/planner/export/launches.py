"""Sharding, processes and precision of accelerate's and DeepSpeed's settings.

Each launch file of this project is a row: the one with the same facts is the sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.planner.export.files import ACCELERATE, DEEPSPEED, Found, flat
from strategies import CATALOG, launch_file

KEYS = {
    "stage": ("zero_optimization.stage", "deepspeed_config.zero_stage", "--zero_stage"),
    "offload_optimizer": ("zero_optimization.offload_optimizer.device",
                          "deepspeed_config.offload_optimizer_device",
                          "--offload_optimizer_device"),
    "offload_param": ("zero_optimization.offload_param.device",
                      "deepspeed_config.offload_param_device", "--offload_param_device"),
    "ratio": ("zero_optimization.offload_optimizer.ratio",),
    "hpz": ("zero_optimization.zero_hpz_partition_size",),
    "qwz": ("zero_optimization.zero_quantized_weights",),
    "fsdp_offload_params": ("fsdp_config.fsdp_offload_params", "--fsdp_offload_params"),
    "strategy": ("fsdp_config.fsdp_sharding_strategy",),
    "replicas": ("parallelism_config.parallelism_config_dp_replicate_size",),
}  # fmt: skip
"""Fact of a launch -> the settings that say it."""
COUNTS = ("num_processes", "--num_processes", "--nproc_per_node", "--nproc-per-node", "--num_gpus")
PRECISIONS = ("mixed_precision", "--mixed_precision")
OFF = {"none", "false", "no", "", "0", "1", "1.0", "auto", "full_shard"}
"""Values of a fact that ask for nothing."""


@dataclass
class Launch:
    """Start of the processes. ``precision``: accelerate's word, or empty."""

    sharding: str = "single"
    processes: int = 1
    precision: str = ""
    micro_batch: int = 1
    accumulation: int = 1
    means: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)


def launch_of(found: Sequence[Found], processes: int | None = None) -> Launch:
    """Return the launch of the files; ``processes`` replaces their number of GPUs."""
    said: dict[str, Any] = {}
    for one in reversed(found):  # the first file counts, and a command before a file
        own = one.options
        if one.kind not in (ACCELERATE, DEEPSPEED):
            own = {name: own[name] for name in COUNTS if name in own}
        said |= {**own, **one.launcher}
    made = Launch()
    made.processes = processes or _count(said, made)
    made.precision = str(next((said[k] for k in PRECISIONS if k in said), "")).lower()
    for half in ("bf16", "fp16"):
        if not made.precision and str(said.get(f"{half}.enabled")).lower() == "true":
            made.precision = half
    made.micro_batch = whole(said.get("train_micro_batch_size_per_gpu")) or 1
    steps = ("gradient_accumulation_steps", "deepspeed_config.gradient_accumulation_steps")
    made.accumulation = next((n for key in steps if (n := whole(said.get(key)))), 1)
    made.sharding = _sharding(facts(said), made)
    return made


def _count(said: Mapping[str, Any], made: Launch) -> int:
    name = next((key for key in COUNTS if said.get(key) is not None), "")
    count = whole(said[name]) if name else 0
    if name and not count:
        made.assumed.append(f"1 GPU: {name} is {said[name]}; give --gpus N")
    if not name and "--multi_gpu" in said:
        made.assumed.append("1 GPU: --multi_gpu stands without --num_processes; give --gpus N")
    if count:
        made.means.append(f"{count} processes" if count > 1 else "1 process")
    return count or 1


def whole(value: Any) -> int:
    """Return a positive whole number; 0 if the value is none."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 7 else 0


def facts(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that decide the sharding, without those that ask for nothing."""
    kind = str(said.get("distributed_type", "")).upper()
    if "--use_deepspeed" in said or any(key in said for key in KEYS["stage"]):
        kind = "DEEPSPEED"
    if "--use_fsdp" in said:
        kind = "FSDP"
    found = {
        name: next((said[key] for key in keys if key in said), None) for name, keys in KEYS.items()
    }
    told = {n: str(v).lower() for n, v in found.items()}
    told = {n: v for n, v in told.items() if v not in OFF or (n == "stage" and v == "1")}
    return {"kind": {"NO": "", "MULTI_GPU": "", "MULTI_CPU": ""}.get(kind, kind), **told}


def _sharding(asked: Mapping[str, Any], made: Launch) -> str:
    """Return the launch file with the same facts, or the nearest, whose differences are told."""
    if not asked["kind"]:
        return "single" if made.processes == 1 else "ddp"
    own = {}
    for name in launch_file.names():
        file = CATALOG[name].engine("cuda").file
        own[name] = facts({**flat(file.content), **flat(file.settings)})
    alike = {name: one for name, one in own.items() if one["kind"] == asked["kind"]}
    if not alike:
        made.assumed.append(f"ddp: no launch file is of type {asked['kind']}")
        return "single" if made.processes == 1 else "ddp"

    def off(name: str) -> tuple[bool, int]:
        unlike = set(alike[name].items()) ^ set(asked.items())
        return any(key == "stage" for key, _ in unlike), len(unlike)

    best = min(alike, key=off)
    unlike = sorted({key for key, _ in set(alike[best].items()) ^ set(asked.items())})
    if unlike:
        made.assumed.append(f"{best}, which differs in {', '.join(unlike)}")
    made.means.append(best)
    return best
