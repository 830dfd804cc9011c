"""Whole parameters of a pipeline, and its checkpoints by torch.distributed.checkpoint.

A checkpoint has the whole model's parameters and their optimizer state by name; each stage writes
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

if TYPE_CHECKING:
    from strategies.engine import TrainingRun

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state by parameter name: its number in a stage's optimizer is no other stage's."""


def whole(trained: TrainingRun, parameters: Sequence[Any]) -> Iterator[Tensor]:
    """Yield each of ``parameters`` (values of ``Engine.global_parameters``, alike on all ranks)
    from its stage, on every rank; it is valid until the next one."""
    cut, ranks, device = trained.model.cut, trained.model.ranks, trained.accelerator.device
    names = {id(p): name for name, p in trained.engine.global_parameters(trained).items()}
    for p in parameters:
        stage = cut.owners[names[id(p)]]
        mine = stage == cut.index
        found = p.detach() if mine else torch.empty(p.shape, dtype=p.dtype, device=device)
        dist.broadcast(found, src=ranks.rank(stage), group=ranks.pipe)
        yield found


def save(trained: TrainingRun, path: Path) -> None:
    """Write this stage's parameters and their optimizer state; all ranks call it."""
    model, optimizer = get_state_dict(trained.module, trained.inner_optimizer, options=BY_NAME)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load(trained: TrainingRun, path: Path) -> None:
    """Read what ``save`` wrote; all ranks call it."""
    module, optimizer = trained.module, trained.inner_optimizer
    model, state = get_state_dict(module, optimizer, options=BY_NAME)
    found = {"model": model, "optimizer": state}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(
        module,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=BY_NAME,
    )
