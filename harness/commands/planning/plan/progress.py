"""How a plan tells that its predictions come in."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from harness.predict.prediction import Prediction

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["PlanProgress"]


class PlanProgress:
    """One line a prediction, as it ends."""

    def __init__(self, console: Console) -> None:
        self.console, self.names, self.ended, self.began = console, [], 0, time.monotonic()

    def begin(
        self, names: Sequence[str], jobs: int, why: str = "", kept: Collection[int] = ()
    ) -> None:
        """So many predictions begin; ``why`` leads in, ``kept`` has the indices of those that an
        earlier call made."""
        self.names, self.ended = list(names), 0
        some = f"{len(names)} prediction{'s' * (len(names) != 1)}"
        self.console.print(f"{why}{some}, {jobs} at a time", highlight=False)

    def done(self, index: int, prediction: Prediction) -> None:
        """One of them ended."""
        self.ended += 1
        seconds = time.monotonic() - self.began
        why = f": {prediction.reason}" if prediction.method != "trace" else ""
        line = f"[{self.ended}/{len(self.names)}] {self.names[index]} ({prediction.method}{why})"
        self.console.print(f"  {escape(line)}  {seconds:.0f} s", highlight=False, soft_wrap=True)

    def end(self) -> None:
        """All of them ended."""
        self.console.print()
