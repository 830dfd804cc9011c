"""Common GPUs: memory, bandwidths and peaks, from ``gpus.json``. No torch."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path

from strategies.base import BadInput
from strategies.recipe import nearest

__all__ = ["Gpu", "find", "of_size", "parse_bytes", "table"]

TABLE = Path(__file__).with_name("gpus.json")
UNITS = {"gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "m": 2**20, "mb": 10**6, "": 2**30}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card. Bytes, bytes a second (each direction), dense FLOP a second.

    ``memory_bytes``: what CUDA reports as the device's total. Bandwidths are of its memory, of
    the link between GPUs of one node, of the network between nodes, and of copies to host memory.
    ``hopper``: cuBLAS takes larger workspaces from this generation on.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp32_flops: float
    tf32_flops: float
    link_bandwidth: float
    network_bandwidth: float
    hopper: bool
    host_bandwidth: float

    def flops(self, dtype: str, tf32: bool = False) -> float:
        """Peak FLOP/s of matrix products in ``dtype``."""
        if dtype in ("bfloat16", "float16"):
            return self.bf16_flops
        return self.tf32_flops if tf32 else self.fp32_flops


@functools.cache
def table() -> dict[str, Gpu]:
    """Name -> card."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["gpus"]
    return {
        row["name"]: Gpu(
            name=row["name"],
            memory_bytes=int(row["memory_gib"] * 2**30),
            bandwidth=row["bandwidth_gb_s"] * 1e9,
            bf16_flops=row["bf16_tflops"] * 1e12,
            fp32_flops=row["fp32_tflops"] * 1e12,
            tf32_flops=row["tf32_tflops"] * 1e12,
            link_bandwidth=row["link_gb_s"] * 1e9,
            network_bandwidth=row["network_gb_s"] * 1e9,
            hopper=row["hopper"],
            host_bandwidth=row["host_gb_s"] * 1e9,
        )
        for row in rows
    }


def find(name: str) -> Gpu:
    """The card of that name, however it is spelled.

    Raises:
        BadInput: unknown; names the nearest.
    """
    known = {_plain(key): gpu for key, gpu in table().items()}
    if _plain(name) in known:
        return known[_plain(name)]
    starts = [gpu for key, gpu in known.items() if key.startswith(_plain(name))]
    if len(starts) == 1 and _plain(name):
        return starts[0]
    if starts and _plain(name):
        some = ", ".join(gpu.name for gpu in starts)
        raise BadInput(f"gpu {name!r} is several cards; one of {some}")
    hint = nearest(name, table())
    raise BadInput(f"unknown gpu {name!r}; {hint} Or give --gpu-memory 24GiB")


def of_size(size: int) -> Gpu:
    """A card known by its memory alone: the speed of the table's nearest in size."""
    like = min(table().values(), key=lambda gpu: abs(gpu.memory_bytes - size))
    name = f"{size / 2**30:.4g} GiB (speed of {like.name})"
    return Gpu(**{**vars(like), "name": name, "memory_bytes": size})


def parse_bytes(text: str) -> int:
    """``24GiB``, ``80GB``, ``40g`` or ``24`` (GiB) as bytes.

    Raises:
        BadInput: not a size above zero.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(found[2].lower()) if found else None
    size = int(float(found[1]) * unit) if unit else 0
    if size <= 0:
        raise BadInput(f"gpu-memory is {text!r}; write a size as in 24GiB or 80GB")
    return size


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
