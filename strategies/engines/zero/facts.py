"""Facts read from DeepSpeed's objects: stage, shard sizes, offload, and the tensors of each rank.

Attribute names are DeepSpeed's own (0.19); evidence fails with an error if one is missing. ``ds``
is DeepSpeed's engine, which is the prepared model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.zero.config import overlaps
from strategies.evidence.readings import stored, tensors, within
from strategies.inventory import AllocationScope, Fragment

if TYPE_CHECKING:
    import torch


# A shard is padded to a multiple of the group size and of DeepSpeed's alignment.
PADDING = 0.02
BACKWARD = ("forward", "backward")
HOST_BUFFERS = (
    "temp_grad_buffer_for_cpu_offload",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "accumulated_grads_in_cpu",
    "grad_partitions_flat_buffer",
)
"""Attributes of DeepSpeed's optimizers that are in host memory under offload. The last is of stage
3, the others of stages 1 and 2."""


# ---- evidence ----


def evidence(trained: TrainingRun) -> dict[str, Any]:
    """Return the stage, this rank's share of the elements, and their placement, all read back.

    Raises:
        NotInForce: DeepSpeed runs another stage, holds another share, or skipped a step.
    """
    ds, wanted = trained.model, trained.engine.stage
    demand(
        hasattr(ds, "zero_optimization_stage"),
        f"the model is a {type(ds).__name__}, expected a DeepSpeed engine",
    )
    stage = int(ds.zero_optimization_stage())
    demand(stage == wanted, f"DeepSpeed runs stage {stage}, expected {wanted}")
    if trained.engine.place("optimizer") == "nvme":
        swapper = getattr(ds.optimizer, "optimizer_swapper", None)
        demand(swapper is not None, "DeepSpeed swaps no optimizer state to files")
    demand(ds.skipped_steps == 0, f"DeepSpeed skipped {ds.skipped_steps} steps")
    facts = {"stage": stage, "skipped_steps": ds.skipped_steps, **_shares(trained)}
    facts |= _gradients(trained) | _offload(trained)
    facts["overlap_comm"] = _overlaps(trained)
    facts["buckets"] = buckets(ds)
    return facts


def _overlaps(trained: TrainingRun) -> bool:
    """Return whether DeepSpeed overlaps reduction with backward, by its optimizer."""
    ds, device = trained.model, trained.accelerator.device.type
    if trained.engine.stage == 3:
        found = bool(ds.zero_overlap_comm())
    else:
        found = bool(ds.optimizer.overlap_comm)
    wanted = overlaps(trained.engine.zero, device)
    demand(found == wanted, f"DeepSpeed's overlap_comm is {found}, expected {wanted}")
    return found


def buckets(ds: Any) -> dict[str, int]:
    """Return the buffer sizes in force, in elements."""
    config = ds.config["zero_optimization"]
    sizes = ("size", "stage3_prefetch", "stage3_max", "stage3_param")
    return {k: v for k, v in config.items() if any(word in k for word in sizes)}


def _expected(share: float, trained: TrainingRun, what: str) -> float:
    """Return ``share``, rounded, after checking that it is one rank's of all ranks'."""
    wanted = 1 / trained.launch.processes
    demand(
        abs(share - wanted) <= PADDING,
        f"this rank {what.format(f'{share:.3f}')}, expected {wanted:.3f}",
    )
    return round(share, 4)


def _shares(trained: TrainingRun) -> dict[str, float]:
    """Return this rank's share of the float32 master, and under stage 3 of the parameters."""
    parts = [p for p in trained.module.parameters() if p.requires_grad]
    total = sum(map(_elements, parts))
    owned = sum(master.numel() for _, master in masters(trained)) / total
    facts = {"optimizer_share": _expected(owned, trained, "holds {} of the optimizer's elements")}
    if trained.engine.stage == 3:
        demand(hasattr(parts[0], "ds_tensor"), "the parameters are not partitioned")
        share = sum(p.ds_tensor.ds_numel for p in parts) / total
        facts["parameter_share"] = _expected(share, trained, "holds {} of the parameters")
        facts["gathered_elements"] = sum(p.numel() for p in parts)
    return facts


def _elements(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def _gradients(trained: TrainingRun) -> dict[str, Any]:
    """Check whether gradients are reduced only to their owner (stages 2 and 3)."""
    optimizer, stage = trained.model.optimizer, trained.engine.stage
    if stage == 3:
        total = sum(_elements(p) for p in trained.module.parameters() if p.requires_grad)
        share = optimizer.grad_partitions_flat_buffer.numel() / total
        return {"gradient_share": _expected(share, trained, "keeps {} of the gradients")}
    partitioned = bool(optimizer.partition_gradients)
    demand(
        partitioned == (stage == 2),
        f"DeepSpeed's partition_gradients is {partitioned} at stage {stage}",
    )
    return {"gradients_partitioned": partitioned}


def _flags(trained: TrainingRun) -> dict[str, str]:
    """Return DeepSpeed's flag -> the placement that sets it."""
    optimizer = trained.engine.place("optimizer")
    if trained.engine.stage < 3:
        return {"cpu_offload": optimizer}
    return {
        "offload_optimizer": optimizer,
        "offload_param": trained.engine.place("parameters"),
        "swap_optimizer": "nvme" if optimizer == "nvme" else "device",
    }


def _offload(trained: TrainingRun) -> dict[str, Any]:
    """Check the placement of optimizer and parameters: tensors' devices, and files on NVMe."""
    ds, facts = trained.model, dict[str, Any]()
    for flag, place in _flags(trained).items():
        value = bool(getattr(ds.optimizer, flag))
        demand(value == (place != "device"), f"DeepSpeed's {flag} is {value}, expected {place}")
    if trained.engine.place("optimizer") == "cpu":
        devices = {master.device.type for master in trained.optimized()}
        demand(
            devices == {"cpu"}, f"the optimizer's weights are on {devices}, expected in host memory"
        )
        facts["optimizer_on"] = "cpu"
    if trained.engine.place("optimizer") == "nvme":
        files = list(swap_files(ds))
        demand(bool(files), "no swap file of the optimizer was found")
        facts["optimizer_on"] = "nvme"
        facts["nvme_bytes"] = sum(size for _, size in files)
    if trained.engine.place("parameters") == "cpu":
        places = {p.ds_tensor.device.type for p in trained.module.parameters() if not p.ds_persist}
        demand(places == {"cpu"}, f"parameter shards are on {places}, expected in host memory")
        facts["parameters_on"] = "cpu"
    return facts


# ---- tensors of a rank ----


def swap_files(ds: Any) -> Iterator[tuple[Path, int]]:
    """Yield this rank's NVMe swap files and their bytes; none if nothing is swapped."""
    swapper = getattr(ds.optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    for path in sorted(Path(swapper.swap_folder).rglob("*.swp")):
        yield path, path.stat().st_size


def fragments(trained: TrainingRun) -> Iterator[Fragment]:
    """Yield the position of this rank's share of each trainable parameter in its flat master
    shards."""
    optimizer = trained.model.optimizer
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


def masters(trained: TrainingRun) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield this rank's flat float32 master shards, one at a time; swapped-out ones are read in."""
    optimizer = trained.model.optimizer
    if trained.engine.stage < 3:
        yield from enumerate(optimizer.single_partition_of_fp32_groups)
        return
    for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        swapped = optimizer._swappable_optimizer_subgroup(index)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(index)
        try:
            yield index, flat
        finally:  # also if the reader stops early: a shard in memory blocks the next read
            if swapped:
                optimizer._release_swap_buffers(index)


def held(trained: TrainingRun) -> dict[str, list[torch.Tensor]]:
    """Return category -> tensors.

    Flat low-precision copies are parameters, float32 masters are optimizer state (in ZeRO's terms),
    and buckets are a category of their own.
    """
    optimizer, optimized = trained.model.optimizer, trained.optimized()
    parts = [p.ds_tensor.data for p in trained.module.parameters() if hasattr(p, "ds_tensor")]
    flats = [
        *_flat(optimizer, "bit16_groups_flat"),
        *_flat(optimizer, "fp16_partitioned_groups_flat"),
    ]
    whole = [t for p in trained.module.parameters() for t in stored(p.data)]
    # hpZ's second copy of the weights, within a group of ranks
    again = [getattr(p, "ds_secondary_tensor", None) for p in trained.module.parameters()]
    return {
        "parameters": [*whole, *parts, *within(again), *flats, *trained.module.buffers()],
        "optimizer_state": [*tensors(trained.inner_optimizer), *optimized],
        "buckets": [t for b in optimizer.ipg_buckets.values() for t in within(vars(b))],
        "gradients": [
            *_gradient_buffers(optimizer),
            *(m.grad for m in optimized if m.grad is not None),
        ],
    }


def hosted(trained: TrainingRun) -> Iterator[Any]:
    """Yield the tensors that DeepSpeed keeps in host memory if its optimizer reports offload.

    These are masters with their gradients and state, transfer buffers, and parameter shards that
    are not persistent. On a CPU all tensors are on one device; on a GPU these are ``cpu`` tensors.
    """
    optimizer = trained.model.optimizer
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        masters = trained.optimized()
        yield from (*masters, *(m.grad for m in masters if m.grad is not None))
        yield from tensors(trained.inner_optimizer)
        for name in HOST_BUFFERS:
            yield from within(getattr(optimizer, name, None))
        yield from _swap_buffers(optimizer)
    if getattr(optimizer, "offload_param", False):
        yield from within(optimizer.param_groups_fp16_flat_cpu_memory)
        shards = [p for p in trained.module.parameters() if hasattr(p, "ds_tensor")]
        yield from (p.ds_tensor.data for p in shards if not p.ds_persist)


def _swap_buffers(optimizer: Any) -> list[torch.Tensor]:
    """Return the pinned buffers through which state on NVMe is read and written."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    return within(swapper.swap_buffer_manager.all_buffers) if swapper is not None else []


def _flat(optimizer: Any, name: str) -> list[torch.Tensor]:
    return [t for t in getattr(optimizer, name, []) if t is not None]


def _gradient_buffers(optimizer: Any) -> list[torch.Tensor]:
    """Return gradient partitions and their copies in host memory."""
    names = (
        "averaged_gradients",
        "grad_partitions_flat_buffer",
        "temp_grad_buffer_for_cpu_offload",
    )
    return [t for name in names for t in within(getattr(optimizer, name, None))]


def makers() -> Iterator[AllocationScope]:
    """Yield methods whose allocations have a known category.

    DeepSpeed replaces ``.data`` of parameters and cuts gradients out of buckets, so only the
    allocating method determines a tensor's category.
    """
    from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    gathering = coordinator.PartitionedParameterCoordinator
    for name in ("fetch_sub_module", "release_sub_module", "release_and_reset_all"):
        yield AllocationScope(gathering, name, "gathered")
    yield AllocationScope(partition_parameters.Init, "_partition_param_sec", "parameters")
    for name in ("__enter__", "__exit__"):
        yield AllocationScope(partition_parameters.GatheredParameters, name, "gathered")
    both = ("overlapping_partition_gradients_reduce_epilogue", "backward_prologue")
    stage_1 = ("reduce_gradients", "process_gradients", "setup_buckets")
    for name in (*both, *stage_1, "backward_epilogue"):
        yield AllocationScope(stage_1_and_2.DeepSpeedZeroOptimizer, name, "buckets", BACKWARD)
    for name in (*both, "backward_epilogue", "reduce_ready_partitions_and_remove_grads"):
        yield AllocationScope(stage3.DeepSpeedZeroOptimizer_Stage3, name, "buckets", BACKWARD)
