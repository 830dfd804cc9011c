"""Engine of one process without sharding, and the engine of unusable launch files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engine import Engine

if TYPE_CHECKING:
    from strategies.engine import RunContext, TrainingRun


class Alone(Engine):
    """Engine that trains the unwrapped model in one process."""

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"one_process"})

    def refuses(self, launch: RunContext) -> str | None:
        if launch.processes > 1:
            return f"trains one process, not {launch.processes}; use --processes 1, or ddp"
        return None

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        demand(trained.model is trained.module, f"the model is a {type(trained.model).__name__}")
        return {"wrapper": "none"}


# ---- unusable launch files ----


@dataclass(frozen=True)
class Broken(Engine):
    """Placeholder for an unreadable or unknown launch file; refuses every launch with the reason
    ``why``."""

    why: str = ""

    def refuses(self, launch: RunContext) -> str | None:
        return f"{self.why}; mend the file, or take another sharding"
