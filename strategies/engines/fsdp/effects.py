"""Evidence of FSDP2: this rank's shares, torch's groups, and the collectives of one watched step.

Settings of torch that no tensor shows are labelled so. Compiled blocks are not watched.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.fsdp import shard
from strategies.engines.fsdp.shard import groups, local
from strategies.evidence.readings import bytes_of
from strategies.evidence.rules import Look, copies, label, together

KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
    "allreduce_": "reduce",
    "allreduce_coalesced_": "reduce",
}
"""Collective of FSDP2 -> its operation; a scatter is a reduction that leaves each rank its share.
Other collectives are a strategy's."""


def evidence(run: TrainingRun) -> dict[str, Any]:
    """Return facts of the model and the optimizer, and of the watched step.

    Raises:
        NotInForce: something is not sharded, not by block, or not as requested.
    """
    model = run.model
    demand(
        isinstance(model, FSDPModule) and run.accelerator.is_fsdp2,
        f"the model is a {type(model).__name__}, expected one made by fully_shard",
    )
    looks: list[Look] = [weights, state, settings]
    if run.launch.layout.replicate > 1:
        group = next(model.parameters()).device_mesh.get_group(0)
        looks.append(lambda run: copies(run, group=group))
    found = {"gathered_as": shard.gathered_as(run.module), **together(run, *looks)}
    named = {"parameters_on", "optimizer_on"} if run.launch.device == "cpu" else set()
    # A step of Headroom's loop: a script's may reduce more often.
    own = "own_loop" not in run.launch.traits
    if own and run.observed.ran:
        found |= _wire(run)
    else:
        named.add("reshard_after_forward")
    return label(found, *named) if named & found.keys() else found


def weights(run: TrainingRun) -> dict[str, Any]:
    """Check that each parameter is sharded by rows over the requested mesh, and return the bytes
    stored on this rank, including the storage behind each share."""
    layout, grouped = run.launch.layout, run.engine.hybrid
    mesh = (layout.replicate, layout.sharers) if grouped else (layout.sharers,)
    wanted = (Replicate(), Shard(0)) if grouped else (Shard(0),)
    every = dict(run.module.named_parameters())
    named = every
    if layout.tensor > 1:  # weights that tp cuts are on two axes, and shown by tp
        named = {n: p for n, p in every.items() if len(getattr(p, "placements", ())) < 2}
    whole = [n for n, p in named.items() if not isinstance(p, DTensor)]
    demand(not whole, f"{len(whole)} parameters are not sharded, {''.join(whole[:1])} first")
    found = {tuple(p.device_mesh.shape) for p in named.values()}
    demand(found == {mesh}, f"parameters are on meshes {sorted(found)}, expected {mesh}")
    other = [n for n, p in named.items() if tuple(p.placements) != wanted]
    demand(not other, f"{len(other)} parameters are not sharded by rows, {other[:1]} first")
    stored = bytes_of(local(p) for p in every.values() if local(p).numel())
    # Each rank allocates the rows of the largest share.
    rows = ((-(-p.shape[0] // layout.sharers), p) for p in every.values())
    most = sum(count * p.shape[1:].numel() * p.element_size() for count, p in rows)
    demand(stored <= most, f"this rank stores {stored} bytes of weights, expected at most {most}")
    return {"mesh": list(mesh), "parameter_bytes": stored}


def state(run: TrainingRun) -> dict[str, Any]:
    """Check that the optimizer steps the model's own parameters, and holds a share of state for
    each."""
    optimizer = run.inner_optimizer
    free = [p for p in run.module.parameters() if p.requires_grad]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = len(stepped ^ set(map(id, free)))
    demand(not strange, f"{strange} parameters are only in the optimizer or only in the model")
    here = whole = 0
    for p in free:
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                alike = isinstance(value, DTensor) and value.placements == p.placements
                alike = alike and local(value).shape == local(p).shape
                demand(alike, f"the optimizer's {name} is not sharded as its parameter is")
                here, whole = here + local(value).numel(), whole + value.numel()
    return {"optimizer_share": round(here / whole, 4)} if whole else {}


def settings(run: TrainingRun) -> dict[str, Any]:
    """Check that each block is a group of its own, resharded after forward and offloaded as
    requested, and that inputs (timesteps) are not rounded."""
    found, blocks, engine = groups(run.module), run.blocks(), run.engine
    own = {id(module): group for group in found for module in group.modules}
    alone: list[Any] = []
    for block in (block for block in blocks if id(block) in own):
        held = {id(p.sharded_param) for p in own[id(block)].fsdp_params}
        alone += [own[id(block)]] if held.issuperset(map(id, block.parameters())) else []
    text = f"{len(blocks) - len(alone)} of {len(blocks)} blocks are not FSDP groups of their own"
    demand(len(alone) == len(blocks), text)
    after = {group.post_forward_mesh_info is not None for group in alone}
    wanted = engine.reshard
    demand(after == {wanted}, f"blocks are resharded after forward: {after}, expected {wanted}")
    policies = {isinstance(g.offload_policy, CPUOffloadPolicy) for g in found}
    text = f"torch's offload policy is {sorted(policies)}, expected {engine.offloads}"
    demand(policies == {engine.offloads}, text)
    facts = {"groups": len(found), "blocks": len(blocks), "reshard_after_forward": wanted}
    if engine.offloads:
        kept = [v for state in run.inner_optimizer.state.values() for v in state.values()]
        kept = [local(v) for v in kept if isinstance(v, torch.Tensor) and v.dim()]
        devices = {t.device.type for t in (*kept, *map(local, run.module.parameters()))}
        demand(devices == {"cpu"}, f"shards are on {sorted(devices)}, expected in host memory")
        facts |= {"parameters_on": "cpu", "optimizer_on": "cpu"}
    if "own_loop" not in run.launch.traits:  # a script has its own settings
        cast = any(g.mp_policy.cast_forward_inputs and g.mp_policy.param_dtype for g in found)
        demand(not cast, "torch casts the model's inputs, timesteps included")
    return facts


def _wire(run: TrainingRun) -> dict[str, Any]:
    """Check the collectives of the watched step.

    All weights are gathered in forward, and blocks again in backward unless they stay gathered.
    Each group's gradients are reduced once, after the last micro-batch.
    """
    seen, engine, found = run.observed, run.engine, groups(run.module)
    among = {g.group_name for g in shard.process_groups(run.module)}
    ours = [s for s in seen.sent if s.collective in KINDS and s.group in among]
    sent = Counter((KINDS[s.collective], s.phase) for s in ours)
    forward, backward = (
        sum(s.bytes for s in ours if KINDS[s.collective] == "gather" and s.phase == phase)
        for phase in ("forward", "backward")
    )
    everything = 0
    for p in (p for group in found for p in group.fsdp_params):
        # A class that casts before the gather (torchao's for float8) names its type ``_dtype``.
        kind = getattr(p._sharded_local_tensor, "_dtype", None) or p.param_dtype or p.orig_dtype
        everything += p._sharded_param_data.numel() * kind.itemsize
    demand(
        forward >= seen.micro_steps * everything,
        f"{forward} bytes of this rank's weights were gathered in forward, expected {everything}",
    )
    if not engine.reshard:
        demand(not backward, f"{backward} bytes were gathered again in backward, expected none")
    elif "frozen_blocks" not in run.launch.traits:
        demand(backward > 0, "nothing was gathered again in backward: blocks were not resharded")
    trains = sum(any(p.sharded_param.requires_grad for p in g.fsdp_params) for g in found)
    reduced = sent["scatter", "backward"]
    text = f"{reduced} reductions of gradients in a step of {trains} groups"
    demand(reduced == trains, f"{text}, expected once each, after the last micro-batch")
    averaged, wanted = sent["reduce", "backward"], trains * bool(engine.hybrid)
    demand(averaged == wanted, f"{averaged} all-reduces of gradients, expected {wanted}")
    types = {s.dtype for s in ours if KINDS[s.collective] == "scatter"}
    return {
        "gathered_bytes": {"forward": forward, "backward": backward},
        "reductions": reduced,
        "gradients_sent_as": "+".join(sorted(types)),
    }
