"""What was trained, saved by itself: adapters, biases, a branch, a head; not the frozen model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strategies.engine import Trained
from strategies.subject import Subject

__all__ = ["load", "save"]


def save(trained: Trained, path: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Write every parameter that takes a gradient to one file, but those whose names begin as
    ``leave_out`` says; all ranks call it."""
    state = {}
    everywhere = trained.engine.everywhere(trained)
    free = {n: p for n, p in everywhere.items() if p.requires_grad}
    named = {n: p for n, p in free.items() if not n.startswith(leave_out)}
    whole = trained.engine.whole(trained, list(named.values()))
    for name, p in zip(named, whole, strict=True):
        if trained.accelerator.is_main_process:
            state[name] = p.detach().cpu().contiguous().clone()
    if trained.accelerator.is_main_process:
        trained.subject.save(state, path)
    trained.accelerator.wait_for_everyone()


def load(module: Any, subject: Subject, path: Path) -> list[str]:
    """Read what ``save`` wrote into a bare model that the same recipe has edited; the names.

    Raises:
        ValueError: the model lacks one of the parameters, or trains one that the file lacks.
    """
    import torch

    state = subject.load(path)
    mine = {n: p for n, p in module.named_parameters() if p.requires_grad}
    odd = sorted(mine.keys() ^ state.keys())
    if odd:
        raise ValueError(f"{path} is of another recipe or model: {odd[0]} is on one side only")
    with torch.no_grad():
        for name, saved in state.items():
            mine[name].copy_(saved)
    return sorted(state)
