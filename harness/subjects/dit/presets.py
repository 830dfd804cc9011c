"""DiT sizes (Peebles & Xie 2022, arXiv:2212.09748, table 1), and the facts that follow from them.
Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from dataclasses import dataclass

from strategies.base import BadInput, Sizes
from strategies.subject import MOST_BLOCKS, DataFacts
from strategies.survey import Attended, Survey

FREQUENCIES = 256
"""Width of the sinusoidal timestep embedding, the same in every preset."""
TARGETS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
"""Linear layers of a block that process tokens; adaLN's process one vector per sample."""


@dataclass(frozen=True)
class Shape:
    """Numbers that define a DiT, apart from its data."""

    depth: int
    hidden_size: int
    num_heads: int
    patch_size: int
    mlp_ratio: float = 4.0

    @property
    def mlp_size(self) -> int:
        """Return the hidden units of a block's MLP."""
        return int(self.hidden_size * self.mlp_ratio)

    def tokens(self, input_size: int) -> int:
        """Return the tokens of one sample."""
        return (input_size // self.patch_size) ** 2


_FAMILIES = {
    # T is not from the paper: it learns digits in five minutes on two CPU cores.
    "DiT-T": Shape(depth=4, hidden_size=128, num_heads=4, patch_size=2),
    "DiT-S": Shape(depth=12, hidden_size=384, num_heads=6, patch_size=2),
    "DiT-B": Shape(depth=12, hidden_size=768, num_heads=12, patch_size=2),
    "DiT-L": Shape(depth=24, hidden_size=1024, num_heads=16, patch_size=2),
    "DiT-XL": Shape(depth=28, hidden_size=1152, num_heads=16, patch_size=2),
}

PRESETS: dict[str, Shape] = {
    f"{name}/{patch}": dataclasses.replace(shape, patch_size=patch)
    for name, shape in _FAMILIES.items()
    for patch in (2, 4, 8)
}
"""Name -> shape: DiT-{T,S,B,L,XL}/{2,4,8}."""
SIZES = {
    "depth": "depth",
    "width": "hidden_size",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "patch": "patch_size",
}
"""Size in a model's name -> field of Shape; the width has two names."""


def shape_of(name: str) -> Shape:
    """Return the shape of a preset, or with other sizes: ``DiT-S/4:depth=24,width=512,heads=8``.

    Raises:
        BadInput: an unknown preset or size, with the nearest known one, or impossible sizes.
    """
    preset, _, options = name.partition(":")
    if preset not in PRESETS:
        patches = [known for known in PRESETS if known.startswith(f"{preset}/")]
        hint = f"its patch size is missing: {', '.join(patches)}" if patches else _closest(preset)
        raise BadInput(f"unknown model {preset!r}; {hint}")
    changes: dict[str, int] = {}
    for pair in filter(None, options.split(",")):
        key, _, value = pair.partition("=")
        if key not in SIZES:
            near = difflib.get_close_matches(key, SIZES, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(SIZES)}"
            raise BadInput(f"model {name!r} has no size {key!r}; {hint}")
        if not re.fullmatch("0*[1-9][0-9]{0,6}", value):
            raise BadInput(f"model {name!r}: {key} is {value!r:.30}; a whole number from 1 to 10^7")
        if key == "depth" and int(value) > MOST_BLOCKS:
            raise BadInput(f"model {name!r}: depth is {value}; at most {MOST_BLOCKS} blocks")
        if SIZES[key] in changes:
            raise BadInput(f"model {name!r} has its {key} twice; give it once")
        changes[SIZES[key]] = int(value)
    shape = dataclasses.replace(PRESETS[preset], **changes)
    if shape.hidden_size % shape.num_heads or shape.hidden_size % 4:
        raise BadInput(
            f"model {name!r}: width is {shape.hidden_size}; it must divide by heads "
            f"({shape.num_heads}) and by 4 (sine and cosine of rows and columns)"
        )
    return shape


def _closest(preset: str) -> str:
    """Return a hint with a DiT of the same letters or one typing error, else all DiTs."""
    plain = preset.upper().replace("-", "").replace("/", "").replace("_", "")
    same = [name for name in PRESETS if name.upper().replace("-", "").replace("/", "") == plain]
    typed = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.9)
    if same or typed:
        return f"did you mean {(same or typed)[0]!r}?"
    *most, last = _FAMILIES
    return f"a DiT is {', '.join(most)} or {last} with /2, /4 or /8, as DiT-XL/2"


@functools.lru_cache(maxsize=64)
def survey(
    shape: Shape, data: DataFacts, learn_sigma: bool, class_dropout: float, words: int = 0
) -> Survey:
    """Return what a survey of the DiT finds, in closed form; ``words``: of a DiT over tokens."""
    d, m, tokens = shape.hidden_size, shape.mlp_size, shape.tokens(data.input_size)
    patch = data.channels * shape.patch_size**2
    # (inputs, outputs, rows of a sample) of each linear layer. A patch embedding is one.
    begin = [(FREQUENCIES, d, 1), (d, d, 1)]
    block = [(d, 3 * d, tokens), (d, d, tokens), (d, m, tokens), (m, d, tokens), (d, 6 * d, 1)]
    end = [(d, words or patch * (1 + learn_sigma), tokens), (d, 2 * d, 1)]
    if not words:
        begin.insert(0, (patch, d, tokens))
    layers = [*begin, *block * shape.depth, *end]
    weights = [inputs * outputs for inputs, outputs, _ in layers]
    weights.insert(len(begin), (data.classes + (class_dropout > 0)) * d)  # the table of labels
    if words:
        weights.insert(0, (words + 1) * d)  # of tokens
    trained = sum(weights) + sum(outputs for _, outputs, _ in layers)
    attended = Attended(shape.num_heads, tokens, tokens, d // shape.num_heads)
    products = sum(inputs * outputs * rows for inputs, outputs, rows in layers)
    return Survey(
        parameters=trained + tokens * d,  # with the frozen table of positions
        sizes=Sizes(
            total=trained,
            block=sum((inputs + 1) * outputs for inputs, outputs, _ in block),
            tensor=max(weights),
            bias=max(outputs for _, outputs, _ in layers),
            weights=tuple(weights),
        ),
        flops=2 * products + 4 * shape.depth * tokens**2 * d,
        depth=shape.depth,
        linears=tuple(f"blocks.{i}.{name}" for i in range(shape.depth) for name in TARGETS),
        products=len(block) * shape.depth,
        attention=(attended,) * shape.depth,
        inner=m,
    )
