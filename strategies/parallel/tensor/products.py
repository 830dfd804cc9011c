"""The rule by which a block's linear layers are cut: found by the names of modules and by shapes.

A half of a block is one or more first layers, whose outputs are cut, and a last layer, whose inputs
are cut alike. Nothing between them may mix heads or inner features. The names are those of this
project's DiT and of diffusers. diffusers 0.42 has plans of its own (``_tp_plan``) for Flux, Flux 2
and Qwen-Image; a test holds this rule to them, so they are not read. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

QUERIES = ("to_q", "to_k", "to_v")
BESIDE_QUERIES = ("add_q_proj", "add_k_proj", "add_v_proj", "to_gate")
OUTPUTS = ("to_out.0", "to_out", "to_add_out")
PACKED = {"qkv": "proj", "to_qkv_mlp_proj": "to_out"}
"""First layer of an attention that holds queries, keys and values -> its last layer."""
MLPS = (
    (("fc1",), "fc2"),
    (("net.0.proj",), "net.2"),
    (("linear_in",), "linear_out"),
    (("w1", "w3"), "w2"),
    (("linear_1", "linear_3"), "linear_2"),
    (("linear_1", "linear_2"), "out_projection"),
    (("gate", "up"), "down"),
)
"""(first layers, last layer) of an MLP. A first layer twice as wide holds a gate in front."""
JOINED = ("proj_mlp", "proj_out")
"""An MLP's first layer, and the layer that takes [attention, MLP], both of the block itself."""
HEADS = ("heads", "num_heads")
"""Attributes of an attention that count its heads."""
SIZES = (*HEADS, "num_kv_heads", "inner_dim", "inner_kv_dim", "mlp_hidden_dim")
"""Attributes of an attention that a rank has a part of."""


class Cut(NamedTuple):
    """Cut of a layer's weight: ``axis`` 0 of a first layer, 1 of a last one.

    ``pieces``: lengths along the axis, each of which is cut. ``head``: features of a head, which
    stay together; 1 in an MLP.
    """

    axis: int
    pieces: tuple[int, ...]
    head: int = 1


def products(block: nn.Module) -> dict[str, Cut]:
    """Return name within the block -> cut, of all layers that the rule finds."""
    found: dict[str, Cut] = {}
    for name, part in block.named_modules():
        mine = _attention(part) | _mlp(part) | _joined(part)
        found |= {f"{name}.{layer}".lstrip("."): cut for layer, cut in mine.items()}
    return found


def scale_sizes(block: nn.Module, scaled: Callable[[int], int]) -> None:
    """Replace the numbers of heads and features of the block's attentions by ``scaled`` of them."""
    for part in block.modules():
        if _first_layers(part):
            for name in SIZES:
                if isinstance(getattr(part, name, None), int):
                    setattr(part, name, scaled(getattr(part, name)))


def _linears(part: nn.Module, *names: str) -> dict[str, nn.Linear]:
    """Return those of ``names`` that are linear layers in ``part``."""
    found = {}
    for name in names:
        layer: Any = part
        for word in name.split("."):
            layer = getattr(layer, word, None)
        if isinstance(layer, nn.Linear):
            found[name] = layer
    return found


def _first_layers(part: nn.Module) -> dict[str, nn.Linear]:
    """Return the first layers of an attention; empty if ``part`` is none."""
    apart = _linears(part, *QUERIES, *BESIDE_QUERIES)
    return apart if apart.keys() >= set(QUERIES) else _linears(part, *PACKED)


def _attention(part: nn.Module) -> dict[str, Cut]:
    first = _first_layers(part)
    if not first:
        return {}
    heads = next((getattr(part, name) for name in HEADS if hasattr(part, name)), 1)
    packed = next(iter(first))
    if packed not in PACKED:
        head = first["to_q"].out_features // heads
        found = {name: Cut(0, (layer.out_features,), head) for name, layer in first.items()}
        last = _linears(part, *OUTPUTS)
        return found | {name: Cut(1, (layer.in_features,), head) for name, layer in last.items()}
    layer, out = first[packed], _linears(part, PACKED[packed])
    # diffusers states the pieces of a layer that holds an MLP as well.
    third = layer.out_features // 3
    pieces = tuple(getattr(layer, "_tp_packed_col_blocks", (third,) * 3))
    found = {packed: Cut(0, pieces, pieces[0] // heads)}
    for name, row in out.items():
        pieces = tuple(getattr(row, "_tp_packed_row_blocks", (row.in_features,)))
        found[name] = Cut(1, pieces)
    return found


def _mlp(part: nn.Module) -> dict[str, Cut]:
    for names, last in MLPS:
        first, row = _linears(part, *names), _linears(part, last)
        if len(first) < len(names) or not row:
            continue
        width = row[last].in_features
        copies = 2 if len(names) == 1 and next(iter(first.values())).out_features > width else 1
        if all(layer.out_features == copies * width for layer in first.values()):
            found = {name: Cut(0, (width,) * copies) for name in names}
            return found | {last: Cut(1, (width,))}
    return {}


def _joined(block: nn.Module) -> dict[str, Cut]:
    found = _linears(block, *JOINED, "attn.to_q")
    if len(found) < 3:
        return {}
    mlp, out, inner = found.values()
    pieces = (inner.out_features, mlp.out_features)
    fits = sum(pieces) == out.in_features
    return {JOINED[0]: Cut(0, pieces[1:]), JOINED[1]: Cut(1, pieces)} if fits else {}


def mixing(block: nn.Module) -> Iterator[str]:
    """Yield the names of the layers within a half that mix heads or inner features: norms over
    more than a head."""
    for name, part in block.named_modules():
        cuts = _attention(part) | _mlp(part)
        head = max((cut.head for cut in cuts.values()), default=0)
        for inner, layer in part.named_modules() if cuts and part is not block else ():
            over = getattr(layer, "normalized_shape", getattr(layer, "dim", None))
            shapes = {tuple(p.shape) for p in layer.parameters(recurse=False)}
            shapes |= {tuple(over)} if isinstance(over, tuple) else set()
            if inner not in cuts and shapes - {(head,)}:
                yield f"{name}.{inner}"


def head_norms(block: nn.Module) -> list[str]:
    """Return the names of the norms of a head that have weights."""
    found = []
    for name, part in block.named_modules():
        cuts = _attention(part) if part is not block else {}
        for inner, layer in part.named_modules() if cuts else ():
            if inner not in cuts and [*layer.parameters(recurse=False)]:
                found.append(f"{name}.{inner}")
    return found
