"""Evidence of FSDP2 from its objects and from one watched step: placements, gathers and
collectives.

Without a watched step, or with compiled blocks, the remaining facts of the step are torch's own
settings, and are labelled so.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.fsdp import shard
from strategies.engines.fsdp.shard import groups
from strategies.evidence.readings import bytes_of
from strategies.evidence.rules import label, together

# ---- facts without a step ----
# They are read from tensors, except two that only torch's own settings show: resharding after
# forward, and offload.


def cut(trained: TrainingRun) -> dict[str, Any]:
    """Check that every parameter is sharded by rows, equally in each group of ranks."""
    layout = trained.launch.layout
    grouped = trained.engine.hybrid
    mesh = (layout.replicate, layout.sharers) if grouped else (layout.sharers,)
    wanted = (Replicate(), Shard(0)) if grouped else (Shard(0),)
    named = dict(trained.module.named_parameters())
    if layout.tensor > 1:  # weights that tp cuts are on two axes, and shown by tp
        named = {n: p for n, p in named.items() if _axes(p) < 2}
    whole = [n for n, p in named.items() if not isinstance(p, DTensor)]
    demand(not whole, f"{len(whole)} parameters are not sharded, {first(whole)} first")
    found = {tuple(p.device_mesh.shape) for p in named.values()}
    demand(found == {mesh}, f"parameters are on meshes {sorted(found)}, expected {mesh}")
    other = [n for n, p in named.items() if tuple(p.placements) != wanted]
    demand(not other, f"{len(other)} parameters are not sharded by rows, {first(other)} first")
    return {"mesh": list(mesh), "placements": ", ".join(map(str, wanted))}


def _axes(p: Any) -> int:
    return p.device_mesh.ndim if isinstance(p, DTensor) else 0


def first(names: list[str]) -> str:
    return names[0] if names else ""


def by_block(trained: TrainingRun) -> dict[str, Any]:
    """Check that each block is gathered by itself; resharding after forward is torch's setting."""
    found, blocks = shard.groups(trained.module), trained.blocks()
    own = {id(module): group for group in found for module in group.modules}
    alone = [b for b in blocks if id(b) in own and _holds(own[id(b)], b)]
    demand(
        len(alone) == len(blocks),
        f"{len(blocks) - len(alone)} of {len(blocks)} blocks are not FSDP groups of their own",
    )
    sizes = {_reshards_to(own[id(block)]) for block in blocks}
    wanted = trained.engine.reshard
    demand(sizes == {wanted}, f"blocks are resharded after forward as {sizes}, expected {wanted}")
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
    """Return the bytes of a share as every rank allocates it: the rows of the largest."""
    rows = -(-parameter.shape[0] // ranks)
    return rows * parameter.shape[1:].numel() * parameter.element_size()


def shares(trained: TrainingRun) -> dict[str, Any]:
    """Return the bytes really stored on this rank, including the storage behind each share."""
    parameters, ranks = list(trained.module.parameters()), trained.launch.layout.sharers
    stored = bytes_of(shard.local(p) for p in parameters if shard.local(p).numel())
    most = sum(_rows(p, ranks) for p in parameters)
    demand(stored <= most, f"this rank stores {stored} bytes of weights, expected at most {most}")
    free = [p for p in parameters if p.requires_grad]
    share = sum(shard.local(p).numel() for p in free) / sum(p.numel() for p in free)
    return {"parameter_share": round(share, 4), "parameter_bytes": stored}


def kept(trained: TrainingRun) -> dict[str, Any]:
    """Check that the optimizer steps the model's own parameters, and holds a share of state for
    each."""
    optimizer = trained.inner_optimizer
    free = [p for p in trained.module.parameters() if p.requires_grad]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = len(stepped - set(map(id, free))) + len(set(map(id, free)) - stepped)
    demand(not strange, f"{strange} parameters are only in the optimizer or only in the model")
    here = whole = 0
    for p in free:
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                demand(
                    alike(p, value), f"the optimizer's {name} is not sharded as its parameter is"
                )
                here, whole = here + shard.local(value).numel(), whole + value.numel()
    return {"optimizer_share": round(here / whole, 4)} if whole else {}


def places(trained: TrainingRun) -> dict[str, Any]:
    """Check the placement of shares: torch's policy, and the tensors' devices, which are equal on a
    CPU."""
    offloads = trained.engine.offloads
    found = shard.groups(trained.module)
    policies = {isinstance(group.offload_policy, CPUOffloadPolicy) for group in found}
    demand(
        policies == {offloads}, f"torch's offload policy is {sorted(policies)}, expected {offloads}"
    )
    if not offloads:
        return {}
    devices = {shard.local(p).device.type for p in trained.module.parameters()}
    state = [shard.local(v) for s in trained.inner_optimizer.state.values() for v in s.values()]
    kept = {v.device.type for v in state if isinstance(v, torch.Tensor) and v.dim()}
    demand(
        devices | kept == {"cpu"},
        f"shards are on {sorted(devices | kept)}, expected in host memory",
    )
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


def alike(parameter: Any, other: Any) -> bool:
    """Return whether another tensor is sharded as a parameter is."""
    cut = isinstance(other, DTensor) and other.placements == parameter.placements
    return cut and shard.local(other).shape == shard.local(parameter).shape


AT_ONCE = 3
"""Groups gathered at once if blocks are resharded: the current one, the next, and the group outside
of blocks."""
RECOMPUTING = "recomputes"
KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
    "allreduce_": "reduce",
    "allreduce_coalesced_": "reduce",
}
"""Collective of FSDP2 -> its operation; a scatter is a reduction that leaves each rank its share.
Other collectives are a strategy's."""


@dataclass
class Effects:
    """Record of one step.

    ``most``: groups gathered at once. ``ahead``: most groups that were prefetched and not waited
    for yet, in forward and in backward. ``gradients``: gradients in the optimizer's step; ``odd``:
    those that are not sharded as their parameters. ``types``: (type that the model was called with,
    type that it received) of its floating inputs.
    """

    most: int = 0
    ahead: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0})
    gradients: int = 0
    odd: list[str] = field(default_factory=list)
    types: set[tuple[str, str]] = field(default_factory=set)


# ---- watched step ----


@contextlib.contextmanager
def observe(trained: TrainingRun) -> Iterator[Effects]:
    """Watch one step; restore torch's classes and the model when it ends."""
    found, given = Effects(), list[str]()
    module = trained.module
    names = {p: name for name, p in module.named_parameters()}

    def before(_: Any, args: Any, named: Any) -> None:
        given[:] = _types((args, named))

    def behind(_: Any, args: Any, named: Any) -> None:
        found.types |= set(zip(given, _types((args, named)), strict=True))

    def stepping(optimizer: Any, *_: Any) -> None:
        """Record the gradients of a step of all parameters, or of one parameter within backward."""
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        there = [p for p in stepped if p.grad is not None]
        found.gradients += len(there)
        found.odd += [names[p] for p in there if not alike(p, p.grad)]

    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_pre_hook(behind, with_kwargs=True),
        trained.inner_optimizer.register_step_pre_hook(stepping),
    ]
    try:
        with _gathering_watched(found), _asking_watched(found, groups(module)):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def _types(values: Any) -> list[str]:
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [str(t.dtype).removeprefix("torch.") for t in leaves if t.is_floating_point()]


@contextlib.contextmanager
def _gathering_watched(found: Effects) -> Iterator[None]:
    """Count the gathered groups, each time that one is gathered or resharded."""
    whole: set[int] = set()

    def noting(name: str, comes: bool) -> Callable[[Any], None]:
        original = getattr(FSDPParamGroup, name)

        def moved(group: Any) -> None:
            original(group)
            (whole.add if comes else whole.discard)(id(group))
            found.most = max(found.most, len(whole))

        return moved

    with contextlib.ExitStack() as stack:
        for name in ("_to_unsharded", "_to_sharded", "_to_sharded_post_forward"):
            comes = name == "_to_unsharded"
            stack.enter_context(mock.patch.object(FSDPParamGroup, name, noting(name, comes)))
        yield


def _asking_watched(found: Effects, known: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """Count the groups whose gather has begun, at each prefetch."""
    ask = FSDPParamGroup._prefetch_unshard

    def asked(group: Any, phase: str) -> None:
        ask(group, phase)
        begun = sum(g._all_gather_result is not None for g in known)
        found.ahead[phase] = max(found.ahead[phase], begun)

    return mock.patch.object(FSDPParamGroup, "_prefetch_unshard", staticmethod(asked))


# ---- evidence ----


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
    shown = (cut, by_block, shares, kept)
    found = {"gathered_as": shard.gathered_as(trained.module)}
    looks = (functools.partial(look, trained) for look in (*shown, places, copies))
    found |= together(trained, *looks)
    if trained.launch.device == "cpu":
        found = label({**found, "started_as": "replicas on CPUs"}, "started_as")
    seen = trained.observed
    if seen is None or not isinstance(seen.engine, Effects):
        return label(found, "reshard_after_forward")
    found |= _step(trained, seen.engine)
    return {**found, **_wire(trained)}


# ---- facts of the watched step ----


def _step(trained: TrainingRun, seen: Effects) -> dict[str, Any]:
    """Check that gradients are sharded, few blocks are gathered at once, and timesteps are not
    rounded."""
    traits, total = trained.launch.traits, len(groups(trained.module))
    demand(not seen.odd, f"{len(seen.odd)} gradients are not sharded, {first(seen.odd)} first")
    demand(seen.gradients > 0, "no parameter had a gradient when the optimizer stepped")
    rounded = sorted(got for asked, got in seen.types if asked != got)
    demand(not rounded, f"the model's inputs, timesteps included, were cast to {rounded}")
    text = f"{seen.most} of {total} groups were gathered at once"
    if trained.engine.reshard is False:
        demand(seen.most == total, f"{text}, expected all: blocks were resharded after forward")
    elif RECOMPUTING not in traits:
        demand(seen.most <= min(AT_ONCE, total), f"{text}: blocks were not resharded after forward")
    return {
        "gradients_cut": seen.gradients,
        "most_groups_at_once": seen.most,
        "prefetch": trained.engine.prefetch or "auto",
        "most_groups_ahead": _ahead(trained, seen),
    }


def _ahead(trained: TrainingRun, seen: Effects) -> dict[str, int]:
    """Check that blocks are prefetched as requested; blocks that stay gathered are not prefetched
    again.

    torch's default is one block, in backward only.
    """
    number, traits = trained.engine.prefetch, trained.launch.traits
    again = trained.engine.reshard is not False
    again = again and not traits & {"frozen_blocks", "some_blocks"}
    least = {"forward": number, "backward": number * again}
    most = {"forward": number, "backward": number or 1}
    text = f"{seen.ahead} groups were prefetched at most, expected {number or 'as torch does'}"
    demand(all(least[k] <= n <= most[k] for k, n in seen.ahead.items()), text)
    return seen.ahead


def _wire(trained: TrainingRun) -> dict[str, Any]:
    """Check the collectives of the step.

    All weights are gathered in forward, and blocks again in backward unless they stay gathered.
    Each group's gradients are reduced once, after the last micro-batch.
    """
    seen = trained.observed
    if not seen.ran:  # compiled blocks are not watched
        return {}
    among = {g.group_name for g in shard.process_groups(trained.module)}
    ours = [s for s in seen.sent if s.collective in KINDS and s.group in among]
    sent = Counter((KINDS[s.collective], s.phase) for s in ours)
    sizes: Counter[tuple[str, str]] = Counter()
    for s in ours:
        sizes[KINDS[s.collective], s.phase] += s.bytes
    trained_groups = [g for g in groups(trained.module) if _trains(g)]
    everything = sum(_sent_by(g) for g in groups(trained.module))
    forward, backward = sizes["gather", "forward"], sizes["gather", "backward"]
    demand(
        forward >= seen.micro_steps * everything,
        f"{forward} bytes of this rank's weights were gathered in forward, expected {everything}",
    )
    if trained.engine.reshard is False:
        demand(not backward, f"{backward} bytes were gathered again in backward, expected none")
    elif "frozen_blocks" not in trained.launch.traits:
        demand(backward > 0, "nothing was gathered again in backward: blocks were not resharded")
    reduced = sent["scatter", "backward"]
    text = f"{reduced} reductions of gradients in a step of {len(trained_groups)} groups"
    demand(
        reduced == len(trained_groups), f"{text}, expected once each, after the last micro-batch"
    )
    averaged = sent["reduce", "backward"]
    wanted = len(trained_groups) if trained.engine.hybrid else 0
    demand(averaged == wanted, f"{averaged} all-reduces of gradients, expected {wanted}")
    types = {s.dtype for s in ours if KINDS[s.collective] == "scatter"}
    return {
        "gathered_bytes": {"forward": forward, "backward": backward},
        "reductions": reduced,
        "gradients_sent_as": "+".join(sorted(types)),
    }


def _trains(group: Any) -> bool:
    return any(p.sharded_param.requires_grad for p in group.fsdp_params)


def _sent_by(group: Any) -> int:
    """Return the bytes of this rank's share of a group, in the type of the gather."""
    return sum(p._sharded_param_data.numel() * _gather_type(p).itemsize for p in group.fsdp_params)


def _gather_type(param: Any) -> torch.dtype:
    """Return the type in which torch gathers a parameter.

    A class that casts before the gather (torchao's for float8) names it ``_dtype``.
    """
    own = getattr(param._sharded_local_tensor, "_dtype", None)
    return own or param.param_dtype or param.orig_dtype
