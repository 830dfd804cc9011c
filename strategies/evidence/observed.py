"""What a watched training step showed (``strategies.evidence.watching`` takes it)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Observed", "Ran", "Sent"]

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")


class Ran(NamedTuple):
    """One operator of the step: torch's name (aten::mm), shapes of its operands, the type of its
    first result, and the phase of the step (``strategies.engine.STEP_PHASES``), or the word under
    which it ran beside the trained model (``strategies.evidence.watching.beside``)."""

    name: str
    shapes: list[list[int]]
    dtype: str
    phase: str


class Sent(NamedTuple):
    """What this rank handed to one collective (allreduce_, _allgather_base_): type and bytes;
    ``group``: torch's name of the ranks that it is among."""

    collective: str
    dtype: str
    bytes: int
    phase: str
    group: str = ""


@dataclass
class Observed:
    """What one step showed. ``ran`` and ``sent`` are empty where the blocks are compiled, since a
    watched graph would run uncompiled; ``notes`` are the strategies' own, by name, ``engine`` the
    engine's."""

    micro_steps: int = 0
    ran: list[Ran] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    engine: Any = None

    def products(self, *phases: str) -> Counter[str]:
        """Type of the result -> matrix products in these phases."""
        return Counter(r.dtype for r in self.ran if r.name in PRODUCTS and r.phase in phases)

    def sent_in(self, *phases: str) -> dict[str, int]:
        """Collective and type -> bytes that this rank handed over in these phases."""
        total: Counter[str] = Counter()
        for sent in self.sent:
            if sent.phase in phases:
                total[f"{sent.collective.strip('_')} {sent.dtype}"] += sent.bytes
        return dict(total)
