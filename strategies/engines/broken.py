"""An engine that is not there: its launch file cannot be read, or names one that nobody knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from strategies.engine import Engine

if TYPE_CHECKING:
    from strategies.engine import Launch

__all__ = ["Broken"]


@dataclass(frozen=True)
class Broken(Engine):
    """Refuses every launch, for the reason ``why``."""

    kinds: ClassVar[tuple[str, ...]] = ()

    why: str = ""

    def refuses(self, launch: Launch) -> str | None:
        return f"{self.why}; mend the file, or take another sharding"
