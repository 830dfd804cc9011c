"""guidance: the two model calls of classifier-free guidance, batched or sequential."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from unittest import mock

from strategies.base import Slot, demand
from strategies.engine import TrainingRun
from strategies.strategy import Strategy
from strategies.workloads import SAMPLE

HOW = ("batched", "sequential")


class Call(NamedTuple):
    """Call of the model: its samples, and how many of them had their condition withheld."""

    samples: int
    withheld: int


@dataclass(frozen=True, kw_only=True)
class Guidance(Strategy):
    """Predicts with the conditions and without them.

    ``how=batched`` runs one batch of twice the samples. ``how=sequential`` runs one after the
    other, which halves the activations.
    """

    name: ClassVar[str] = "guidance"
    slot: ClassVar[Slot] = Slot.GUIDE
    source: ClassVar[str] = "Ho and Salimans 2022 (arXiv:2207.12598); DiT's forward_with_cfg"
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)

    how: str = "batched"

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise ValueError(f"how is {self.how!r}; one of {', '.join(HOW)}")

    @contextlib.contextmanager
    def observe(self, trained: TrainingRun) -> Iterator[list[Call]]:
        """Record the calls of one batch, in order."""
        kind, seen = type(trained.subject), []
        predict = kind.predict

        def watched(subject: Any, model: Any, x: Any, t_B: Any, conditions: Any) -> Any:
            drop = conditions.get("drop")
            seen.append(Call(len(x), 0 if drop is None else int(drop.sum())))
            return predict(subject, model, x, t_B, conditions)

        with mock.patch.object(kind, "predict", watched):
            yield seen

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        calls: Any = self.note(trained)
        asked: Any = trained.sampling
        demand(bool(calls), "no call of the model was recorded")
        whole, halves = asked.samples, (Call(asked.samples, 0), Call(asked.samples, asked.samples))
        if asked.guidance == 1:
            wanted = [halves[0]]
        elif self.how == "batched":
            wanted = [Call(2 * whole, whole)]
        else:
            wanted = list(halves)
        odd = [call for call in calls if call not in wanted]
        demand(not odd, f"the model was called on {odd[:1]}, expected {wanted}")
        times = {call: calls.count(call) for call in wanted}
        right = set(times.values()) == {asked.evaluations}
        demand(
            right, f"the numbers of calls of each kind are {times}, expected {asked.evaluations}"
        )
        return {"calls": len(calls), "samples_a_call": calls[0].samples, "guidance": asked.guidance}
