"""Facts read back from a DeepSpeed engine: stage, shard sizes, offload, skipped steps.

Attribute names are DeepSpeed's own (0.19); evidence fails loudly where one is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.base import Trained, demand

if TYPE_CHECKING:
    import torch

# A shard is padded to a multiple of the group size and of DeepSpeed's alignment.
PADDING = 0.02


def evidence(trained: Trained) -> dict[str, Any]:
    """Stage, what share of the elements this rank holds, where they live; all read from the engine.

    Raises:
        NotInForce: the engine runs another stage, holds another share, or skipped a step.
    """
    engine, launch = trained.engine, trained.launch
    demand(engine is not None, f"the model is a {type(trained.model).__name__}, not an engine")
    stage = int(engine.zero_optimization_stage())
    demand(stage == launch.zero_stage, f"the engine runs stage {stage}, not {launch.zero_stage}")
    demand(engine.skipped_steps == 0, f"the engine skipped {engine.skipped_steps} steps")
    facts = {"stage": stage, "skipped_steps": engine.skipped_steps, **_shares(trained)}
    facts |= _gradients(trained) | _offload(trained)
    facts["buckets"] = buckets(engine)
    return facts


def buckets(engine: Any) -> dict[str, int]:
    """The buffer sizes in force, in elements."""
    config = engine.config["zero_optimization"]
    sizes = ("size", "stage3_prefetch", "stage3_max", "stage3_param")
    return {k: v for k, v in config.items() if any(word in k for word in sizes)}


def _shares(trained: Trained) -> dict[str, float]:
    """Share of the float32 master, and under stage 3 of the parameters, that this rank holds."""
    total = sum(_full_numel(p) for p in trained.module.parameters() if p.requires_grad)
    expected = _share(trained)
    held = sum(master.numel() for _, master in masters(trained)) / total
    demand(
        abs(held - expected) <= PADDING,
        f"this rank holds {held:.3f} of the optimizer's elements, {expected:.3f} were expected",
    )
    facts = {"optimizer_share": round(held, 4)}
    if trained.launch.zero_stage == 3:
        parts = [p for p in trained.module.parameters() if p.requires_grad]
        demand(hasattr(parts[0], "ds_tensor"), "the parameters are not partitioned")
        share = sum(p.ds_tensor.ds_numel for p in parts) / total
        demand(
            abs(share - expected) <= PADDING,
            f"this rank holds {share:.3f} of the parameters, {expected:.3f} were expected",
        )
        facts["parameter_share"] = round(share, 4)
        facts["gathered_elements"] = sum(p.numel() for p in parts)
    return facts


def _full_numel(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def _gradients(trained: Trained) -> dict[str, Any]:
    """Whether the engine reduces gradients to their owner alone (stage 2 and 3)."""
    optimizer, stage = trained.engine.optimizer, trained.launch.zero_stage
    if stage == 3:
        total = sum(_full_numel(p) for p in trained.module.parameters() if p.requires_grad)
        share, expected = optimizer.grad_partitions_flat_buffer.numel() / total, _share(trained)
        demand(
            abs(share - expected) <= PADDING,
            f"this rank keeps {share:.3f} of the gradients, {expected:.3f} were expected",
        )
        return {"gradient_share": round(share, 4)}
    partitioned = bool(optimizer.partition_gradients)
    demand(partitioned == (stage == 2), f"gradients partitioned: {partitioned} at stage {stage}")
    return {"gradients_partitioned": partitioned}


def _share(trained: Trained) -> float:
    return 1 / trained.launch.processes


def _offload(trained: Trained) -> dict[str, Any]:
    """Where optimizer and parameters live: the devices of the tensors, and files on NVMe."""
    engine, launch = trained.engine, trained.launch
    facts: dict[str, Any] = {}
    flags = {"cpu_offload": launch.offload_optimizer}
    if launch.zero_stage == 3:
        flags = {
            "offload_optimizer": launch.offload_optimizer,
            "offload_param": launch.offload_param,
            "swap_optimizer": "nvme" if launch.offload_optimizer == "nvme" else "none",
        }
    for flag, place in flags.items():
        found = bool(getattr(engine.optimizer, flag))
        demand(found == (place != "none"), f"the engine's {flag} is {found}, asked is {place}")
    if launch.offload_optimizer == "cpu":
        devices = {master.device.type for _, master in masters(trained)}
        demand(devices == {"cpu"}, f"the optimizer's weights live on {devices}, not in host memory")
        facts["optimizer_on"] = "cpu"
    if launch.offload_optimizer == "nvme":
        files = list(swap_files(engine))
        demand(bool(files), "no swap file of the optimizer was found")
        facts["optimizer_on"] = "nvme"
        facts["nvme_bytes"] = sum(size for _, size in files)
    if launch.offload_param == "cpu":
        places = {p.ds_tensor.device.type for p in trained.module.parameters() if not p.ds_persist}
        demand(places == {"cpu"}, f"parameter shards live on {places}, not in host memory")
        facts["parameters_on"] = "cpu"
    return facts


def whole(parameters: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context in which parameters are whole also where ZeRO-3 split them; all ranks enter it."""
    if not any(hasattr(p, "ds_tensor") for p in parameters):
        return contextlib.nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    return GatheredParameters(parameters)


def settle(trained: Trained) -> None:
    """End the gathers that ZeRO-3 began ahead of a forward pass that did not come: a parameter in
    flight cannot be made whole (``whole``) and split again. All ranks call it."""
    if trained.launch.zero_stage == 3:
        trained.engine.empty_partition_cache()


def swap_files(engine: Any) -> Iterator[tuple[Path, int]]:
    """This rank's NVMe swap files and their bytes, empty where nothing is swapped."""
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    for path in sorted(Path(swapper.swap_folder).rglob("*.swp")):
        yield path, path.stat().st_size


class Fragment:
    """A piece of a parameter inside this rank's flat master shard; counts are elements."""

    __slots__ = ("name", "numel", "offset", "shard", "start")

    def __init__(self, name: str, shard: int, start: int, numel: int, offset: int) -> None:
        self.name, self.shard, self.start = name, shard, start
        self.numel, self.offset = numel, offset


def fragments(trained: Trained) -> Iterator[Fragment]:
    """Where this rank's share of each trainable parameter lies in its flat master shards."""
    optimizer = trained.engine.optimizer
    for name, p in trained.module.named_parameters():
        if not p.requires_grad:
            continue
        if hasattr(p, "ds_tensor"):
            shard, start, _ = optimizer.grad_position[optimizer.get_param_id(p)]
            offset = p.ds_tensor.ds_numel * trained.accelerator.process_index
            numel = max(0, min(p.ds_tensor.ds_numel, p.ds_numel - offset))
            yield Fragment(name, shard, start, numel, offset)
        elif p._hp_mapping is not None:
            high, low = p._hp_mapping.hp_fragment_address, p._hp_mapping.lp_fragment_address
            shard = p._hp_mapping.param_group_index
            yield Fragment(name, shard, high.start, high.numel, low.start)


def masters(trained: Trained) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's flat float32 master shards, one at a time; swapped-out ones are read in."""
    optimizer = trained.engine.optimizer
    if trained.launch.zero_stage < 3:
        yield from enumerate(optimizer.single_partition_of_fp32_groups)
        return
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            yield index, flat
        finally:  # also where the reader stops early: a shard left in memory blocks the next read
            if swapped:
                optimizer._release_swap_buffers(index)
