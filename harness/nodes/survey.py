"""Before the first row: every node as it is, its ops compiled, and the network between them.

One launch like a row's, of ``harness.nodes.wire`` in the place of a training.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.json_files import BadFile, read_json
from harness.launch import launch
from harness.launch.command import HEAD, INTERFACE, PORT, RANK
from harness.nodes.files import End, Ready
from harness.nodes.launched import make_order, start
from harness.nodes.place import Place
from harness.result import Wire
from strategies.base import BadInput

__all__ = ["SurveyError", "slow", "survey"]

SECONDS = 120.0
LATENCY_SECONDS = 1e-3
"""An all-reduce over any local network takes less."""
BANDWIDTH = 100e6
"""Bytes a second: gigabit Ethernet, below which gradients of the smallest models wait."""


class SurveyError(BadInput):
    """Nodes that cannot run one training: which, why, and the way out."""


def survey(place: Place, out: Path, device: str, ops: Sequence[str] = ()) -> list[Ready]:
    """What every node has; ``place`` gets the wire and notes on what is slow.

    Raises:
        SurveyError: a node lacks something, is unlike the others, or cannot be reached.
    """
    folder = out / "nodes" / "survey"
    words = [os.path.abspath(sys.executable), "-m", "harness.nodes.wire", "--rank", RANK]
    words += ["--nodes", str(place.nodes), "--head", HEAD, "--port", PORT, "--device", device]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    order = make_order(
        place,
        out,
        words=words,
        environment={"GLOO_SOCKET_IFNAME": INTERFACE, **hidden},
        processes=1,
        timeout=SECONDS,
        ops=ops,
    )
    here = folder / order.token
    order.words += ["--out", str(here / "wire.json")]
    launched, _ = start(order, here, place)
    if launched.go is None or launched.go.refused:
        gone = [rank for rank in range(place.nodes) if rank not in launched.ready]
        why = launched.go.refused if launched.go else ""
        raise SurveyError(why or f"node {', '.join(map(str, gone))} gave no sign; see {here}")
    ends = launched.ends()
    place.wire = _wire(here)
    if place.wire is None:
        raise SurveyError(_no_wire(here, ends, place))
    place.notes += slow(place.wire)
    return [launched.ready[rank] for rank in sorted(launched.ready)]


def _wire(here: Path) -> Wire | None:
    with contextlib.suppress(BadFile):
        return read_json(here / "wire.json", Wire, name="wire")
    return None


def _no_wire(here: Path, ends: dict[int, End | None], place: Place) -> str:
    last = ""
    for rank in range(place.nodes):
        lines = launch.read_log(here / f"log.node{rank}.txt").strip().splitlines()
        last = last or (lines[-1][:200] if lines else "")
    ways = [f"node {r}: {e.interface}" for r, e in ends.items() if e]
    return (
        f"the nodes could not exchange data by torch's own network (interfaces: "
        f"{', '.join(ways)}): {last or 'no message'}; set HEADROOM_INTERFACE to the interface "
        f"between them; logs in {here}"
    )


def slow(wire: Wire) -> list[str]:
    """A note where the network would be what a comparison shows."""
    notes = []
    if wire.bandwidth < BANDWIDTH:
        notes.append(
            f"slow network between the nodes: {wire.bandwidth / 1e6:.1f} MB/s, below gigabit "
            "Ethernet: times are the network's"
        )
    if wire.latency_seconds > LATENCY_SECONDS:
        notes.append(
            f"slow network between the nodes: an all-reduce of 8 bytes takes "
            f"{wire.latency_seconds * 1e3:.1f} ms: times are the network's"
        )
    return notes
