"""What an engine answers whose ranks each have rows of every parameter, as DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strategies.engine import Engine
from strategies.holdings import Fragment, Maker

if TYPE_CHECKING:
    import torch

    from strategies.engine import Trained

__all__ = ["Rows", "whole"]


class Rows(Engine):
    """What ``fully_shard`` has cut, whoever asked it to."""

    def norm(self, trained: Trained) -> Any:
        return whole(super().norm(trained))

    def optimized(self, trained: Trained) -> list[torch.Tensor]:
        from strategies.engines.fsdp import facts

        return [facts.local(p) for p in super().optimized(trained)]

    def shards(self, trained: Trained) -> Iterator[tuple[int, torch.Tensor]]:
        from strategies.engines.fsdp import facts

        for index, parameter in super().shards(trained):
            yield index, facts.local(parameter)

    def state_of(self, trained: Trained, shard: torch.Tensor) -> Mapping[str, Any]:
        from strategies.engines.fsdp import facts

        return facts.state_of(trained, shard)

    def receivers(self, trained: Trained) -> Sequence[torch.Tensor]:
        """The gathered parameters, which there are from the first forward on."""
        from strategies.engines.fsdp import facts

        return facts.gathered(trained.module)

    def fragments(self, trained: Trained, *, copies: bool = False) -> Iterator[Fragment]:
        from strategies.engines.fsdp import facts

        return facts.fragments(trained, copies=copies)

    def part(self, parameter: Any) -> torch.Tensor:
        from strategies.engines.fsdp import facts

        return facts.local(parameter)

    def makers(self) -> tuple[Maker, ...]:
        from strategies.engines.fsdp import facts

        return tuple(facts.makers())


def whole(value: Any) -> Any:
    """A DTensor put together on every rank; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
