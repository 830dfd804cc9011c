"""What shows that the ranks of a stage share it: their objects (``fsdp.objects``), and, in one
watched step, how often each block was gathered and what was reduced."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from strategies.base import demand
from strategies.engines.fsdp import facts, objects
from strategies.engines.pipeline import effects

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["SeenShards", "evidence", "observe"]


@dataclass
class SeenShards(effects.Seen):
    """What a stage ran in one step, and how often each of torch's groups, by its id, was
    gathered."""

    gathered: Counter[int] = field(default_factory=Counter)


@contextlib.contextmanager
def observe(trained: Trained) -> Iterator[SeenShards]:
    """Note what this stage runs, and what it gathers."""
    gathered: Counter[int] = Counter()
    original = FSDPParamGroup._to_unsharded

    def noted(group: Any) -> None:
        original(group)
        gathered[id(group)] += 1

    watch = mock.patch.object(FSDPParamGroup, "_to_unsharded", noted)
    with effects.observe(trained) as seen, watch:
        yield SeenShards(seen.parts, gathered)


def evidence(trained: Trained) -> dict[str, Any]:
    """Facts of this rank's share, and of the watched step; nothing is told to others.

    Raises:
        NotInForce: some of it is not shared, not by block, or not as the recipe asks.
    """
    gathered = facts.gathered_as(trained.module)
    found: dict[str, Any] = {"sharers": trained.model.places.data, "gathered_as": gathered}
    for look in (objects.cut, objects.by_block, objects.shares, objects.kept):
        found |= look(trained)
    seen = trained.observed
    if seen is None or not seen.ran:
        return found
    return found | _gathered(trained, seen.engine) | _reduced(trained)


def _gathered(trained: Trained, seen: SeenShards) -> dict[str, Any]:
    """How often: once where weights are kept for all micro batches; else for each, there and back,
    and at least once a micro batch where it is there that torch gathers ahead. What lies outside of
    blocks is gathered for each run of them."""
    groups, runs = _groups(trained), len(trained.model.cut.blocks)
    times = [seen.gathered[id(group)] for group in groups]
    micro = trained.engine.micro
    for group, n in zip(groups, times, strict=True):
        uses = micro * (runs if trained.module in group.modules else 1)
        low, high = (uses, 2 * uses + 1) if trained.engine.reshard else (1, 1)
        demand(low <= n <= high, f"groups were gathered {n} times in a step, not {low} to {high}")
    gathers = [s for s in _sent(trained) if "gather" in s.collective]
    demand(len(gathers) == sum(times), f"{len(gathers)} all-gathers of {sum(times)}")
    return {"gathers_of_groups": times, "gathered_bytes": sum(s.bytes for s in gathers)}


def _reduced(trained: Trained) -> dict[str, Any]:
    """Each group's gradients once, behind the last micro batch, and none of them whole."""
    ours = _sent(trained)
    free = [[p for p in g.fsdp_params if p in trained.model.graded] for g in _groups(trained)]
    groups = sum(bool(own) for own in free)
    scattered = [s for s in ours if "reduce_scatter" in s.collective]
    told = f"{len(scattered)} reductions of gradients in a step of {groups} groups"
    demand(len(scattered) == groups, f"{told}: once each, behind the last micro batch")
    _none_lost(trained)
    sent, sharers = sum(s.bytes for s in scattered), trained.model.places.data
    wanted = sum(sharers * _room(p) for own in free for p in own)
    demand(sent == wanted, f"{sent} bytes of gradients were reduced, of {wanted}")
    summed = [s.bytes for s in ours if s.collective.startswith("allreduce") and s.bytes > SCALAR]
    demand(not summed, f"{len(summed)} all-reduces of {sum(summed)} bytes: gradients were whole")
    types = {s.dtype for s in scattered}
    return {
        "reductions": groups,
        "gradient_bytes_reduced": sent,
        "gradients_sent_as": "+".join(sorted(types)),
    }


def _none_lost(trained: Trained) -> None:
    """What trains has a gradient, but for what all stages have."""
    named, shared = trained.module.named_parameters(), trained.model.cut.shared
    common = {id(p) for name, p in named if name in shared}
    each = (p for group in _groups(trained) for p in group.fsdp_params)
    own = [p for p in each if p.sharded_param.requires_grad and id(p.sharded_param) not in common]
    lost = [p for p in own if p not in trained.model.graded]
    demand(not lost, f"{len(lost)} parameters of this stage alone had no gradient")


def _room(p: Any) -> int:
    """Bytes of a gradient's rows as every rank has room for them, in the type that is sent."""
    kind = p.reduce_dtype or p.param_dtype or p.orig_dtype
    return p.padded_sharded_param_size.numel() * kind.itemsize


SCALAR = 8
"""Bytes of a norm, which the ranks of a stage add up."""


def _groups(trained: Trained) -> list[Any]:
    """torch's groups that have weights: a stage in the middle has none outside of its blocks."""
    return [group for group in facts.groups(trained.module) if group.fsdp_params]


def _sent(trained: Trained) -> list[Any]:
    """What this rank handed to the others of its stage."""
    among = trained.model.places.replicas.group_name
    return [s for s in trained.observed.sent if s.group == among]
