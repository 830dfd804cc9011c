"""The network between nodes as a plan takes it: typical of a card's clusters, or measured.

The seam for a calibration: whoever has measured a network gives its ``Wire``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from harness.predict.speed.cards import Card
from harness.result import Wire, load_all
from strategies.base import BadInput

__all__ = ["measured", "of_results"]


def of_results(gpu: Card, folder: Path) -> Card:
    """``gpu`` between nodes as the results in ``folder`` measured them; the slowest of several.

    Raises:
        BadInput: no result there was measured on several nodes with GPUs.
    """
    wires = [r.wire for r in load_all(folder)[0] if r.wire and r.wire.backend == "nccl"]
    if not wires:
        raise BadInput(
            f"network is {folder}: no result there has a network measured between GPUs; run "
            "./run.sh run --nodes on such machines, or leave --network out"
        )
    return measured(gpu, min(wires, key=lambda wire: wire.bandwidth), str(folder))


def measured(gpu: Card, wire: Wire, told: str) -> Card:
    """``gpu`` with a network that was measured. One process a node measured it: a node with
    several network cards may reach more with all its GPUs, so that the time is an upper bound."""
    return dataclasses.replace(gpu, network_bandwidth=wire.bandwidth, network_told=told)
