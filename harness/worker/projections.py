"""Random projections of the optimizer's effect: a few sums per parameter that any sharding can add.

Losses and gradient norms describe the optimizer's input. Adam is insensitive to a gradient scale,
and a norm over millions of elements hides one parameter. So a run also stores a few sums of each
trained parameter's elements under fixed random signs. They are sums of its change over the compared
steps, of the optimizer's first moment, and of the weight average.

A sum is linear, so the change needs no copy of the weights, and the sums of a parameter's pieces on
several ranks add up. The expected square of a sum is the square of the norm (Achlioptas 2003, JCSS
66), so two runs whose sums agree under a few signs agree.

Sums are computed in float64 over some tens of thousands of elements at a time. Only the sums are
stored. 100 million weights take a second of one CPU core.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.result import Projections, by_block
from strategies.evidence import states

if TYPE_CHECKING:
    from harness.data.feed import Batch, Feed
    from strategies.engine import TrainingRun


SIGNS = 4
"""Sums per parameter, each under its own signs."""
PERIOD = 65537
"""Number of elements after which the signs repeat. It is a prime, so no matrix has rows that
long."""
DIGITS = 9
"""Digits that are kept of a sum, far more than two equal computations share."""
Sums = dict[str, torch.Tensor]
"""Parameter name -> float64 [SIGNS] of this rank's elements."""


def signs(device: torch.device | str) -> torch.Tensor:
    """Return the signs, +1 and -1, as float64 [PERIOD, SIGNS]: the same on every machine."""
    raw = np.random.PCG64(0).random_raw(PERIOD)
    bits = np.stack([(raw >> np.uint64(40 + i)) & np.uint64(1) for i in range(SIGNS)], axis=1)
    return torch.from_numpy(bits.astype(np.float64) * 2 - 1).to(device)


def project(piece: torch.Tensor, name: str, offset: int, table: torch.Tensor) -> torch.Tensor:
    """Return float64 [SIGNS]: the sums of a flat ``piece`` that starts at element ``offset`` of
    ``name``.

    The sums of a tensor's pieces add up to the sums of the whole.
    """
    total = torch.zeros(SIGNS, dtype=torch.float64, device=piece.device)
    first, start = 0, (zlib.crc32(name.encode()) + offset) % PERIOD
    while first < piece.numel():
        part = piece[first : first + PERIOD - start]
        total += part.double() @ table[start : start + part.numel()]
        first, start = first + part.numel(), 0
    return total


# ---- weights, moments, averages ----


def sums(run: TrainingRun, *, weights_alone: bool = False) -> dict[str, Sums]:
    """Return kind ("weights", "moment", "average") -> sums of this rank's share of all trained
    parameters.

    The parameters are those that the optimizer updates. Before the first step only the
    ``weights_alone`` are meaningful. Every rank must call it, because swapped shards are read.
    """
    averages = [a for kept in run.attached.values() for a in kept.averages()]
    tables: dict[torch.device, torch.Tensor] = {}
    found: dict[str, Sums] = {"weights": {}, "moment": {}, "average": {}}
    for shard in run.engine.shards(run):
        held = {"weights": shard.tensor}
        if not weights_alone:
            held["moment"] = states.first_moment(shard)
            held["average"] = averages[shard.number] if averages else None
        for kind, tensor in held.items():
            for piece in shard.pieces() if tensor is not None else ():
                name = piece.name.replace("_orig_mod.", "")  # torch.compile's wrapper
                if tensor.device not in tables:
                    tables[tensor.device] = signs(tensor.device)
                flat = tensor.detach().reshape(-1)[piece.start :][: piece.numel]
                total = project(flat, name, piece.offset, tables[tensor.device]).cpu()
                found[kind][name] = found[kind].get(name, 0) + total
    return found


# ---- inputs of a step ----


class Inputs:
    """Sums of one step's inputs other than samples: timesteps, noise, conditions.

    Each sample is weighted by its index in the global batch, so the sums of all shares add up for
    any split of the batch.
    """

    def __init__(self, feed: Feed) -> None:
        self.next = feed.share * (feed.global_batch // feed.shares)
        self.found: Sums = {}

    def add(self, batch: Batch) -> None:
        """Add the next micro-batch of this rank's share."""
        table = signs(batch.t.device)
        for name, values in {"t": batch.t, "noise": batch.noise, **batch.conditions}.items():
            flat = values.detach().reshape(-1)
            each = flat.numel() // len(values)
            total = project(flat, name, self.next * each, table).cpu()
            self.found[name] = self.found[name] + total if name in self.found else total
        self.next += len(batch.t)


# ---- all ranks ----


class Watch:
    """Changes made by a run's optimizer since construction; the steps of ``log`` are compared."""

    def __init__(self, run: TrainingRun, feed: Feed) -> None:
        self.run, self.inputs = run, Inputs(feed)
        self.before = sums(run, weights_alone=True)["weights"]

    def end(self, gathered: Callable[[TrainingRun, Any], list[Any]]) -> Projections:
        """Return the change so far, summed over all ranks. Every rank calls it and has the result.

        ``gathered`` returns a value of every rank, in order.
        """
        found, start = sums(self.run), self.before
        now, average = found["weights"], found["average"]
        mine = {
            "update": {name: now[name] - start[name] for name in start},
            "moment": found["moment"],
            "average": {name: average[name] - start[name] for name in average},
        }
        plain = {kind: _listed(total) for kind, total in mine.items()}
        everyone = gathered(self.run, (plain, _listed(self.inputs.found)))
        # Ranks that share samples have the same inputs: only the first of each share counts.
        layout = self.run.launch.layout
        first = {layout.share(rank): rank for rank in reversed(range(len(everyone)))}
        return Projections(
            **{kind: _added([parts[kind] for parts, _ in everyone]) for kind in mine},
            inputs=_added([everyone[rank][1] for rank in sorted(first.values())]),
        )


def _listed(totals: Sums) -> dict[str, list[float]]:
    return {name: total.tolist() for name, total in totals.items()}


def _rounded(sums: Mapping[str, Iterable[float]]) -> dict[str, list[float]]:
    return {name: [float(f"{x:.{DIGITS}g}") for x in values] for name, values in sums.items()}


def _added(parts: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the sums of all ranks' pieces, rounded to ``DIGITS`` digits."""
    pieces: dict[str, list[list[float]]] = {}
    for name, sums in (item for part in parts for item in part.items()):
        pieces.setdefault(name, []).append(sums)
    return _rounded({name: map(sum, zip(*each, strict=True)) for name, each in pieces.items()})


def in_blocks(did: Projections | None) -> Projections | None:
    """Return the sums of each block, for the result; the audit reads those of each parameter."""
    if did is None:
        return None
    kinds = ("update", "moment", "average")
    return dataclasses.replace(did, **{k: _rounded(by_block(getattr(did, k))) for k in kinds})
