"""Twin-Flow: some pieces of the optimizer lie in host memory and are stepped there by DeepSpeed's
CPU Adam, the others on the device, by torch's AdamW (DeepSpeed's ``backup_optimizer``).

DeepSpeed 0.19.8 deals whole pieces (``sub_group_size``), the first ones to the device; it tells the
two by the names of devices, and its checkpoints leave the second optimizer's state out.

Source: ZeRO-Offload++, deepspeed.ai (blogs/deepspeed-offloadpp); attributes are DeepSpeed's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strategies.base import demand
from strategies.engine import Trained
from strategies.engines.zero import chosen

if TYPE_CHECKING:
    import torch

__all__ = [
    *("REMARK", "evidence", "hosted", "load", "name_device", "save", "state_of", "states"),
    "watched",
]

REMARK = (
    "host and device are one memory here: what would be the device's share is stepped by torch's "
    "AdamW on the CPU"
)
STATE = "device_share_{}.pt"
SAMPLE = 4096


def name_device(here: bool) -> None:
    """On a CPU DeepSpeed would take the device's pieces for the host's, whose name is the same:
    while ``here``, they are on a CPU that has a number."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator()._name = "cpu:0" if here else "cpu"


def hosted(trained: Trained) -> list[torch.Tensor]:
    """The pieces whose float32 weights are in host memory: of an optimizer that is offloaded, all
    but those that DeepSpeed dealt to the device."""
    optimizer = trained.model.optimizer
    dealt = getattr(optimizer, "subgroup_to_device", {})
    pieces = enumerate(trained.optimized())
    return [piece for index, piece in pieces if dealt.get(index, "cpu") == "cpu"]


def states(trained: Trained) -> Mapping[Any, Any]:
    """What the device's optimizer keeps, by piece."""
    other = getattr(trained.model.optimizer, "backup_optimizer", None)
    return other.state if other is not None else {}


def state_of(trained: Trained, piece: torch.Tensor) -> Mapping[str, Any]:
    """What either optimizer keeps of ``piece``."""
    return trained.inner_optimizer.state.get(piece) or states(trained).get(piece, {})


@contextlib.contextmanager
def watched(trained: Trained, stepped: list[tuple[int, bool]]) -> Iterator[None]:
    """While it lasts, ``stepped`` gets the elements of each piece that the device's optimizer
    stepped, and whether they moved."""
    other = getattr(trained.model.optimizer, "backup_optimizer", None)
    if other is None:
        yield
        return
    before: list[Any] = []

    def begin(optimizer: Any, *_: Any) -> None:
        before[:] = [(p, p.detach()[:SAMPLE].clone()) for p in _stepped(optimizer)]

    def end(*_: Any) -> None:
        stepped.extend((p.numel(), not was.equal(p.detach()[:SAMPLE])) for p, was in before)

    handles = [other.register_step_pre_hook(begin), other.register_step_post_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stepped(optimizer: Any) -> list[Any]:
    return [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


def evidence(trained: Trained, stepped: list[tuple[int, bool]]) -> dict[str, Any]:
    """How much of the optimizer lies on the host, and that torch's AdamW stepped all the rest.

    Raises:
        NotInForce: another share, or a piece that was not stepped.
    """
    wanted, pieces = chosen.ratio(trained.engine.zero), trained.optimized()
    elements = sum(piece.numel() for piece in pieces)
    host = sum(piece.numel() for piece in hosted(trained))
    done = sum(numel for numel, _ in stepped)
    if wanted == 1:
        demand(done == 0, f"AdamW stepped {done} elements on the device, all were to be offloaded")
        return {}
    demand(done == elements - host, f"AdamW stepped {done} elements of the {elements - host}")
    demand(all(moved for _, moved in stepped), "AdamW stepped pieces of the device that stayed")
    # Whole pieces are dealt, and the number of them is rounded down.
    off = 2 * max(piece.numel() for piece in pieces) / elements
    told = f"{host} of {elements} elements of the optimizer are on the host, {wanted:g} were asked"
    demand(0 < host < elements and abs(host / elements - wanted) <= off, told)
    return {"host_share": round(host / elements, 4), "stepped_on_device": done}


def save(trained: Trained, path: Path) -> None:
    """Beside DeepSpeed's checkpoint, this rank's state of the device's optimizer."""
    import torch

    kept = [dict(states(trained).get(piece, {})) for piece in trained.optimized()]
    torch.save(kept, path / STATE.format(trained.accelerator.process_index))


def load(trained: Trained, path: Path) -> None:
    """Read what ``save`` wrote."""
    import torch

    other = trained.model.optimizer.backup_optimizer
    kept = torch.load(path / STATE.format(trained.accelerator.process_index), weights_only=True)
    for piece, state in zip(trained.optimized(), kept, strict=True):
        if state:
            moved = {n: v if n == "step" else v.to(piece.device) for n, v in state.items()}
            other.state[piece] = moved
