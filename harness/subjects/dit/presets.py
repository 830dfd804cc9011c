"""DiT sizes, and the parameters and FLOPs that follow from them. Imports no torch.

Source: Peebles & Xie 2022, arXiv:2212.09748, table 1. The paper's "Gflops" are multiply-adds; FLOPs
here count a multiply-add as two.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from strategies.base import BadInput, Sizes
from strategies.subject import MOST_BLOCKS

FREQUENCIES = 256
"""Width of the sinusoidal timestep embedding, the same in every preset."""


@dataclass(frozen=True)
class Shape:
    """Numbers that define a DiT, apart from its data."""

    depth: int
    hidden_size: int
    num_heads: int
    patch_size: int
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.hidden_size % 4:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; it must divide by num_heads "
                f"({self.num_heads}) and by 4 (sine and cosine of rows and columns)"
            )

    @property
    def mlp_size(self) -> int:
        """Return the hidden units of a block's MLP."""
        return int(self.hidden_size * self.mlp_ratio)

    def tokens(self, input_size: int) -> int:
        """Return the tokens of one sample.

        Raises:
            ValueError: patches do not tile the input.
        """
        if input_size % self.patch_size:
            raise ValueError(
                f"input_size {input_size} does not divide by patch_size {self.patch_size}; "
                "choose a preset with a patch that does"
            )
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
    changes, typed = {}, {"hidden_size": "width", "num_heads": "heads"}
    for pair in filter(None, options.split(",")):
        key, _, value = pair.partition("=")
        if key not in SIZES:
            raise BadInput(f"model {name!r} has no size {key!r}; {_nearest(key, SIZES)}")
        if not re.fullmatch("0*[1-9][0-9]{0,6}", value):
            raise BadInput(f"model {name!r}: {key} is {value!r:.30}; a whole number from 1 to 10^7")
        if key == "depth" and int(value) > MOST_BLOCKS:
            raise BadInput(f"model {name!r}: depth is {value}; at most {MOST_BLOCKS} blocks")
        if SIZES[key] in changes:
            raise BadInput(f"model {name!r} has its {key} twice; give it once")
        changes[SIZES[key]], typed[SIZES[key]] = int(value), key
    try:
        return dataclasses.replace(PRESETS[preset], **changes)
    except ValueError as error:
        said = str(error)
        for field, key in typed.items():
            said = said.replace(field, key)
        raise BadInput(f"model {name!r}: {said}") from None


def _closest(preset: str) -> str:
    """Return a hint with a DiT of the same letters or one typing error, else all DiTs."""
    plain = preset.upper().replace("-", "").replace("/", "").replace("_", "")
    same = [name for name in PRESETS if name.upper().replace("-", "").replace("/", "") == plain]
    typed = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.9)
    if same or typed:
        return f"did you mean {(same or typed)[0]!r}?"
    *most, last = _FAMILIES
    return f"a DiT is {', '.join(most)} or {last} with /2, /4 or /8, as DiT-XL/2"


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.3)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(known)}"


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def largest_block_count(shape: Shape) -> int:
    """Return the parameters of one transformer block, the least that sharding gathers at once."""
    d, m = shape.hidden_size, shape.mlp_size
    attention = _linear(d, 3 * d) + _linear(d, d)
    return attention + _linear(d, m) + _linear(m, d) + _linear(d, 6 * d)


def parameter_count(
    shape: Shape,
    input_size: int = 32,
    channels: int = 4,
    classes: int = 1000,
    learn_sigma: bool = True,
) -> int:
    """Return the elements of all parameters, with the frozen position table and the null class's
    row."""
    frozen = shape.tokens(input_size) * shape.hidden_size
    return trainable_count(shape, input_size, channels, classes, learn_sigma) + frozen


def trainable_count(
    shape: Shape,
    input_size: int = 32,
    channels: int = 4,
    classes: int = 1000,
    learn_sigma: bool = True,
) -> int:
    """Return the elements of the parameters with gradients: all except the position table."""
    d, area = shape.hidden_size, shape.patch_size**2
    embedders = _linear(channels * area, d) + _linear(FREQUENCIES, d) + _linear(d, d)
    labels = (classes + 1) * d
    final = _linear(d, area * channels * (1 + learn_sigma)) + _linear(d, 2 * d)
    return embedders + labels + shape.depth * largest_block_count(shape) + final


def sizes(
    shape: Shape,
    input_size: int = 32,
    channels: int = 4,
    classes: int = 1000,
    learn_sigma: bool = True,
) -> Sizes:
    """Return the sizes that determine an engine's buffers, with every weight trained."""
    d, m = shape.hidden_size, shape.mlp_size
    block = (3 * d * d, d * d, d * m, m * d, 6 * d * d)
    patch = channels * shape.patch_size**2
    ends: tuple[int, ...] = (patch * d, FREQUENCIES * d, d * d, (classes + 1) * d)
    ends += (2 * d * d, patch * (1 + learn_sigma) * d)
    weights = block * shape.depth + ends
    return Sizes(
        total=trainable_count(shape, input_size, channels, classes, learn_sigma),
        block=largest_block_count(shape),
        tensor=max(weights),
        bias=6 * d,
        weights=weights,
    )


def forward_flops(
    shape: Shape,
    input_size: int = 32,
    channels: int = 4,
    batch: int = 1,
    learn_sigma: bool = True,
) -> int:
    """Return the FLOPs (2 x multiply-adds) of one forward pass over ``batch`` samples.

    They count every matrix product: patch embedding, timestep MLP, adaLN, qkv, both attention
    products, projection, MLP and final layer. Elementwise work is excluded, as in the paper and in
    torch's FlopCounterMode, with which the result agrees exactly.
    """
    tokens, d, m = shape.tokens(input_size), shape.hidden_size, shape.mlp_size
    patch = channels * shape.patch_size**2
    conditioning = FREQUENCIES * d + d * d
    attention = tokens * (3 * d * d + d * d) + 2 * tokens * tokens * d
    block = attention + 2 * tokens * d * m + 6 * d * d
    final = tokens * d * patch * (1 + learn_sigma) + 2 * d * d
    macs = tokens * patch * d + conditioning + shape.depth * block + final
    return 2 * batch * macs


def train_flops(
    shape: Shape,
    input_size: int = 32,
    channels: int = 4,
    batch: int = 1,
    learn_sigma: bool = True,
) -> int:
    """Return the model FLOPs of one training step: 3 x forward (backward has two products for each
    one).

    Work that a strategy repeats (activation recompute) is excluded. Otherwise a strategy would seem
    faster by doing more (the MFU convention of PaLM, arXiv:2204.02311, appendix B).
    """
    return 3 * forward_flops(shape, input_size, channels, batch, learn_sigma)
