"""Evidence of FSDP2: sharded weights, sharded optimizer state, and the collectives of one watched
step.

Settings of torch that no tensor shows are labelled so. Compiled blocks are not watched.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.fsdp import shard
from strategies.engines.fsdp.shard import groups
from strategies.evidence.readings import bytes_of
from strategies.evidence.rules import label, together

KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
    "allreduce_": "reduce",
    "allreduce_coalesced_": "reduce",
}
"""Collective of FSDP2 -> its operation; a scatter is a reduction that leaves each rank its share.
Other collectives are a strategy's."""


def evidence(trained: TrainingRun) -> dict[str, Any]:
    """Return facts of the model and the optimizer, and of the watched step.

    Raises:
        NotInForce: something is not sharded, not by block, or not as requested.
    """
    model = trained.model
    demand(
        isinstance(model, FSDPModule) and trained.accelerator.is_fsdp2,
        f"the model is a {type(model).__name__}, expected one made by fully_shard",
    )
    looks = (weights, state, settings, places, copies)
    found = {
        "gathered_as": shard.gathered_as(trained.module),
        **together(trained, *(functools.partial(look, trained) for look in looks)),
    }
    if trained.launch.device == "cpu":
        found = label({**found, "started_as": "replicas on CPUs"}, "started_as")
    seen = trained.observed
    if seen is None or not seen.ran or not seen.engine:
        return label(found, "reshard_after_forward")
    return found | _wire(trained)


def weights(trained: TrainingRun) -> dict[str, Any]:
    """Check that each parameter is sharded by rows over the requested mesh, and return the bytes
    stored on this rank, including the storage behind each share."""
    layout = trained.launch.layout
    grouped = trained.engine.hybrid
    mesh = (layout.replicate, layout.sharers) if grouped else (layout.sharers,)
    wanted = (Replicate(), Shard(0)) if grouped else (Shard(0),)
    named = dict(trained.module.named_parameters())
    if layout.tensor > 1:  # weights that tp cuts are on two axes, and shown by tp
        named = {
            n: p for n, p in named.items() if not isinstance(p, DTensor) or p.device_mesh.ndim < 2
        }
    whole = [n for n, p in named.items() if not isinstance(p, DTensor)]
    demand(not whole, f"{len(whole)} parameters are not sharded, {''.join(whole[:1])} first")
    found = {tuple(p.device_mesh.shape) for p in named.values()}
    demand(found == {mesh}, f"parameters are on meshes {sorted(found)}, expected {mesh}")
    other = [n for n, p in named.items() if tuple(p.placements) != wanted]
    demand(not other, f"{len(other)} parameters are not sharded by rows, {other[:1]} first")

    parameters = list(trained.module.parameters())
    stored = bytes_of(shard.local(p) for p in parameters if shard.local(p).numel())
    # Each rank allocates the rows of the largest share.
    most = sum(
        -(-p.shape[0] // layout.sharers) * p.shape[1:].numel() * p.element_size()
        for p in parameters
    )
    demand(stored <= most, f"this rank stores {stored} bytes of weights, expected at most {most}")
    return {
        "mesh": list(mesh),
        "placements": ", ".join(map(str, wanted)),
        "parameter_bytes": stored,
    }


def state(trained: TrainingRun) -> dict[str, Any]:
    """Check that the optimizer steps the model's own parameters, and holds a share of state for
    each."""
    optimizer = trained.inner_optimizer
    free = [p for p in trained.module.parameters() if p.requires_grad]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = len(stepped ^ set(map(id, free)))
    demand(not strange, f"{strange} parameters are only in the optimizer or only in the model")
    here = whole = 0
    for p in free:
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                alike = isinstance(value, DTensor) and value.placements == p.placements
                alike = alike and shard.local(value).shape == shard.local(p).shape
                demand(alike, f"the optimizer's {name} is not sharded as its parameter is")
                here, whole = here + shard.local(value).numel(), whole + value.numel()
    return {"optimizer_share": round(here / whole, 4)} if whole else {}


def settings(trained: TrainingRun) -> dict[str, Any]:
    """Check that each block is a group of its own, and torch's settings for these groups.

    They are resharding after forward, and that inputs (timesteps) are not rounded.
    """
    found, blocks = groups(trained.module), trained.blocks()
    own = {id(module): group for group in found for module in group.modules}
    alone = [b for b in blocks if id(b) in own and _holds(own[id(b)], b)]
    demand(
        len(alone) == len(blocks),
        f"{len(blocks) - len(alone)} of {len(blocks)} blocks are not FSDP groups of their own",
    )
    sizes = {_reshards_to(own[id(block)]) for block in blocks}
    wanted = trained.engine.reshard
    demand(sizes == {wanted}, f"blocks are resharded after forward as {sizes}, expected {wanted}")
    facts = {"groups": len(found), "blocks": len(blocks), "reshard_after_forward": wanted}
    if trained.observed is None or not trained.observed.engine:  # a script has its own settings
        return facts
    cast = any(g.mp_policy.cast_forward_inputs and g.mp_policy.param_dtype for g in found)
    demand(not cast, "torch casts the model's inputs, timesteps included")
    return facts


def _holds(group: Any, block: Any) -> bool:
    kept = {id(p.sharded_param) for p in group.fsdp_params}
    return all(id(p) in kept for p in block.parameters())


def _reshards_to(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None:
        return False
    return True if after == group.mesh_info else after.shard_mesh_size


def places(trained: TrainingRun) -> dict[str, Any]:
    """Check the placement of shares: torch's policy, and the tensors' devices, which are equal on a
    CPU."""
    offloads = trained.engine.offloads
    policies = {isinstance(g.offload_policy, CPUOffloadPolicy) for g in groups(trained.module)}
    demand(
        policies == {offloads}, f"torch's offload policy is {sorted(policies)}, expected {offloads}"
    )
    if not offloads:
        return {}
    devices = {shard.local(p).device.type for p in trained.module.parameters()}
    kept = [shard.local(v) for s in trained.inner_optimizer.state.values() for v in s.values()]
    devices |= {v.device.type for v in kept if isinstance(v, torch.Tensor) and v.dim()}
    demand(devices == {"cpu"}, f"shards are on {sorted(devices)}, expected in host memory")
    where = {"parameters_on": "cpu", "optimizer_on": "cpu"}
    one_memory = trained.accelerator.device.type == "cpu"
    return label(where, *where) if one_memory else where


def copies(trained: TrainingRun) -> dict[str, Any]:
    """Check that replica groups hold equal shares, although each has seen other samples."""
    layout = trained.launch.layout
    if layout.replicate == 1 or trained.launch.simulated:
        return {}
    mine = [shard.local(p).detach().double().sum() for p in trained.module.parameters()]
    everyone = trained.accelerator.gather(torch.stack(mine)[None].to(trained.accelerator.device))
    copies = everyone.view(layout.replicate, -1)
    spread = float((copies - copies[:1]).abs().max())
    demand(
        spread == 0.0,
        f"weights of the replica groups differ by {spread:.3g}: gradients were not averaged",
    )
    return {"replica_spread": spread}


def _wire(trained: TrainingRun) -> dict[str, Any]:
    """Check the collectives of the watched step.

    All weights are gathered in forward, and blocks again in backward unless they stay gathered.
    Each group's gradients are reduced once, after the last micro-batch.
    """
    seen, engine = trained.observed, trained.engine
    among = {g.group_name for g in shard.process_groups(trained.module)}
    ours = [s for s in seen.sent if s.collective in KINDS and s.group in among]
    sent = Counter((KINDS[s.collective], s.phase) for s in ours)
    sizes: Counter[tuple[str, str]] = Counter()
    for s in ours:
        sizes[KINDS[s.collective], s.phase] += s.bytes
    everything = sum(_sent_by(g) for g in groups(trained.module))
    forward, backward = sizes["gather", "forward"], sizes["gather", "backward"]
    demand(
        forward >= seen.micro_steps * everything,
        f"{forward} bytes of this rank's weights were gathered in forward, expected {everything}",
    )
    if engine.reshard is False:
        demand(not backward, f"{backward} bytes were gathered again in backward, expected none")
    elif "frozen_blocks" not in trained.launch.traits:
        demand(backward > 0, "nothing was gathered again in backward: blocks were not resharded")
    trains = sum(
        any(p.sharded_param.requires_grad for p in g.fsdp_params) for g in groups(trained.module)
    )
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


def _sent_by(group: Any) -> int:
    """Return the bytes of this rank's share of a group, in the type of the gather.

    A class that casts before the gather (torchao's for float8) names that type ``_dtype``.
    """

    def gathered(p: Any) -> torch.dtype:
        own = getattr(p._sharded_local_tensor, "_dtype", None)
        return own or p.param_dtype or p.orig_dtype

    return sum(p._sharded_param_data.numel() * gathered(p).itemsize for p in group.fsdp_params)
