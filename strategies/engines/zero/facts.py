"""Tensors of a rank, read from DeepSpeed's objects. Attribute names are DeepSpeed's own (0.19)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.engine import TrainingRun
from strategies.evidence.readings import stored, tensors, within
from strategies.inventory import AllocationScope, Piece, Shard

if TYPE_CHECKING:
    import torch


BACKWARD = ("forward", "backward")
HOST_BUFFERS = (
    "temp_grad_buffer_for_cpu_offload",
    "param_buffer_of_bit16_for_cpu_offload_groups",
    "accumulated_grads_in_cpu",
    "grad_partitions_flat_buffer",
)
"""Attributes of DeepSpeed's optimizers that are in host memory under offload. The last is of stage
3, the others of stages 1 and 2."""


def swap_files(ds: Any) -> Iterator[tuple[Path, int]]:
    """Yield this rank's NVMe swap files and their bytes; none if nothing is swapped."""
    swapper = getattr(ds.optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    for path in sorted(Path(swapper.swap_folder).rglob("*.swp")):
        yield path, path.stat().st_size


def shards(run: TrainingRun) -> Iterator[Shard]:
    """Yield this rank's flat float32 master shards, one at a time; swapped-out ones are read in."""
    optimizer, states = run.model.optimizer, run.inner_optimizer.state

    @functools.cache
    def known() -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for name, p in run.module.named_parameters():
            if not p.requires_grad:
                continue
            if hasattr(p, "ds_tensor"):
                number, start, _ = optimizer.grad_position[optimizer.get_param_id(p)]
                offset = p.ds_tensor.ds_numel * run.accelerator.process_index
                numel = max(0, min(p.ds_tensor.ds_numel, p.ds_numel - offset))
                found.setdefault(number, []).append(Piece(name, start, numel, offset))
            elif p._hp_mapping is not None:
                high, low = p._hp_mapping.hp_fragment_address, p._hp_mapping.lp_fragment_address
                piece = Piece(name, high.start, high.numel, low.start)
                found.setdefault(p._hp_mapping.param_group_index, []).append(piece)
        return found

    def shard(number: int, flat: Any) -> Shard:
        return Shard(number, flat, lambda: states.get(flat, {}), lambda: known().get(number, ()))

    if run.engine.stage < 3:
        for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
            yield shard(number, flat)
        return
    for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
        swapped = optimizer._swappable_optimizer_subgroup(number)
        if swapped:
            optimizer._optimizer_states_and_gradient_swap_in(number)
        try:
            yield shard(number, flat)
        finally:  # also if the reader stops early: a shard in memory blocks the next read
            if swapped:
                optimizer._release_swap_buffers(number)


def held(run: TrainingRun) -> dict[str, list[torch.Tensor]]:
    """Return category -> tensors: flat low-precision copies are parameters, float32 masters are
    optimizer state (in ZeRO's terms), and buckets are a category of their own."""
    optimizer, optimized = run.model.optimizer, run.optimized()
    parts = [p.ds_tensor.data for p in run.module.parameters() if hasattr(p, "ds_tensor")]
    names = ("bit16_groups_flat", "fp16_partitioned_groups_flat")
    flats = [t for n in names for t in getattr(optimizer, n, []) if t is not None]
    # gradient partitions, and their copies in host memory
    buffers = ("averaged_gradients", "grad_partitions_flat_buffer", HOST_BUFFERS[0])
    partitions = [t for n in buffers for t in within(getattr(optimizer, n, None))]
    whole = [t for p in run.module.parameters() for t in stored(p.data)]
    # hpZ's second copy of the weights, within a group of ranks
    again = [getattr(p, "ds_secondary_tensor", None) for p in run.module.parameters()]
    return {
        "parameters": [*whole, *parts, *within(again), *flats, *run.module.buffers()],
        "optimizer_state": [*tensors(run.inner_optimizer), *optimized],
        "buckets": [t for b in optimizer.ipg_buckets.values() for t in within(vars(b))],
        "gradients": [*partitions, *(m.grad for m in optimized if m.grad is not None)],
    }


def hosted(run: TrainingRun) -> Iterator[Any]:
    """Yield the tensors that DeepSpeed keeps in host memory if its optimizer reports offload:
    masters with their gradients and state, transfer buffers, and parameter shards that are not
    persistent. On a CPU their device does not show it."""
    optimizer = run.model.optimizer
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        masters = run.optimized()
        yield from (*masters, *(m.grad for m in masters if m.grad is not None))
        yield from tensors(run.inner_optimizer)
        for name in HOST_BUFFERS:
            yield from within(getattr(optimizer, name, None))
        # the pinned buffers through which state on NVMe is read and written
        swapper: Any = getattr(optimizer, "optimizer_swapper", None)
        yield from within(swapper.swap_buffer_manager.all_buffers) if swapper is not None else ()
    if getattr(optimizer, "offload_param", False):
        yield from within(optimizer.param_groups_fp16_flat_cpu_memory)
        shards = [p for p in run.module.parameters() if hasattr(p, "ds_tensor")]
        yield from (p.ds_tensor.data for p in shards if not p.ds_persist)


def makers() -> Iterator[AllocationScope]:
    """Yield methods whose allocations have a known category: DeepSpeed replaces ``.data`` of
    parameters and cuts gradients out of buckets, so tensors do not show it."""
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
