"""Evidence of ZeRO: a rank's shares, what is alive in a watched step, and where the optimizer
steps. Attribute names are DeepSpeed's own (0.19).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
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
    """Record of one step: ``most`` bytes of gradients alive when one arrived, and ``gathered``, the
    most elements of whole weights after a gather of stage 3."""

    most: int = 0
    gathered: int = 0


@contextlib.contextmanager
def observe(run: TrainingRun) -> Iterator[Effects]:
    """Watch one step; restore DeepSpeed's objects when it ends."""
    found, parameters = Effects(), list(run.module.parameters())
    trainable = [p for p in parameters if p.requires_grad]

    def arrived(_: Any) -> None:
        kept = [g for p in trainable for g in (p.grad, getattr(p, "grad_accum", None))]
        found.most = max(found.most, sum(g.nbytes for g in kept if g is not None))

    with contextlib.ExitStack() as stack:
        for p in trainable:
            stack.callback(p.register_post_accumulate_grad_hook(arrived).remove)
        if run.engine.stage == 3:
            coordinator = run.model.optimizer.parameter_offload.get_param_coordinator()
            fetch = coordinator.fetch_sub_module

            def fetched(*given: Any, **named: Any) -> None:
                fetch(*given, **named)
                found.gathered = max(found.gathered, sum(p.numel() for p in parameters))

            coordinator.fetch_sub_module = fetched
            stack.callback(delattr, coordinator, "fetch_sub_module")
        yield found


def evidence(run: TrainingRun) -> dict[str, Any]:
    """Return the stage with this rank's shares, the watched step's bytes, and the places.

    Raises:
        NotInForce: DeepSpeed runs another stage, holds another share, or steps elsewhere.
    """
    ds, wanted = run.model, run.engine.stage
    text = f"the model is a {type(ds).__name__}, expected a DeepSpeed engine"
    demand(hasattr(ds, "zero_optimization_stage"), text)
    stage = int(ds.zero_optimization_stage())
    demand(stage == wanted, f"DeepSpeed runs stage {stage}, expected {wanted}")
    if run.engine.place("optimizer") == "nvme":  # masters are read through the swapper
        swapper = getattr(ds.optimizer, "optimizer_swapper", None)
        demand(swapper is not None, "DeepSpeed swaps no optimizer state to files")
    demand(ds.skipped_steps == 0, f"DeepSpeed skipped {ds.skipped_steps} steps")
    facts: dict[str, Any] = {"stage": stage, **_shares(run)}
    seen = run.observed
    if isinstance(seen.engine, Effects):
        facts |= _gathered(run, seen.engine) if stage == 3 else {}
        facts |= _wire(run) | _gradients(run, seen.engine)
    facts |= _placed(run)
    # One memory: a tensor's device shows nothing on a CPU, but swap files do.
    on_cpu = run.accelerator.device.type == "cpu"
    places = [name for name, found in facts.items() if name.endswith("_on") and found == "cpu"]
    return label(facts, "stage", *(places if on_cpu else ()))


def _shares(run: TrainingRun) -> dict[str, float]:
    """Return this rank's share of the float32 master, and under stage 3 of weights and
    gradients."""
    parts = [p for p in run.module.parameters() if p.requires_grad]
    held = {"optimizer": sum(shard.tensor.numel() for shard in read.shards(run))}
    if run.engine.stage == 3:
        demand(hasattr(parts[0], "ds_tensor"), "the parameters are not partitioned")
        held["parameter"] = sum(p.ds_tensor.ds_numel for p in parts)
        held["gradient"] = run.model.optimizer.grad_partitions_flat_buffer.numel()
    wanted, total = 1 / run.launch.processes, sum(map(_elements, parts))
    shares = {f"{what}_share": round(elements / total, 4) for what, elements in held.items()}
    for name, share in shares.items():
        demand(abs(share - wanted) <= PADDING, f"the {name} is {share:.3f}, expected {wanted:.3f}")
    return shares


def _elements(p: Any) -> int:
    """Return the elements of a whole parameter."""
    return getattr(p, "ds_numel", None) or p.numel()


def _gathered(run: TrainingRun, seen: Effects) -> dict[str, Any]:
    """Check the largest number of gathered elements against its bound: persistent weights, those
    that DeepSpeed may keep or fetch for later use, and the current module's."""
    sizes = {p: p.ds_numel for p in run.module.parameters()}
    settings = run.model.config["zero_optimization"]
    stay = sum(size for p, size in sizes.items() if p.ds_persist)
    ahead = settings["stage3_max_live_parameters"] + settings["stage3_prefetch_bucket_size"]
    modules = run.module.modules()
    most = stay + ahead + max(sum(sizes[p] for p in m.parameters(recurse=False)) for m in modules)
    whole = sum(sizes.values())
    text = f"{seen.gathered} elements of the weights were gathered at once, of {whole} in all"
    demand(seen.gathered > 0, "no module's weights were gathered")
    demand(seen.gathered <= most, f"{text}: stage 3 with these settings keeps at most {most}")
    return {"most_gathered_elements": seen.gathered}


def _wire(run: TrainingRun) -> dict[str, Any]:
    """Return the type in which gradients were reduced, from the collectives of backward."""
    if run.launch.processes == 1 or not run.observed.ran:
        return {}
    sent = [s for s in run.observed.sent if s.phase == "backward" and "reduce" in s.collective]
    found = sorted({s.dtype for s in sent})
    asked = run.engine.file.settings.get("communication_data_type")
    stored = {str(p.dtype)[6:] for p in run.module.parameters() if p.requires_grad}
    wanted = [TYPES.get(asked, asked)] if asked else sorted(stored)
    demand(found == wanted, f"gradients were sent as {found or 'nothing'}, expected {wanted}")
    return {"gradients_sent_as": "+".join(found)}


def _gradients(run: TrainingRun, seen: Effects) -> dict[str, int]:
    """Check the gradients alive in backward.

    Stage 1 keeps all until backward ends, or those of other ranks: with ``overlap_comm`` and
    offload, as on a GPU, it moves this rank's share to host memory within backward. Stages 2 and 3
    release each when its bucket is full. Source: DeepSpeed, runtime/zero/stage_1_and_2.py
    (process_gradients, copy_grads_in_partition).
    """
    ds, stage = run.model, run.engine.stage
    parameters = [p for p in run.module.parameters() if p.requires_grad]
    item = parameters[0].element_size()
    sizes = sorted(item * _elements(p) for p in parameters)
    whole, bucket = sum(sizes), item * int(ds.config["zero_optimization"]["reduce_bucket_size"])
    own = whole // run.launch.processes
    # This rank's share stays; a bucket and the gradients at its two ends are being sent.
    most = own + bucket + sum(sizes[-2:])
    text = f"{seen.most} bytes of gradients were alive in backward, of {whole} in all"
    if stage == 1:
        early = all(getattr(ds.optimizer, name, False) for name in ("overlap_comm", "cpu_offload"))
        least = NEARLY * (whole - own * early)
        demand(seen.most >= least, f"{text}: stage 1 keeps all of them")
    elif most < NEARLY * whole:  # else one bucket, or one rank, has all: nothing is freed early
        demand(seen.most <= most, f"{text}: stage {stage} keeps at most {most}")
    return {"most_gradient_bytes": seen.most, "all_gradient_bytes": whole}


def _placed(run: TrainingRun) -> dict[str, Any]:
    """Check which class updates the weights, and where masters, swap files and shards are."""
    ds, place, kind = run.model, run.engine.place("optimizer"), type(run.inner_optimizer).__name__
    text = f"the optimizer is a {kind}, and its place is {place}"
    if "own_loop" not in run.launch.traits:  # a script has an optimizer of its own
        demand((kind == CPU_ADAM) == (place != "device"), text)
    facts: dict[str, Any] = {"stepped_by": kind, "optimizer_on": place} if place != "device" else {}
    if place == "cpu":
        flags = ("cpu_offload", "offload_optimizer")  # of stages 1 and 2, and of stage 3
        offloads = any(getattr(ds.optimizer, flag, False) for flag in flags)
        demand(offloads, "DeepSpeed keeps the optimizer on the device")
        devices = {master.device.type for master in run.optimized()}
        demand(devices == {"cpu"}, f"the optimizer's weights are on {devices}, expected the host")
    if place == "nvme":
        infos = ds.optimizer.optimizer_swapper.swap_params_info.values()
        kept = [(info, t) for info in infos for t in info.tensors]
        sizes = {t.swap_path: info.numel() * info.dtype().itemsize for info, t in kept}
        demand(bool(sizes), "no tensor of the optimizer is in a swap file")
        short = [path for path, size in sizes.items() if os.path.getsize(path) < size]
        demand(not short, f"{len(short)} of {len(sizes)} swap files are too short")
        left = sum(t.compute_tensor.numel() for _, t in kept)
        demand(left == 0, f"{left} elements of swapped state are in memory between two steps")
        facts["swapped_bytes"] = sum(sizes.values())
    if run.engine.place("parameters") == "cpu":
        places = {p.ds_tensor.device.type for p in run.module.parameters() if not p.ds_persist}
        offloaded = bool(getattr(ds.optimizer, "offload_param", False)) and places == {"cpu"}
        demand(offloaded, f"parameter shards are on {places}, expected in host memory")
        facts["parameters_on"] = "cpu"
    return facts
