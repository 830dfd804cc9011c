"""What the optimizer did to each parameter, in a few numbers that any sharding can add up.

Losses and gradient norms say what an optimizer was given; Adam forgives a scale of its gradients,
and a norm of millions of elements hides one parameter. So a run also keeps, for each trained
parameter, a few sums of its elements under fixed random signs: of its change over the compared
steps, of the optimizer's first moment, and of the average of the weights. A sum is linear, so the
change needs no copy of the weights, and pieces of a parameter on several ranks add up to it; its
square is on average the square of the norm (Achlioptas 2003, JCSS 66), so that two runs whose sums
agree under a few signs agree.

Sums are taken in float64, some tens of thousands of elements at a time, and nothing is kept but the
sums: a hundred million weights cost a second of one CPU core.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.result import Projections
from strategies.evidence import states

if TYPE_CHECKING:
    from harness.data.feed import Batch, Feed
    from strategies.engine import TrainingRun
    from strategies.inventory import Fragment


SIGNS = 4
"""Sums of one parameter: each under signs of its own."""
PERIOD = 65537
"""The signs repeat after so many elements, a prime: no matrix has rows of that length."""
DIGITS = 9
"""That are kept of a sum, far more than two equal computations share."""
Sums = dict[str, torch.Tensor]
"""A parameter's name -> float64 [SIGNS] of this rank's elements of it."""


def signs(device: torch.device | str) -> torch.Tensor:
    """The signs, +1 and -1, float64 [PERIOD, SIGNS]: the same everywhere and always."""
    raw = np.random.PCG64(0).random_raw(PERIOD)
    bits = np.stack([(raw >> np.uint64(40 + i)) & np.uint64(1) for i in range(SIGNS)], axis=1)
    return torch.from_numpy(bits.astype(np.float64) * 2 - 1).to(device)


def project(piece: torch.Tensor, name: str, offset: int, table: torch.Tensor) -> torch.Tensor:
    """float64 [SIGNS]: the sums of the flat ``piece``, whose elements are those from ``offset`` of
    the flattened tensor ``name``. Pieces of one tensor add up to the sums of the whole."""
    total = torch.zeros(SIGNS, dtype=torch.float64, device=piece.device)
    first, start = 0, (zlib.crc32(name.encode()) + offset) % PERIOD
    while first < piece.numel():
        part = piece[first : first + PERIOD - start]
        total += part.double() @ table[start : start + part.numel()]
        first, start = first + part.numel(), 0
    return total


# ---- weights, moments, averages ----


def sums(trained: TrainingRun, *, weights_alone: bool = False) -> dict[str, Sums]:
    """Kind ("weights", "moment", "average") -> the sums of this rank's share of all trained
    parameters, as the optimizer updates them; before the first step the ``weights_alone`` tell
    something. Every rank calls it: swapped shards are read."""
    pieces: dict[int, list[Fragment]] = {}
    for fragment in trained.engine.fragments(trained):
        pieces.setdefault(fragment.shard, []).append(fragment)
    averages = [a for kept in trained.attached.values() for a in kept.averages()]
    tables: dict[torch.device, torch.Tensor] = {}
    found: dict[str, Sums] = {"weights": {}, "moment": {}, "average": {}}
    for index, shard in trained.engine.shards(trained):
        held = {"weights": shard}
        if not weights_alone:
            held["moment"] = states.first_moment(trained, shard)
            held["average"] = averages[index] if averages else None
        for kind, tensor in held.items():
            for fragment in pieces.get(index, ()) if tensor is not None else ():
                name = _plain(fragment.name)
                if tensor.device not in tables:
                    tables[tensor.device] = signs(tensor.device)
                flat = tensor.detach().reshape(-1)[fragment.start :][: fragment.numel]
                total = project(flat, name, fragment.offset, tables[tensor.device]).cpu()
                found[kind][name] = found[kind].get(name, 0) + total
    return found


def _plain(name: str) -> str:
    """A parameter's name without the wrappers that torch.compile puts around modules."""
    return name.replace("_orig_mod.", "")


# ---- what a step is given ----


class Inputs:
    """The sums of what one step is given beside the samples: timesteps, noise, conditions.

    Each sample counts by its place in the global batch, so that they do not depend on how it was
    cut: those of all shares add up.
    """

    def __init__(self, feed: Feed) -> None:
        self.next = feed.share * (feed.global_batch // feed.shares)
        self.found: Sums = {}

    def add(self, batch: Batch) -> None:
        """Take the next micro batch of this rank's share."""
        table = signs(batch.t.device)
        for name, values in {"t": batch.t, "noise": batch.noise, **batch.conditions}.items():
            flat = values.detach().reshape(-1)
            each = flat.numel() // len(values)
            total = project(flat, name, self.next * each, table).cpu()
            self.found[name] = self.found[name] + total if name in self.found else total
        self.next += len(batch.t)


# ---- of all ranks ----


class Watch:
    """What a run's optimizer does from now on; the steps of ``log`` are the compared ones."""

    def __init__(self, trained: TrainingRun, feed: Feed) -> None:
        self.trained, self.inputs = trained, Inputs(feed)
        self.before = sums(trained, weights_alone=True)["weights"]

    def end(self, gathered: Callable[[TrainingRun, Any], list[Any]]) -> Projections:
        """What was done until now, summed over all ranks; every rank calls it and has the result.
        ``gathered`` gives a value of every rank, in order."""
        found, start = sums(self.trained), self.before
        now, average = found["weights"], found["average"]
        mine = {
            "update": {name: now[name] - start[name] for name in start},
            "moment": found["moment"],
            "average": {name: average[name] - start[name] for name in average},
        }
        plain = {kind: _listed(total) for kind, total in mine.items()}
        everyone = gathered(self.trained, (plain, _listed(self.inputs.found)))
        # Ranks that work on the same samples were given the same: the first of each share counts.
        layout = self.trained.launch.layout
        first = {layout.share(rank): rank for rank in reversed(range(len(everyone)))}
        return Projections(
            **{kind: _added([parts[kind] for parts, _ in everyone]) for kind in mine},
            inputs=_added([everyone[rank][1] for rank in sorted(first.values())]),
        )


def _listed(totals: Sums) -> dict[str, list[float]]:
    return {name: total.tolist() for name, total in totals.items()}


def _added(parts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The sums of all ranks' pieces, a few digits of them."""
    names = dict.fromkeys(name for part in parts for name in part)
    added = {name: map(sum, zip(*_of(parts, name), strict=True)) for name in names}
    return {name: [float(f"{x:.{DIGITS}g}") for x in total] for name, total in added.items()}


def _of(parts: list[dict[str, list[float]]], name: str) -> Iterator[list[float]]:
    return (part[name] for part in parts if name in part)
