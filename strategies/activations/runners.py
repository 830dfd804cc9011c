"""Nested wrappers of the function that runs a model's blocks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.subject import Subject


Runner = Callable[..., Any]
"""``runner(blocks, *given, **named)``: run the blocks in order, from the first block's inputs to
the last block's output."""


def surround(module: Any, subject: Subject, wrap: Callable[[Runner], Runner]) -> None:
    """Wrap the runner of the blocks of ``module`` by ``wrap``.

    A model with the part "chain" runs all blocks by one call of ``module.run_blocks``. In any other
    model each block is a call of its own.
    """
    if not hasattr(module, "run_blocks"):
        run_singly(module, subject.blocks(module), "run_blocks")
    module.run_blocks = wrap(module.run_blocks)


def run_singly(module: Any, blocks: list[Any], runner: str) -> None:
    """Give each block a subclass of its class whose call goes through the attribute ``runner``.

    It replaces the call, not ``forward``: an engine's hooks run in between, and gather a block's
    weights again in recomputation.
    """
    owner: Callable[[], Any] = weakref.ref(module)
    kinds: dict[type, type] = {}

    def call(block: Any, *given: Any, **named: Any) -> Any:
        return getattr(owner(), runner)([block], *given, **named)

    for block in blocks:
        kind = type(block)
        if kind not in kinds:
            members = {"__call__": call, "__module__": kind.__module__, "plain_kind": kind}
            kinds[kind] = type(kind.__name__, (kind,), members)
        block.__class__ = kinds[kind]
    setattr(module, runner, _run_one)


def _run_one(blocks: list[Any], *given: Any, **named: Any) -> Any:
    (block,) = blocks
    return block.plain_kind.__call__(block, *given, **named)


def runner_of(module: Any, kind: type) -> Any:
    """Return the runner of class ``kind`` in the module's chain, or None."""
    runner = getattr(module, "run_blocks", None)
    while runner is not None and not isinstance(runner, kind):
        runner = getattr(runner, "inner", None)
    return runner
