"""Sequence parallel: neighbouring ranks have a part each of the same samples' tokens. No torch at
import."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot
from strategies.engine import RunContext, TrainingRun
from strategies.parallel.groups import from_two, undealt, uneven
from strategies.strategy import Strategy
from strategies.subject import Subject


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(Strategy):
    """Groups of ranks share each sample, cut by tokens.

    Each of the ``ranks`` neighbors embeds, runs and predicts a stripe of the tokens. Only attention
    sees all of them. With ``tp``, neighbors hold parts of the same weights, and the ranks of a
    sample are ``tp:ranks`` apart.

    Heads are exchanged for tokens around attention (Ulysses), so heads must divide by ``ranks``.
    The engine averages gradients over all ranks. The global batch is divided among the groups
    alone.
    """

    name: ClassVar[str] = "sp"
    slot: ClassVar[Slot] = Slot.SEQUENCE
    source: ClassVar[str] = "Jacobs et al. 2023, DeepSpeed Ulysses (arXiv:2309.14509)"
    ranges: ClassVar[dict[str, Any]] = {
        "ranks": (from_two, "so many share a sample, a number from 2")
    }

    ranks: int = 2

    def traits(self) -> frozenset[str]:
        return frozenset({"cut_samples"})

    def refuses(self, launch: RunContext) -> str | None:
        subject = launch.subject
        if odd := super().refuses(launch) or uneven(launch):
            return odd
        if "stripes" not in subject.parts:
            return subject.lacks("stripes", "leave sp out")
        if "attend" not in subject.parts:
            if "compiled" in launch.traits:
                return "its graphs would not have what is exchanged; leave compile out"
            if "cut_weights" in launch.traits:
                return "torch's attention was not tried with parts of both; leave sp or tp out"
            if any(a.queries == self.ranks * a.keys for a in subject.survey.attention):
                return "a part would be as long as the text, and taken for it; take other ranks"
        most = subject.stripes.most
        if most % self.ranks:
            fitting = [str(n) for n in range(2, most + 1) if most % n == 0]
            return (
                f"samples of {most} rows of tokens are not {self.ranks} equal stripes; "
                f"take ranks of {' or '.join(fitting) or 'none'}, or another resolution or text"
            )
        heads = subject.survey.widest.heads // launch.tensor
        if heads % self.ranks:
            of = f" on each rank of tp:ranks={launch.tensor}" if launch.tensor > 1 else ""
            return undealt(self, f"{heads} heads{of}", math.gcd(heads, most))
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.parallel.sequence import attention

        attention.install(module, subject)

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        from strategies.parallel import groups
        from strategies.parallel.sequence import attention

        group = groups.group_of(self.ranks, launch.layout.tensor, accelerator.num_processes)
        attention.connect(module, launch.subject, group)
        part = launch.layout.part(accelerator.process_index)
        launch.subject.take_part(module, part, self.ranks)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.parallel.sequence import effects

        return effects.evidence(run)
