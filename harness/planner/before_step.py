"""Phases of a public model's training before its first step: loading the weights, and encoding
texts and latents, which most trainers then cache. No torch.
Sizes of weights and passes are those of ``resident_models.yaml``. LTX-2's run was measured by
others at 34.8 GB where its step takes 11.2: all encoders loaded together, as here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.planner import resident_models, uncertainty
from harness.planner.overhead import fixed_overhead
from harness.planner.resident_models import BYTES
from harness.planner.verdict import decide
from harness.report.figures.units import GIB
from harness.resolve import Resolved
from harness.subjects.library import families
from harness.system.cards import Card

HALF = "bf16"
KINDS = {HALF: "in 16 bits", "fp8": "text encoders in 8 bits", "nf4": "text encoders in 4 bits"}
"""Stored dtype of the text encoders -> words. A VAE stays in 16 bits."""


class Way(NamedTuple):
    """A ``way`` to encode, in words; bytes of a GPU that it needs; fits, tight or no."""

    way: str
    bytes: int
    verdict: str


def _way(what: str, weights: int, rest: int, memory: int) -> Way:
    """Return a way on a GPU of ``memory``. ``weights`` are known; the ``rest``, of passes and
    libraries, has the range of a plan."""
    need, spread = weights + rest, int(uncertainty.shares()["beside the step"].share * rest)
    return Way(what, need, decide(need - spread, need + spread, memory))


@dataclass(frozen=True, kw_only=True)
class Before:
    """Phases before the first step.
    ``ways``: of encoding; the first is the usual one, the others need less. ``host``: bytes that
    loading the weights fills on a node, one copy in each of ``copies`` processes; ``host_memory``:
    what the node has. ``whole``: the passes are counted beside the weights."""

    ways: Sequence[Way]
    host: int
    copies: int
    host_memory: int
    whole: bool

    @property
    def verdict(self) -> str:
        """Fits, tight or no: of loading and of the usual way of encoding."""
        return "no" if self.host > self.host_memory else self.ways[0].verdict

    @property
    def fits(self) -> bool:
        """True if the upper end of the range fits."""
        return self.verdict == "fits"

    @property
    def lines(self) -> list[str]:
        """The assumption and its figures, in words."""
        first, more = self.ways[0], "" if self.whole else " or more"
        lines = [
            "Assumed, as most trainers do: texts and latents are encoded before the step, and "
            f"cached. Encoding needs {_gib(first.bytes)} GiB{more} ({first.way}), loading "
            f"{_gib(self.host)} GiB of host memory. --cached leaves both out."
        ]
        if self.host > self.host_memory:
            lines.append(
                f"  Loading does not fit: the host has {_gib(self.host_memory)} GiB for "
                f"{self.copies} copies; load in one process, or from safetensors by mmap"
            )
        if first.verdict != "fits":
            word = {"tight": "may not fit", "no": "does not fit"}[first.verdict]
            found = next((way for way in self.ways[1:] if way.verdict == "fits"), None)
            more = "in tiles (--phases encode:alone+tiled predicts it), or on the CPU"
            more = f", nor do text encoders in 4 bits, one model at a time: encode {more}"
            if found:
                more = f"; this fits: {found.way}, {_gib(found.bytes)} GiB"
            lines.append(f"  Encoding so {word}{more}")
        return lines

    @property
    def short(self) -> str:
        """Why it does not fit, and what does, in one line."""
        _, *more = self.lines
        first = f"encoding {_gib(self.ways[0].bytes)} GiB ({self.ways[0].way})"
        last = "--cached if it was done before"
        return "; ".join([first, *(line.strip() for line in more), last])

    @property
    def as_json(self) -> dict[str, Any]:
        """The phases as plain data."""
        ways = [one._asdict() for one in self.ways]
        return {"verdict": self.verdict, "encode": ways, "load_host_bytes_node": self.host}


def of(row: Resolved, card: Card) -> Before | None:
    """Return what comes before the step of ``row``; None for a model whose encoders are unknown."""
    names = resident_models.usual_of(row.spec.model)
    if not names or card.shared:
        return None
    passes = resident_models.passes(row.spec)
    there = fixed_overhead(card, row.spec.processes, row.recipe.sharding.name).total
    half = {name: resident_models.named(f"{name}:{HALF}").bytes for name in names}
    largest = max((passes.get(name, 0) for name in names), default=0)
    have, what = card.memory_bytes, f"{', '.join(names)} in 16 bits"
    ways = [_way(what, sum(half.values()), there + largest, have)]
    vaes = [name for name in names if "latent" in resident_models.table()[name]]
    for kind, words in KINDS.items():
        stored = {name: HALF if name in vaes else kind for name in names}
        each = {name: resident_models.named(f"{name}:{stored[name]}").bytes for name in names}
        last = max(names, key=lambda name: each[name] + passes.get(name, 0))
        what = f"one model at a time, {words}"
        ways.append(_way(what, each[last], there + passes.get(last, 0), have))
    copies = min(card.node, row.spec.processes)
    # The published weights are loaded, also into a shape that --set changes.
    elements = families.table()[row.spec.model].parameters["built"]
    host = int(copies * elements * BYTES[HALF])
    on_node = card.host_bytes(row.spec.processes)
    return Before(ways=ways, host=host, copies=copies, host_memory=on_node, whole=bool(passes))


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
