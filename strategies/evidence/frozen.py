"""Proof that some weights trained and all others stayed as they were, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from strategies.base import BadInput, Watcher, demand
from strategies.engine import Trained

if TYPE_CHECKING:
    import torch

    from strategies.engine import Engine

__all__ = ["Frozen", "count", "split_facts", "train_only"]

PERIOD = 65521
PIECE = 8 * PERIOD
"""Bytes of a weight that are summed at a time: of whole periods, so that places repeat."""


def count(parameters: Iterable[Any], engine: Engine | None = None) -> int:
    """Elements of whole parameters, also where ``engine`` split them or two share a byte."""
    return sum(_shape(p, engine).numel() for p in parameters)


def _shape(parameter: Any, engine: Engine | None) -> torch.Size:
    """The shape of the weight that ``parameter`` stands for."""
    packed = getattr(parameter, "quant_state", None)
    if packed is not None:
        return packed.shape
    return engine.shape(parameter) if engine else parameter.shape


def train_only(module: Any, wanted: set[str]) -> None:
    """Freeze every parameter whose name is not in ``wanted``."""
    for name, p in module.named_parameters():
        p.requires_grad_(name in wanted)


def checksum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bytes, each weighted by where it stands: another bit, another sum.

    A hash would copy every weight to the host; this stays on the device, and goes through a weight
    in pieces, since its bytes as whole numbers take eight times as much.
    """
    import torch

    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    place = torch.arange(1, 1 + min(PIECE, flat.numel()), device=flat.device).remainder_(PERIOD)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in pieces(flat):
        total += piece.to(torch.int64).mul_(place[: piece.numel()]).sum()
    return int(total)


def pieces(flat: torch.Tensor) -> Iterable[torch.Tensor]:
    """A flat tensor of bytes as what is summed at a time."""
    return flat.split(PIECE)


class Frozen(Watcher):
    """Checksums of all parameters as prepare left them: of this rank's parts."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained
        self.sums = dict(self._now())

    def _now(self) -> Iterator[tuple[str, int]]:
        for name, p in self.trained.module.named_parameters():
            yield name, checksum(self.trained.engine.part(p))

    def changed(self) -> set[str]:
        """Names of parameters that are not as they were."""
        return {name for name, value in self._now() if value != self.sums[name]}

    def state_dict(self) -> dict[str, Any]:
        """The checksums of the training's beginning."""
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Compare with the training's beginning, also after a resume."""
        self.sums = state["sums"]

    def recut(self, states: Sequence[dict[str, Any]], pieces: Sequence[Sequence[Any]]) -> None:
        """Hold what is frozen to the rows that each of the former ranks had of it; of what trains,
        it counts from here on that it moves.

        Raises:
            BadInput: a frozen weight is not the one that those ranks had.
        """
        trained = self.trained
        sharers = len(states) // trained.engine.layout(len(states)).replicate
        named = dict(trained.module.named_parameters())
        wholes = trained.engine.whole(trained, list(named.values()))
        for (name, p), whole in zip(named.items(), wholes, strict=True):
            if p.requires_grad:
                continue
            rows = -(-whole.shape[0] // sharers)
            parts = [whole[rank * rows : (rank + 1) * rows] for rank in range(sharers)]
            had = [state["sums"][name] for state in states[:sharers]]
            if [checksum(part) for part in parts] != had:
                raise BadInput(f"{name} is frozen, and not what it was when this was saved")
        self.sums = dict(self._now())


def split_facts(trained: Trained, name: str) -> dict[str, Any]:
    """What was trained and what was not: counted, and compared with the beginning bit by bit."""
    kept = trained.attached.get(name)
    demand(isinstance(kept, Frozen), "no checksums were taken before training")
    parameters = dict(trained.module.named_parameters())
    free = {n for n, p in parameters.items() if p.requires_grad}
    changed = kept.changed()
    stray = sorted(changed - free)
    demand(not stray, f"{len(stray)} frozen weights changed, {stray[0] if stray else ''} first")
    demand(bool(changed), "no weight has moved")
    trainable = count((parameters[n] for n in free), trained.engine)
    total = count(parameters.values(), trained.engine)
    return {"trainable": trainable, "frozen": total - trainable, "changed_tensors": len(changed)}
