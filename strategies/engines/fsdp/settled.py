"""accelerate's launch file with what a recipe chooses beside it, in words that accelerate reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strategies.layout import Layout

__all__ = ["settled"]


def settled(content: Mapping[str, Any], reshard: bool | int, layout: Layout) -> dict[str, Any]:
    """``content`` of a launch file for a run that reshards so, by ranks laid out so.

    accelerate takes true or false alone; a number of ranks is set in code. Of FSDP 1's word for
    groups of ranks FSDP2 makes nothing: they are dimensions of a mesh there. Source: accelerate
    1.15, utils/dataclasses.py (``FullyShardedDataParallelPlugin``), parallelism_config.py.
    """
    block = {k: v for k, v in content["fsdp_config"].items() if k != "fsdp_sharding_strategy"}
    block["fsdp_reshard_after_forward"] = reshard is not False
    if layout.replicate == 1:
        return {**content, "fsdp_config": block}
    sizes = {"dp_replicate_size": layout.replicate, "dp_shard_size": layout.sharers}
    mesh = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return {**content, "fsdp_config": block, "parallelism_config": mesh}
