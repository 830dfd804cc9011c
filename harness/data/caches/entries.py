"""Samples of a cache, and safetensors files with every size checked. No torch at import.

The format: eight bytes with the length of a JSON object, the object (key -> dtype, shape, offsets
after it; ``__metadata__``: strings), the bytes. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from strategies.base import BadInput

if TYPE_CHECKING:
    from torch import Tensor


# ---- samples ----


@dataclass(frozen=True)
class Part:
    """One tensor: its file, key, shape, type as the file names it, and the offset of its bytes (0
    if a library finds them)."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    start: int = 0


@dataclass(frozen=True)
class Sample:
    """One sample of a cache.

    ``parts`` are its tensors by standard names. "latents" is required; "text", "mask" and "pooled"
    are optional. "mean" and "scale" are there if the latents are not normalised yet.

    ``classes``: classes of the library that train on it. ``least_text``: number of tokens to which
    its trainer pads every text with zeros. ``moments``: the latents may be mean and log variance,
    concatenated along channels.
    """

    name: str
    told: str
    classes: tuple[str, ...]
    parts: Mapping[str, Part]
    least_text: int = 0
    moments: bool = False


KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
         "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32",
         "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip
"""The format's name of a type -> torch's."""
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
LONGEST = 100 * 2**20
"""Most bytes of a header: the library's own limit."""


class Contents(NamedTuple):
    """Declaration of a file: its entries."""

    metadata: Mapping[str, str]
    parts: Mapping[str, Part]


def contents(path: Path) -> Contents:
    """Return the header of a complete file.

    Raises:
        BadInput: it cannot be read, or is truncated; names the file and a remedy.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST:
                raise ValueError(f"a header of {length} bytes")
            head, size = json.loads(file.read(length)), path.stat().st_size
        metadata = head.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that is no text")
        parts = {key: _part(path, key, told, 8 + length) for key, told in head.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        reason = " ".join(str(fault).split())
        raise BadInput(f"{path} is not a readable safetensors file ({reason})") from fault
    needed = max((part.start + _bytes(part) for part in parts.values()), default=0)
    if size < needed:
        raise BadInput(f"{path} has {size} of {needed} bytes; write its cache again")
    return Contents(metadata, parts)


def _part(path: Path, key: str, told: Mapping[str, Any], behind: int) -> Part:
    if told["dtype"] not in KINDS:
        raise ValueError(f"{key} is of type {told['dtype']}")
    begin, end = told["data_offsets"]
    if not all(type(n) is int and 0 <= n < 2**48 for n in (begin, end, *told["shape"])):
        raise ValueError(f"{key} has a shape or offsets that no tensor has")
    part = Part(path, key, tuple(told["shape"]), told["dtype"], behind + begin)
    if _bytes(part) != end - begin:
        raise ValueError(f"{key} has {end - begin} bytes for {list(part.shape)}")
    return part


def _bytes(part: Part) -> int:
    return math.prod(part.shape) * SIZES.get(part.dtype, 1)


def tensor(part: Part) -> Tensor:
    """Return the tensor, in its own type, on the CPU."""
    import numpy as np
    import torch

    raw = np.fromfile(part.path, np.uint8, _bytes(part), offset=part.start)
    return torch.from_numpy(raw).view(getattr(torch, KINDS[part.dtype])).reshape(part.shape)
