"""One process, no sharding: the plain loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import demand
from strategies.engine import Engine, TraceAdapter

if TYPE_CHECKING:
    from strategies.engine import RunContext, TrainingRun


class SingleProcess(TraceAdapter):
    """No process group is wanted."""

    ranks: ClassVar[bool] = False


class Alone(Engine):
    """Trains the model as it is."""

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"one_process"})

    def refuses(self, launch: RunContext) -> str | None:
        if launch.simulated:
            return "trains alone, so there is no world to simulate; leave --world out, or take ddp"
        if launch.processes > 1:
            return f"trains one process, not {launch.processes}; use --processes 1, or ddp"
        return None

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        demand(trained.model is trained.module, f"the model is a {type(trained.model).__name__}")
        return {"wrapper": "none"}

    def imitation(self) -> TraceAdapter:
        return SingleProcess()


# ---- broken ----
# An engine that is not there: its launch file cannot be read, or names one that nobody knows.


@dataclass(frozen=True)
class Broken(Engine):
    """Refuses every launch, for the reason ``why``."""

    why: str = ""

    def refuses(self, launch: RunContext) -> str | None:
        return f"{self.why}; mend the file, or take another sharding"
