"""A student that begins with its teacher's weights: blocks chosen evenly, and all that is no block.

Imports torch: import it where torch is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies import initial
from strategies.base import demand
from strategies.distillation.files import weights
from strategies.distillation.matching import chosen, renamed
from strategies.engine import Trained
from strategies.evidence.updates import relative_error
from strategies.subject import Subject

__all__ = ["apart", "begin"]

CLOSE = 1e-2
"""How far a weight may be from the teacher's, which may be stored in bfloat16, as a share of it."""


def prefixes(module: nn.Module, subject: Subject) -> list[str]:
    """The names under which the blocks of ``module`` are numbered."""
    groups = {id(group) for group in subject.groups(module)}
    return [name for name, part in module.named_modules() if id(part) in groups]


def begin(module: nn.Module, subject: Subject, teacher: Subject, file: str) -> None:
    """Give the parameters that train the teacher's values, once they get any. The first weights
    that all rows of a suite draw are drawn as ever, and hashed as ever."""
    draw = weights(teacher, file)
    names = prefixes(module, subject)
    blocks = chosen(subject.dimensions.depth, teacher.dimensions.depth)
    for name, p in module.named_parameters():
        if not p.requires_grad:
            continue
        source = renamed(name, names, blocks)
        if initial.pending(p) is not None:
            initial.instead(p, lambda drawn, source=source: draw(source, drawn))
        else:
            with torch.no_grad():
                p.copy_(draw(source, p))


def apart(trained: Trained, teacher: nn.Module, depth: int) -> float:
    """How far the largest matrix of each of the student's blocks is from that of the teacher's
    block that was chosen for it, at most, as a share of it; every rank takes part.

    Raises:
        NotInForce: further than what storing rounds.
    """
    subject = trained.subject
    names, own = prefixes(trained.module, subject), dict(teacher.named_parameters())
    blocks = chosen(subject.dimensions.depth, depth)
    pairs = []
    for block in trained.blocks():
        pairs.append(_largest(trained, block, names, blocks, own))
    whole = trained.engine.whole(trained, [p for p, _ in pairs])
    found = [_far(p, wanted) for p, (_, wanted) in zip(whole, pairs, strict=True)]
    demand(max(found) <= CLOSE, f"a block begins {max(found):.2g} away from the teacher's")
    return max(found)


def _largest(
    trained: Trained, block: nn.Module, names: Sequence[str], blocks: Sequence[int], own: Any
) -> tuple[Any, Tensor]:
    mine = {id(p) for p in block.parameters()}
    pairs = [
        (p, own[renamed(name, names, blocks)])
        for name, p in trained.module.named_parameters()
        if id(p) in mine and own[renamed(name, names, blocks)].is_floating_point()
    ]
    return max(pairs, key=lambda pair: pair[1].numel())


def _far(p: Any, wanted: Tensor) -> float:
    if type(wanted) not in (Tensor, nn.Parameter):
        return 0.0  # a prediction's weights have no values
    return relative_error(p.detach().double(), wanted.double())
