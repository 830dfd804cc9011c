"""What a recipe may choose of a DeepSpeed JSON: how many ranks keep a second share of the weights
between them (``group``, hpZ), and what share of the optimizer lies in host memory (``ratio``,
Twin-Flow). Either is there where the JSON has it. And what no JSON may ask for. No torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from strategies.absent import ABSENT

__all__ = ["choices", "fault", "group", "ratio", "refusal", "with_choices", "write"]

HPZ = "zero_hpz_partition_size"
QWZ = "zero_quantized_weights"
OPTIMIZER = "offload_optimizer"
NODE = "node"
"""The group that the launch file gives: as many ranks as a node has GPUs."""

FORCE = "zero_force_ds_cpu_optimizer"
NOT_HERE = {
    "mics_shard_size": "mics",
    "zero_quantized_nontrainable_weights": "quantized_nontrainable_weights",
    "zero_quantized_gradients": "qgz",
    "zenflow": "zenflow",
}
"""Key of a zero_optimization block -> the technique, by its name among the absent."""


def fault(config: Mapping[str, Any]) -> str | None:
    """Why no run can be started by this DeepSpeed config, and the way out."""
    zero = config["zero_optimization"]
    offload = zero.get(OPTIMIZER) or {}
    asked = {name for key, name in NOT_HERE.items() if zero.get(key)}
    for name in sorted(asked | ({"superoffload"} if offload.get("super_offload") else set())):
        return f"there is no {name}: {ABSENT[name]}"
    if offload.get("device", "none") != "none" and config.get(FORCE, True):
        return (
            "accelerate would make the CPU Adam anew, without decoupled weight decay and betas: "
            f'write "{FORCE}": false'
        )
    if zero.get(QWZ) and zero["stage"] != 3:
        return f"{QWZ} is of stage 3, which gathers weights; leave it out"
    if ratio(zero) < 1 and (zero["stage"] != 3 or offload.get("device") != "cpu"):
        return f"{OPTIMIZER} has a ratio, which is of stage 3 and host memory alone; leave it out"
    return None


def group(zero: Mapping[str, Any]) -> int:
    """Neighbouring ranks that have all weights between them once more; 1: none do."""
    return int(zero.get(HPZ, 1))


def ratio(zero: Mapping[str, Any]) -> float:
    """Of the optimizer's elements, the share that is offloaded where any are."""
    return float((zero.get(OPTIMIZER) or {}).get("ratio", 1.0))


def choices(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> what the launch file gives (``Engine.choices``)."""
    found: dict[str, Any] = {"group": NODE} if HPZ in zero else {}
    return found | ({"ratio": ratio(zero)} if "ratio" in (zero.get(OPTIMIZER) or {}) else {})


def with_choices(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config with these choices in it.

    Raises:
        ValueError: a value out of range.
    """
    found = copy.deepcopy(dict(settings))
    zero, size, share = found["zero_optimization"], chosen.get("group"), chosen.get("ratio")
    if size not in (None, NODE):
        if not str(size).isdigit() or int(size) < 2:
            raise ValueError(f"group is {size}; {NODE}, or a whole number of ranks from 2")
        zero[HPZ] = int(size)
    if share is not None:
        if not isinstance(share, (int, float)) or not 0 < share < 1:
            raise ValueError(f"ratio is {share!r}; a share of the optimizer between 0 and 1")
        zero[OPTIMIZER]["ratio"] = float(share)
    return found


def write(config: dict[str, Any], zero: Mapping[str, Any]) -> None:
    """Into the config that accelerate has read from the JSON, what ``zero`` says beside it."""
    if HPZ in zero:
        config["zero_optimization"][HPZ] = zero[HPZ]
    if ratio(zero) < 1:
        config["zero_optimization"][OPTIMIZER]["ratio"] = ratio(zero)


def refusal(zero: Mapping[str, Any], ranks: int) -> str | None:
    """Why so many ranks cannot be in groups of ``group``, and the way out."""
    size = group(zero)
    if size == 1 or (size < ranks and ranks % size == 0):
        return None
    if size >= ranks:
        usable = next((n for n in range(ranks // 2, 1, -1) if ranks % n == 0), None)
        other = f"group={usable}, " if usable else ""
        return (
            f"a second share of the weights in each {size} of {ranks} processes takes memory and "
            f"saves no traffic between groups; take {other}more processes, or zero3"
        )
    return f"{ranks} processes are not groups of {size}; take a group that divides them, or zero3"
