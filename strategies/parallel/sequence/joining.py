"""A prediction of which each rank makes a part, whole on all of them: what samples are drawn by.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.base import demand
from strategies.engine import Trained

__all__ = ["COLLECTIVE", "Places", "joined", "joins"]

COLLECTIVE = "_allgather_base_"
"""torch's name of what joins the parts."""


Places = dict[tuple[int, ...], list[Tensor]]
"""Shape of a prediction of one sample -> of each part where its elements are in it, flat."""


def joined(trained: Trained, part: Tensor, samples: Tensor, known: Places) -> Tensor:
    """The prediction of whole ``samples`` [B, C, ...], of which ``part`` [B, ...] is this rank's
    (``Subject.cut``); all ranks call it, and get the same. It may have other channels, as that of
    a learned variance. ``known`` keeps the places for the next call."""
    parts = trained.launch.layout.sequence
    got = part.new_empty((parts * len(part), *part.shape[1:]))
    dist.all_gather_into_tensor(got, part.contiguous())
    whole = part.new_empty((len(part), part.shape[1], *samples.shape[2:]))
    shape = tuple(whole.shape[1:])
    if shape not in known:
        # Numbered, and the numbers cut: however a subject cuts, each element goes where it was.
        numbers = torch.arange(whole[0].numel(), device=part.device).view(1, *shape)
        known[shape] = [trained.subject.cut(numbers, i, parts).flatten() for i in range(parts)]
    for places, each in zip(known[shape], got.chunk(parts), strict=True):
        whole.flatten(1).index_copy_(1, places, each.flatten(1))
    return whole


def joins(trained: Trained) -> dict[str, int]:
    """That each call of the watched batch was joined once, and the bytes that this rank gave.

    Raises:
        NotInForce: more, or fewer.
    """
    seen, calls = trained.observed, trained.observed.micro_steps
    sent = [s for s in seen.sent if s.collective == COLLECTIVE]
    demand(len(sent) == calls, f"{len(sent)} predictions were joined, of {calls}")
    return {"joined_predictions": calls, "joined_bytes": sum(s.bytes for s in sent)}
