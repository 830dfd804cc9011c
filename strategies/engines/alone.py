"""One process, no sharding: the plain loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import demand
from strategies.engine import Engine, Imitation

if TYPE_CHECKING:
    from strategies.engine import Launch, Trained

__all__ = ["Alone"]


class SingleProcess(Imitation):
    """No process group is wanted."""

    ranks: ClassVar[bool] = False


class Alone(Engine):
    """Trains the model as it is."""

    kinds: ClassVar[tuple[str, ...]] = ("NO",)

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"one_process"})

    def refuses(self, launch: Launch) -> str | None:
        if launch.simulated:
            return "trains alone, so there is no world to simulate; leave --world out, or take ddp"
        if launch.processes > 1:
            return f"trains one process, not {launch.processes}; use --processes 1, or ddp"
        return None

    def evidence(self, trained: Trained) -> dict[str, Any]:
        demand(trained.model is trained.module, f"the model is a {type(trained.model).__name__}")
        return {"wrapper": "none"}

    def imitation(self) -> Imitation:
        return SingleProcess()
