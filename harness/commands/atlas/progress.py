"""How an atlas tells that it goes on: what is predicted anew, a line every few models. No torch."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from harness.commands.planning.plan.progress import PlanProgress
from harness.predict.prediction import Prediction

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["AtlasProgress"]


class AtlasProgress(PlanProgress):
    """Of ``models`` models. What an earlier card or call predicted is said by its number alone."""

    def __init__(self, console: Console, models: int) -> None:
        super().__init__(console)
        self.models, self.at, self.why, self.told = models, 0, "", ""
        self.since, self.made = 0.0, 0

    def begin_models(self, names: Sequence[str]) -> None:
        """The cells of some models begin."""
        first, self.at = self.at + 1, self.at + len(names)
        self.since, self.made, self.told = time.monotonic(), 0, ""
        which = f"model {first}" if len(names) == 1 else f"models {first} to {self.at}"
        line = Text.assemble((", ".join(names), "bold"), f"  {which} of {self.models}")
        self.console.print(line, soft_wrap=True)

    def begin(
        self, names: Sequence[str], jobs: int, why: str = "", kept: Collection[int] = ()
    ) -> None:
        """Nothing is said yet."""
        self.names, self.kept, self.began, self.why = list(names), kept, time.monotonic(), why

    def done(self, index: int, prediction: Prediction) -> None:
        """A line for what was made now, below what it is for."""
        if index in self.kept:
            return
        if self.told != self.why:
            self.told = self.why
            self._say(f"  {self.why}")
        self.made += 1
        why = "" if prediction.method == "trace" else f": {prediction.reason}"
        self._say(f"    {self.names[index]}{why}  {time.monotonic() - self.began:.0f} s")

    def end(self) -> None:
        """Nothing is said."""

    def end_models(self, cells: int) -> None:
        """All cells of these models are there."""
        left = self.models - self.at
        after = f"{left} model{'s' * (left != 1)} left" if left else "the last model"
        seconds = time.monotonic() - self.since
        self._say(f"  {cells} cells, {self.made} predictions made, {seconds:.0f} s; {after}")

    def _say(self, line: str) -> None:
        self.console.print(Text(line), soft_wrap=True)
