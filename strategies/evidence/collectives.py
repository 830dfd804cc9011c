"""What a call of one of torch's collectives hands over, and among whom."""

from __future__ import annotations

from typing import Any

from strategies.evidence.observed import Sent
from strategies.evidence.stored import stored, within

__all__ = ["dtype_of", "group_of", "handed"]

INPUT = dict.fromkeys(
    (
        "allgather_",
        "_allgather_base_",
        "alltoall_base_",
        "_reduce_scatter_base_",
        "reduce_scatter_",
    ),
    1,
)
"""Collectives whose first argument is the output -> where the input is."""


def handed(name: str, args: Any, phase: str) -> list[Sent]:
    """What a rank gives to the collective ``name`` (torch.ops.c10d's) with ``args``."""
    given = within([args[INPUT.get(name, 0)]]) if args else []
    plain = [t for tensor in given for t in stored(tensor)]
    group = getattr(group_of(args), "group_name", "")
    return [Sent(name, dtype_of(t), t.numel() * t.element_size(), phase, group) for t in plain]


def group_of(args: Any) -> Any | None:
    """The process group among the arguments of one of torch's collectives."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return c10d.ProcessGroup.unbox(value)
    return None


def dtype_of(value: Any) -> str:
    """The type of a tensor, or of the first of several; empty of what has none."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return str(getattr(first, "dtype", "")).removeprefix("torch.")
