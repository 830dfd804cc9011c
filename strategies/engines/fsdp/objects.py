"""What the objects of a run under FSDP2 show, without a step: how parameters are cut and grouped,
what a rank stores of them and of the optimizer's state, and where.

All of it is read off tensors, but for what torch alone knows of itself: what becomes of a block
behind its forward, and whether it offloads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from strategies.base import demand
from strategies.engine import Trained
from strategies.engines.fsdp import facts
from strategies.evidence.settings import label
from strategies.evidence.stored import bytes_of

__all__ = ["alike", "by_block", "copies", "cut", "first", "kept", "places", "shares"]


def cut(trained: Trained) -> dict[str, Any]:
    """Every parameter is cut by rows over the ranks that share, alike on groups of them."""
    layout = trained.launch.layout
    grouped = trained.engine.hybrid
    mesh = (layout.replicate, layout.sharers) if grouped else (layout.sharers,)
    wanted = (Replicate(), Shard(0)) if grouped else (Shard(0),)
    named = dict(trained.module.named_parameters())
    whole = [n for n, p in named.items() if not isinstance(p, DTensor)]
    demand(not whole, f"{len(whole)} parameters are whole on every rank, {first(whole)} first")
    found = {tuple(p.device_mesh.shape) for p in named.values()}
    demand(found == {mesh}, f"parameters lie on meshes {sorted(found)}, not {mesh}")
    other = [n for n, p in named.items() if tuple(p.placements) != wanted]
    demand(not other, f"{len(other)} parameters are not cut by rows, {first(other)} first")
    return {"mesh": list(mesh), "placements": ", ".join(map(str, wanted))}


def first(names: list[str]) -> str:
    return names[0] if names else ""


def by_block(trained: Trained) -> dict[str, Any]:
    """Each block is gathered by itself; what becomes of it after forward is torch's setting."""
    found, blocks = facts.groups(trained.module), trained.blocks()
    own = {id(module): group for group in found for module in group.modules}
    alone = [b for b in blocks if id(b) in own and _holds(own[id(b)], b)]
    demand(
        len(alone) == len(blocks),
        f"{len(blocks) - len(alone)} of {len(blocks)} blocks are not gathered by themselves",
    )
    sizes = {_reshards_to(own[id(block)]) for block in blocks}
    wanted = trained.engine.reshard
    demand(sizes == {wanted}, f"after forward blocks are resharded {sizes}, not {wanted}")
    return {"groups": len(found), "blocks": len(blocks), "reshard_after_forward": wanted}


def _holds(group: Any, block: Any) -> bool:
    kept = {id(p.sharded_param) for p in group.fsdp_params}
    return all(id(p) in kept for p in block.parameters())


def _reshards_to(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None:
        return False
    return True if after == group.mesh_info else after.shard_mesh_size


def _rows(parameter: Any, ranks: int) -> int:
    """Bytes of a share as every rank allocates it: rows of the largest."""
    rows = -(-parameter.shape[0] // ranks)
    return rows * parameter.shape[1:].numel() * parameter.element_size()


def shares(trained: Trained) -> dict[str, Any]:
    """Bytes that are really stored here, those behind each share included."""
    parameters, ranks = list(trained.module.parameters()), trained.launch.layout.sharers
    stored = bytes_of(facts.local(p) for p in parameters if facts.local(p).numel())
    most = sum(_rows(p, ranks) for p in parameters)
    demand(stored <= most, f"this rank stores {stored} bytes of weights; a share is {most}")
    free = [p for p in parameters if p.requires_grad]
    share = sum(facts.local(p).numel() for p in free) / sum(p.numel() for p in free)
    return {"parameter_share": round(share, 4), "parameter_bytes": stored}


def kept(trained: Trained) -> dict[str, Any]:
    """The optimizer steps the model's own parameters, and keeps a share of state for each."""
    optimizer = trained.inner_optimizer
    free = [p for p in trained.module.parameters() if p.requires_grad]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = len(stepped - set(map(id, free))) + len(set(map(id, free)) - stepped)
    demand(not strange, f"{strange} tensors are the optimizer's or the model's, and not of both")
    here = whole = 0
    for p in free:
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                demand(alike(p, value), f"the optimizer's {name} is not cut as its parameter")
                here, whole = here + facts.local(value).numel(), whole + value.numel()
    return {"optimizer_share": round(here / whole, 4)} if whole else {}


def places(trained: Trained) -> dict[str, Any]:
    """Where shares wait: torch's policy, and the devices of the tensors, which a CPU cannot tell
    apart."""
    offloads = trained.engine.offloads
    found = facts.groups(trained.module)
    policies = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in found}
    demand(policies == {offloads}, f"torch offloads: {sorted(policies)}, asked is {offloads}")
    if not offloads:
        return {}
    devices = {facts.local(p).device.type for p in trained.module.parameters()}
    state = [facts.local(v) for s in trained.inner_optimizer.state.values() for v in s.values()]
    kept = {v.device.type for v in state if isinstance(v, torch.Tensor) and v.dim()}
    demand(devices | kept == {"cpu"}, f"shares live on {sorted(devices | kept)}, not on the host")
    where = {"parameters_on": "cpu", "optimizer_on": "cpu"}
    one_memory = trained.accelerator.device.type == "cpu"
    return label(where, *where) if one_memory else where


def copies(trained: Trained) -> dict[str, Any]:
    """Groups that hold the same shares hold them alike, whatever samples each has seen."""
    layout = trained.launch.layout
    if layout.replicate == 1 or trained.launch.simulated:
        return {}
    mine = [facts.local(p).detach().double().sum() for p in trained.module.parameters()]
    everyone = trained.accelerator.gather(torch.stack(mine)[None].to(trained.accelerator.device))
    copies = everyone.view(layout.replicate, -1)
    spread = float((copies - copies[:1]).abs().max())
    demand(spread == 0.0, f"groups drifted apart by {spread:.3g}: gradients were not averaged")
    return {"replica_spread": spread}


def alike(parameter: Any, other: Any) -> bool:
    """Whether another tensor is cut as a parameter is."""
    cut = isinstance(other, DTensor) and other.placements == parameter.placements
    return cut and facts.local(other).shape == facts.local(parameter).shape
