"""Process groups of ranks that share weights or samples.

No torch at import: engines import this module in the launching process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.engine import RunContext

INNER = "inner features of the MLP"
"""Name of a size that ranks divide."""


def group_of(count: int, stride: int, ranks: int) -> Any:
    """Return the group of this rank among ``ranks``: ``count`` ranks that are ``stride`` apart. All
    ranks call it."""
    import torch.distributed as dist

    span = count * stride
    firsts = (low + index for low in range(0, ranks, span) for index in range(stride))
    return dist.new_subgroups_by_enumeration([[*range(f, f + span, stride)] for f in firsts])[0]


def from_two(ranks: Any) -> bool:
    """Return whether a parameter is a number of ranks that share something."""
    return isinstance(ranks, int) and ranks >= 2


def undealt(part: Any, what: str, divided: int) -> str:
    """Return why ``part`` (sp or tp) cannot deal ``what`` to its ranks, whose number must divide
    ``divided``, with the remedy."""
    fitting = [str(n) for n in range(2, divided + 1) if divided % n == 0]
    way = f"take ranks of {' or '.join(fitting)}" if fitting else f"leave {part.name} out"
    return f"{what} cannot be dealt to {part.ranks} ranks; {way}"


def uneven(launch: RunContext) -> str | None:
    """Return why the ranks do not divide into the groups of ``sp`` and ``tp``; None if they do."""
    layout, count = launch.layout, launch.processes
    if (layout.sequence, layout.tensor) == (launch.sequence, launch.tensor):
        return None
    size, degrees = launch.sequence * launch.tensor, launch.engine.layout(count)
    text = f"groups of {size}"
    if min(launch.sequence, launch.tensor) > 1:
        text += f" (sp:ranks={launch.sequence} times tp:ranks={launch.tensor})"
    if min(degrees.shard, degrees.replicate) > 1:  # groups do not cross copies of the model
        size, text = size * degrees.replicate, f"{degrees.replicate} copies of {text}"
    near = max(size, count // size * size)
    return f"{count} processes are not {text}; use --processes {near}, or another ranks"
