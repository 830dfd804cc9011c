"""Wrappers around the function that runs a model's blocks: one around another, by strategies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.subject import Subject


Runner = Callable[..., Any]
"""``runner(blocks, *given, **named)``: the blocks, one after the other, from what the first is
given to what the last returns."""


def surround(module: Any, subject: Subject, wrap: Callable[[Runner], Runner]) -> None:
    """Have the blocks of ``module`` run by ``wrap`` of the way in which they are run so far.

    A model with the part "chain" runs all of them by one call of ``module.run_blocks``; of any
    other model each block comes by itself.
    """
    if not hasattr(module, "run_blocks"):
        _run_singly(module, subject.blocks(module))
    module.run_blocks = wrap(module.run_blocks)


def _run_singly(module: Any, blocks: list[Any]) -> None:
    """Give each block a class of its kind whose call goes through ``module.run_blocks``.

    The call, and not ``forward``: an engine's hooks are in between, and gather a block's own
    weights anew where it is recomputed.
    """
    owner = weakref.ref(module)
    kinds: dict[type, type] = {}

    def call(block: Any, *given: Any, **named: Any) -> Any:
        return owner().run_blocks([block], *given, **named)

    for block in blocks:
        kind = type(block)
        if kind not in kinds:
            members = {"__call__": call, "__module__": kind.__module__, "plain_kind": kind}
            kinds[kind] = type(kind.__name__, (kind,), members)
        block.__class__ = kinds[kind]
    module.run_blocks = _run_one


def _run_one(blocks: list[Any], *given: Any, **named: Any) -> Any:
    (block,) = blocks
    return block.plain_kind.__call__(block, *given, **named)


def runner_of(module: Any, kind: type) -> Any | None:
    """The runner of that kind in the module's chain of them, or None."""
    runner = getattr(module, "run_blocks", None)
    while runner is not None and not isinstance(runner, kind):
        runner = getattr(runner, "inner", None)
    return runner


def by_place(function: Runner, first: int, names: tuple[str, ...]) -> Runner:
    """``function``, which is to be given by place, behind its ``first`` arguments, what it takes by
    these ``names``."""
    if not names:
        return function

    def placed(*values: Any) -> Any:
        return function(*values[:first], **dict(zip(names, values[first:], strict=True)))

    return placed


def by_leaf(function: Runner, given: Any, named: Any) -> tuple[Runner, list[Any]]:
    """``function`` of blocks, a level and a flat list of what it is given otherwise, and that list:
    also what lies within tuples goes in by place."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten((given, named))

    def placed(blocks: Any, level: int, *leaves: Any) -> Any:
        given, named = tree_unflatten(leaves, spec)
        return function(blocks, level, *given, **named)

    return placed, leaves
