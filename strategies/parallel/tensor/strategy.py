"""Tensor parallel: neighbouring ranks have a part each of the blocks' matrices.

No torch at import. The FSDP engine cuts each block before it shards it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot
from strategies.engine import RunContext, TrainingRun
from strategies.parallel.groups import INNER, from_two, undealt, uneven
from strategies.strategy import Strategy
from strategies.subject import Subject


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Strategy):
    """Groups of ranks share the blocks' weights, which FSDP2 shards further.

    Each of the ``ranks`` neighbors has some of the heads and of the MLP's inner features. torch's
    DTensors sum the outputs of each attention and MLP in forward, and the gradients of its inputs
    in backward. Embedders, norms, modulation and the final layer are cut by FSDP2 alone. All ranks
    of a group work on the same samples.
    """

    name: ClassVar[str] = "tp"
    slot: ClassVar[Slot] = Slot.TENSOR
    source: ClassVar[str] = (
        "Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053); torch.distributed.tensor.parallel"
    )
    ranges: ClassVar[dict[str, Any]] = {"ranks": (from_two, "so many share the weights, from 2 on")}

    ranks: int = 2

    def traits(self) -> frozenset[str]:
        return frozenset({"cut_weights"})

    def refuses(self, launch: RunContext) -> str | None:
        subject = launch.subject
        if not subject.parts.keys() & {"halves", "tp_plan"}:
            part = "tp_plan" if subject.needs else "halves"
            return subject.lacks(part, "leave tp out, or take fsdp2")
        fault = super().refuses(launch) or uneven(launch) or self._uneven(subject)
        if fault or launch.layout.sharers > 1:
            return fault
        # accelerate 1.15 makes no mesh for FSDP2 over one rank (ParallelismConfig.fsdp_dim_names).
        return (
            f"of {launch.processes} processes one has each part, and shards it with nobody; "
            f"use --processes {2 * self.ranks}"
        )

    def _uneven(self, subject: Subject) -> str | None:
        """Return why heads or inner features cannot be dealt to ``ranks``; those of a plan are read
        off a model without memory."""
        size = subject.survey
        counts = [(size.widest.heads, "heads"), (size.inner, INNER)]
        if "tp_plan" in subject.parts:
            counts = [(size.widest.heads, "heads"), *((n, INNER) for n in _pieces(subject))]
        odd = next((f"{n} {what}" for n, what in counts if n % self.ranks), None)
        return odd and undealt(self, odd, math.gcd(*(number for number, _ in counts)))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.parallel.tensor import effects

        return effects.evidence(run)


@functools.lru_cache(maxsize=64)
def _pieces(subject: Subject) -> tuple[int, ...]:
    """Return the lengths that the plan of a model of diffusers cuts."""
    from strategies import initial
    from strategies.parallel.tensor.parallelize import plan

    with initial.valueless():
        module = subject.make()
    cuts = (cut for cuts in plan(module, subject.blocks(module)) for cut in cuts.values())
    return tuple(sorted({size for cut in cuts for size in cut.pieces}))
