"""Model facts from one forward pass on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from strategies.base import Sizes
from strategies.evidence import flops

if TYPE_CHECKING:
    from torch import nn


class Attended(NamedTuple):
    """Call of attention for one sample: queries, keys and the width of each head."""

    heads: int
    queries: int
    keys: int
    width: int


class Survey(NamedTuple):
    """Model facts from one forward pass without memory.

    ``parameters``: elements, including frozen ones. ``sizes``: element counts for an engine's
    buffers, with every weight trained. ``flops``: of one sample's forward, a multiply-add as two.
    ``linears``: names of the blocks' linear layers that have more rows than samples and get a
    gradient; if none has (samples are vectors), of all that get one. ``products``: the number of
    linear layers of the blocks.

    ``idle``: names of parameters that never get a gradient, such as the last block's unused text
    stream; they are frozen before anything else. ``lent``: names of the blocks' modules with
    parameters that code outside of their block calls, so that they can be neither streamed nor
    resharded after it. ``inner``: features of a block's MLP, 0 if unknown.
    """

    parameters: int
    sizes: Sizes
    flops: int
    depth: int
    linears: tuple[str, ...]
    products: int = 0
    attention: tuple[Attended, ...] = ()
    idle: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()
    inner: int = 0

    @property
    def widest(self) -> Attended:
        """The widest attention; zeros if there is none."""
        widest = max(self.attention, key=lambda a: a.heads * a.width, default=None)
        return widest or Attended(0, 0, 0, 0)

    @property
    def width(self) -> int:
        """Features of a token in the widest attention."""
        return self.widest.heads * self.widest.width

    @property
    def tokens(self) -> int:
        """Tokens of a sample in the widest attention."""
        return self.widest.queries


def sizes_of(module: nn.Module, blocks: Sequence[nn.Module]) -> Sizes:
    """Return the element counts of a model, in which what has a gradient counts as trained."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return Sizes(
        total=sum(p.numel() for p in trained),
        block=max(sum(p.numel() for p in block.parameters()) for block in blocks),
        tensor=max(p.numel() for p in trained),
        bias=max((p.numel() for p in module.parameters() if p.ndim == 1), default=0),
        weights=tuple(p.numel() for p in trained if p.ndim > 1),
    )


def of(
    subject: Any, module: nn.Module, run: Callable[[], Any], unread: tuple[str, ...] = ()
) -> Survey:
    """Return the survey of ``module``, made by ``subject`` (``strategies.subject.Subject``) on
    meta, while ``run`` takes one sample through it.

    Parameters that get no gradient are frozen, and those whose names begin like one of ``unread``,
    whose gradient is always zero. Products are counted by the formulas of ``evidence.flops``;
    elementwise work is not.
    """
    import torch
    from torch import nn

    zero = [name for name, _ in module.named_parameters() if name.startswith(unread)]
    still = tuple(dict.fromkeys((*idle(module, run), *zero)))
    for name in still:
        module.get_parameter(name).requires_grad_(False)
    blocks = subject.blocks(module)
    layers = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    rows: dict[nn.Module, int] = {}
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda layer, given: rows.update({layer: given[0].numel() // layer.in_features})
        )
    calls: list[Attended] = []
    lent = _note_lent(blocks)
    with torch.no_grad(), _noting(calls), flops.counting() as counter:
        run()
    names = {layer: name for name, layer in module.named_modules()}
    on_tokens = [layer for layer in layers if rows.get(layer, 0) > 1]
    linears = [names[layer] for layer in on_tokens or layers if layer in rows]
    return Survey(
        parameters=sum(p.numel() for p in module.parameters()),
        sizes=subject.sizes_of(module),
        flops=counter.get_total_flops(),
        depth=len(blocks),
        linears=tuple(name for name in linears if f"{name}.weight" not in still),
        products=len(layers),
        attention=tuple(calls),
        idle=still,
        lent=tuple(name for layer, name in names.items() if layer in lent()),
    )


def idle(module: nn.Module, run: Callable[[], Any]) -> tuple[str, ...]:
    """Return the names of the parameters that no gradient reaches from what ``run`` returns.

    The function walks the graph and runs no backward, for which a build of torch for CUDA starts
    threads: forks of a process with such threads cannot run it (torch's "Autograd and Fork").
    """
    import torch
    from torch.utils._pytree import tree_leaves

    outputs = (out for out in tree_leaves(run()) if torch.is_tensor(out))
    waiting = [out.grad_fn for out in outputs if out.is_floating_point()]
    seen: set[Any] = {None}
    reached: set[int] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad, of a leaf
            reached.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return tuple(name for name, p in named if id(p) not in reached)


def _note_lent(blocks: Sequence[nn.Module]) -> Callable[[], set[nn.Module]]:
    """Watch calls of the blocks' modules; return a function that returns those that code outside of
    their block called, as the output of diffusers' DiT calls the embedding of its first block.

    Modules without parameters are left out, and those of a block that is never called itself.
    """
    within: list[nn.Module] = []
    entered: set[nn.Module] = set()
    outside: dict[nn.Module, nn.Module] = {}

    def enter(block: nn.Module, *_: Any) -> None:
        entered.add(block)
        within.append(block)

    def note(block: nn.Module, part: nn.Module, *_: Any) -> None:
        if block not in within:
            outside[part] = block

    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(lambda block, *_: within.remove(block))
        for part in block.modules():
            if part is not block and next(part.parameters(), None) is not None:
                part.register_forward_pre_hook(partial(note, block))
    return lambda: {part for part, block in outside.items() if block in entered}


def _noting(calls: list[Attended]) -> Any:
    """Return a mode that records the calls of torch's attention."""
    from torch.nn.functional import scaled_dot_product_attention
    from torch.overrides import TorchFunctionMode

    def note(query: Any, key: Any, *_: Any, **more: Any) -> None:
        heads, queries, width = query.shape[-3:]
        calls.append(Attended(heads, queries, key.shape[-2], width))

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if func is scaled_dot_product_attention:
                note(*args, **(kw or {}))
            return func(*args, **(kw or {}))

    return Noting()
