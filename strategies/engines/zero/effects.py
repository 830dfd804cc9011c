"""Evidence of ZeRO: what each rank keeps of state, gradients and weights, where, and what it sends.

Shares and places are read from DeepSpeed's tensors; gathered weights, gradients alive in backward
and the type of reduced gradients from one watched step. Attribute names are DeepSpeed's own (0.19).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.zero import facts as read
from strategies.evidence.rules import label

# A shard is padded to a multiple of the group size and of DeepSpeed's alignment.
PADDING = 0.02
NEARLY = 0.95
"""Share from which gradients count as complete: an unused parameter may have none."""
CPU_ADAM = "DeepSpeedCPUAdam"
TYPES = {"fp16": "float16", "bfp16": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}
"""communication_data_type in DeepSpeed's spelling -> torch's."""


@dataclass
class Effects:
    """Record of one step.

    ``most``: largest bytes of parameters' gradients when one arrived. ``gathered``: elements of
    whole weights after each gather of stage 3.
    """

    most: int = 0
    gathered: list[int] = field(default_factory=list)


# ---- watched step ----


@contextlib.contextmanager
def observe(trained: TrainingRun) -> Iterator[Effects]:
    """Watch one step; restore DeepSpeed's objects when it ends."""
    found = Effects()
    trainable = [p for p in trained.module.parameters() if p.requires_grad]

    def arrived(_: Any) -> None:
        found.most = max(found.most, _gradient_bytes(trainable))

    handles = [p.register_post_accumulate_grad_hook(arrived) for p in trainable]
    try:
        with _gathers_watched(trained, found.gathered):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def _gradient_bytes(parameters: list[Any]) -> int:
    kept = [(p.grad, getattr(p, "grad_accum", None)) for p in parameters]
    return sum(g.nbytes for pair in kept for g in pair if g is not None)


@contextlib.contextmanager
def _gathers_watched(trained: TrainingRun, counts: list[int]) -> Iterator[None]:
    """Add the elements of whole weights to ``counts`` after each gather of stage 3."""
    if trained.engine.stage < 3:
        yield
        return
    coordinator = trained.model.optimizer.parameter_offload.get_param_coordinator()
    fetch, parameters = coordinator.fetch_sub_module, list(trained.module.parameters())

    def fetched(*given: Any, **named: Any) -> None:
        fetch(*given, **named)
        counts.append(sum(p.numel() for p in parameters))

    coordinator.fetch_sub_module = fetched
    try:
        yield
    finally:
        del coordinator.fetch_sub_module


# ---- evidence ----


def evidence(trained: TrainingRun) -> dict[str, Any]:
    """Return the stage, this rank's shares and their places, and the facts of the watched step.

    Raises:
        NotInForce: DeepSpeed runs another stage, holds another share, or skipped a step.
    """
    ds, wanted = trained.model, trained.engine.stage
    text = f"the model is a {type(ds).__name__}, expected a DeepSpeed engine"
    demand(hasattr(ds, "zero_optimization_stage"), text)
    stage = int(ds.zero_optimization_stage())
    demand(stage == wanted, f"DeepSpeed runs stage {stage}, expected {wanted}")
    if trained.engine.place("optimizer") == "nvme":
        swapper = getattr(ds.optimizer, "optimizer_swapper", None)
        demand(swapper is not None, "DeepSpeed swaps no optimizer state to files")
    demand(ds.skipped_steps == 0, f"DeepSpeed skipped {ds.skipped_steps} steps")
    facts = {"stage": stage, "skipped_steps": ds.skipped_steps, **_shares(trained)}
    seen = trained.observed
    if seen is not None and isinstance(seen.engine, Effects):
        facts |= _gathered(trained, seen.engine.gathered) | _wire(trained)
        facts = _gradients(trained, seen.engine, facts)
    facts |= _placed(trained)
    # One memory: a tensor's device shows nothing on a CPU, but swap files do.
    on_cpu = trained.accelerator.device.type == "cpu"
    places = [name for name, found in facts.items() if name.endswith("_on") and found == "cpu"]
    return label(facts, "stage", *(places if on_cpu else ()))


def _shares(trained: TrainingRun) -> dict[str, float]:
    """Return this rank's share of the float32 master, and under stage 3 of weights and
    gradients."""
    parts = [p for p in trained.module.parameters() if p.requires_grad]
    total = sum(getattr(p, "ds_numel", None) or p.numel() for p in parts)
    held = {"optimizer": sum(master.numel() for _, master in read.masters(trained))}
    if trained.engine.stage == 3:
        demand(hasattr(parts[0], "ds_tensor"), "the parameters are not partitioned")
        held["parameter"] = sum(p.ds_tensor.ds_numel for p in parts)
        held["gradient"] = trained.model.optimizer.grad_partitions_flat_buffer.numel()
    wanted, shares = 1 / trained.launch.processes, {}
    for what, elements in held.items():
        share = elements / total
        text = f"this rank holds {share:.3f} of the {what} elements, expected {wanted:.3f}"
        demand(abs(share - wanted) <= PADDING, text)
        shares[f"{what}_share"] = round(share, 4)
    return shares


def _placed(trained: TrainingRun) -> dict[str, Any]:
    """Check which class updates the weights, and where masters, swap files and shards are."""
    ds, facts = trained.model, dict[str, Any]()
    place, kind = trained.engine.place("optimizer"), type(trained.inner_optimizer).__name__
    text = f"the optimizer is a {kind}, and its place is {place}"
    demand((kind == CPU_ADAM) == (place != "device"), text)
    if place != "device":
        facts |= {"stepped_by": kind, "optimizer_on": place}
    if place == "cpu":
        devices = {master.device.type for master in trained.optimized()}
        text = f"the optimizer's weights are on {devices}, expected in host memory"
        demand(devices == {"cpu"}, text)
    if place == "nvme":
        facts |= _swapped(trained)
    if trained.engine.place("parameters") == "cpu":
        text = "DeepSpeed keeps the parameters on the device"
        demand(bool(getattr(ds.optimizer, "offload_param", False)), text)
        places = {p.ds_tensor.device.type for p in trained.module.parameters() if not p.ds_persist}
        demand(places == {"cpu"}, f"parameter shards are on {places}, expected in host memory")
        facts["parameters_on"] = "cpu"
    return facts


def _gradients(trained: TrainingRun, seen: Effects, facts: dict[str, Any]) -> dict[str, Any]:
    """Check the gradients alive in backward.

    Stage 1 keeps all until backward ends, or those of other ranks (``_leaves_early``); stages 2 and
    3 release each when its bucket is full.
    """
    ds, stage = trained.model, trained.engine.stage
    parameters = [p for p in trained.module.parameters() if p.requires_grad]
    item = parameters[0].element_size()
    sizes = sorted(item * (getattr(p, "ds_numel", None) or p.numel()) for p in parameters)
    whole, bucket = sum(sizes), item * int(ds.config["zero_optimization"]["reduce_bucket_size"])
    # This rank's share stays; a bucket and the gradients at its two ends are being sent.
    most = whole // trained.launch.processes + bucket + sum(sizes[-2:])
    found = {"most_gradient_bytes": seen.most, "all_gradient_bytes": whole}
    text = f"{seen.most} bytes of gradients were alive in backward, of {whole} in all"
    if stage == 1:
        early = whole // trained.launch.processes if _leaves_early(ds.optimizer) else 0
        least = NEARLY * (whole - early)
        demand(seen.most >= least, f"{text}: stage 1 keeps all of them")
    elif most >= NEARLY * whole:
        # One bucket holds the whole model, or one rank owns it: nothing can be freed early.
        return {**facts, **found}
    else:
        demand(seen.most <= most, f"{text}: stage {stage} keeps at most {most}")
    return {**facts, **found}


def _gathered(trained: TrainingRun, counts: list[int]) -> dict[str, Any]:
    """Check the largest number of gathered elements against its bound.

    The bound adds persistent weights, those that DeepSpeed may keep for later use, those being
    fetched, and the current module's.
    """
    if trained.engine.stage < 3:
        return {}
    sizes = {p: p.ds_numel for p in trained.module.parameters()}
    settings = trained.model.config["zero_optimization"]
    stay = sum(size for p, size in sizes.items() if p.ds_persist)
    ahead = settings["stage3_max_live_parameters"] + settings["stage3_prefetch_bucket_size"]
    modules = trained.module.modules()
    at_work = max(sum(sizes[p] for p in m.parameters(recurse=False)) for m in modules)
    most, whole, seen = stay + ahead + at_work, sum(sizes.values()), max(counts, default=0)
    text = f"{seen} elements of the weights were gathered at once, of {whole} in all"
    demand(seen > 0, "no module's weights were gathered")
    demand(seen <= most, f"{text}: stage 3 with these settings keeps at most {most}")
    return {"most_gathered_elements": seen, "all_elements": whole}


def _leaves_early(optimizer: Any) -> bool:
    """Return whether stage 1 moves this rank's share to host memory within backward.

    It does if it reduces there, as on a GPU. Source: DeepSpeed, runtime/zero/stage_1_and_2.py
    (process_gradients, copy_grads_in_partition).
    """
    flags = ("overlap_comm", "cpu_offload")
    return all(getattr(optimizer, flag, False) for flag in flags)


def _wire(trained: TrainingRun) -> dict[str, Any]:
    """Return the type in which gradients were reduced, from the collectives of backward."""
    sent = [s for s in trained.observed.sent if s.phase == "backward" and "reduce" in s.collective]
    if trained.launch.processes == 1 or not trained.observed.ran:
        return {}
    found = sorted({s.dtype for s in sent})
    asked = trained.engine.file.settings.get("communication_data_type")
    trainable = [p for p in trained.module.parameters() if p.requires_grad]
    stored = {str(p.dtype).removeprefix("torch.") for p in trainable}
    wanted = [TYPES.get(asked, asked)] if asked else sorted(stored)
    demand(found == wanted, f"gradients were sent as {found or 'nothing'}, expected {wanted}")
    return {"gradients_sent_as": "+".join(found)}


def _swapped(trained: TrainingRun) -> dict[str, Any]:
    """Check that the optimizer's tensors are in swap files, and none of them in memory."""
    swapper = trained.model.optimizer.optimizer_swapper
    sizes = {
        t.swap_path: info.numel() * info.dtype().itemsize
        for info in swapper.swap_params_info.values()
        for t in info.tensors
    }
    demand(bool(sizes), "no tensor of the optimizer is in a swap file")
    short = [path for path, size in sizes.items() if os.path.getsize(path) < size]
    demand(not short, f"{len(short)} of {len(sizes)} swap files are too short")
    kept = [t for info in swapper.swap_params_info.values() for t in info.tensors]
    left = sum(t.compute_tensor.numel() for t in kept)
    demand(left == 0, f"{left} elements of swapped state are in memory between two steps")
    return {"swapped_tensors": len(sizes), "swapped_bytes": sum(sizes.values())}
