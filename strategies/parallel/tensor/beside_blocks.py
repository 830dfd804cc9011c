"""A block whose weights are cut beside the same block with whole weights: what holds the order of
heads, and every sum.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from strategies.base import demand
from strategies.engine import Trained
from strategies.evidence import forward
from strategies.evidence.updates import relative_error
from strategies.parallel.beside_whole import close_to, random_sample
from strategies.parallel.tensor import between, tokens

__all__ = ["LAYERS", "as_whole_blocks"]

LAYERS = {"attn.qkv": 0, "attn.proj": 1, "mlp.fc1": 0, "mlp.fc2": 1}
"""Cut layers of a block -> the axis of their weights."""


def as_whole_blocks(trained: Trained) -> dict[str, Any]:
    """How far the output of a block is from that of the same block with whole weights, at most; one
    of them is whole at a time."""
    given: list[Any] = []
    blocks = trained.blocks()
    handles = [b.register_forward_hook(_keep(given), with_kwargs=True) for b in blocks]
    try:
        with torch.no_grad(), forward.eager(trained):
            trained.subject.predict(trained.model, *random_sample(trained))
    finally:
        for handle in handles:
            handle.remove()
    away = 0.0
    for block, args, named, out in map(_of_all_tokens, given):
        with torch.no_grad(), trained.accelerator.autocast(), _whole(block, trained):
            wanted = block(*args, **named)
        _let_go(block)
        away = max(away, relative_error(out.double(), wanted.double()))
    close = close_to(trained, given[-1][-1].dtype)
    demand(away <= close, f"a block's output is {away:.2g} of the norm away from a whole one's")
    return {"away_from_whole_blocks": float(f"{away:.2g}")}


def _of_all_tokens(call: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """What a block was given and returned, where that was of this rank's tokens."""
    block, (x, *args), named, out = call
    if between.has_own(block):
        group = block.attn.qkv.group
        x, out = tokens.all_tokens(x, group), tokens.all_tokens(out, group)
    return block, (x, *args), named, out


def _let_go(block: Any) -> None:
    """Of what was gathered for a block alone, which only a forward of the whole model would end."""
    if isinstance(block, FSDPModule):
        block.reshard()


def _keep(given: list[Any]) -> Any:
    return lambda block, args, named, out: given.append((block, args, named, out))


@contextlib.contextmanager
def _whole(block: Any, trained: Trained) -> Iterator[None]:
    """The block as one of a model that nobody shares."""
    cut = {name: block.get_submodule(name) for name in LAYERS}
    heads = block.attn.num_heads
    for name, layer in cut.items():
        block.set_submodule(name, _plain(layer, trained))
    block.attn.num_heads = heads * cut["attn.qkv"].weight.share.parts
    try:
        yield
    finally:
        block.attn.num_heads = heads
        for name, layer in cut.items():
            block.set_submodule(name, layer)


def _plain(layer: Any, trained: Trained) -> nn.Linear:
    """An ordinary layer with the weights of all ranks."""
    mine = [p for p in (layer.weight, layer.bias) if p is not None]
    weight, *bias = (p.detach() for p in trained.engine.whole(trained, mine))
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = nn.Parameter(bias[0], requires_grad=False) if bias else None
    return plain
