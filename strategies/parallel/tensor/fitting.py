"""Reasons why the blocks of a model cannot be cut, found without memory. Imports torch."""

from __future__ import annotations

import functools
import logging
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from strategies import initial
from strategies.parallel.groups import INNER
from strategies.parallel.tensor.products import head_norms, mixing, products, scale_sizes
from strategies.subject import Subject

OTHERWISE = "leave tp out, or take fsdp2"


@functools.lru_cache(maxsize=4)
def _plain(subject: Subject) -> nn.Module:
    """Return the model on meta."""
    with initial.valueless():
        return subject.make()


@functools.lru_cache(maxsize=64)
def unknown(subject: Subject) -> str:
    """Return the first layer of a block that ``products`` does not find, with the reason."""
    if subject.random_blocks:
        return f"its blocks have dropout, and ranks would draw other numbers; {OTHERWISE}"
    module = _plain(subject)
    names = {part: name for name, part in module.named_modules()}
    for block in subject.blocks(module):
        found = products(block)
        for name, part in block.named_modules():
            whole = f"{names[block]}.{name}"
            if isinstance(part, nn.Linear | nn.Embedding):
                multiplies = whole in subject.linears  # modulation has one vector a sample
            else:
                multiplies = any(p.ndim > 1 for p in part.parameters(recurse=False))
            if name and name not in found and multiplies:
                return f"{whole} ({type(part).__name__}) is no layer that it cuts; {OTHERWISE}"
        for name in mixing(block):
            return f"{names[block]}.{name} normalizes over several heads; {OTHERWISE}"
    return ""


@functools.lru_cache(maxsize=64)
def counts(subject: Subject) -> tuple[tuple[int, str], ...]:
    """Return the numbers that ranks must divide, with their words."""
    module = _plain(subject)
    cuts = [cut for block in subject.blocks(module) for cut in products(block).values()]
    heads = {(piece // cut.head, "heads") for cut in cuts if cut.head > 1 for piece in cut.pieces}
    inner = {(n, INNER) for cut in cuts if cut.head == 1 for n in cut.pieces}
    return (*sorted(heads), *sorted(inner))


class Alias(torch.autograd.Function):
    """A view, as a DTensor's local tensor is: autograd refuses to change it in place."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


@functools.lru_cache(maxsize=64)
def fails(subject: Subject, ranks: int) -> str:
    """Return the module that cannot compute with a rank's part: it has positions for each head, or
    changes what a parallel layer returns in place."""
    shallow = subject.deep(dict.fromkeys(subject.depths, 1)) if subject.depths else subject
    within = [""]
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the error looked for
    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch.object(log, "disabled", True):
        module, sample = shallow.make(), shallow.example("cpu")
        for block in shallow.blocks(module):
            for name, cut in products(block).items():
                layer = block.get_submodule(name)
                sizes = [layer.in_features, layer.out_features]
                sizes[1 - cut.axis] //= ranks
                block.set_submodule(name, nn.Linear(*sizes, bias=layer.bias is not None))
            for name in (*products(block), *head_norms(block)):
                layer = block.get_submodule(name)
                layer.register_forward_hook(lambda _, given, out: Alias.apply(out))
            scale_sizes(block, lambda size: size // ranks)
        for name, part in module.named_modules():
            text = f"{name} ({type(part).__name__})"
            part.register_forward_pre_hook(lambda _, given, text=text: within.append(text))
            part.register_forward_hook(lambda *_: within.pop() and None)
        try:
            shallow.predict(module, *sample)
        except Exception:
            return f"{within[-1]} does not compute with a part of its heads; {OTHERWISE}"
    return ""
