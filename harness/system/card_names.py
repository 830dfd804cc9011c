"""Names that people type for a card: their parts, and hints for cards without figures here."""

from __future__ import annotations

import re
from typing import NamedTuple

MAKERS = r"\b(nvidia|geforce|tesla|amd|instinct|graphics|gpu)\b"
FORM = r"sxm(\d(?!\d))?|hbm(\d(?!\d))?e?|nvl(4|36|72)\b"
"""Parts of a name that every card of its kind in the table has."""
ELSEWHERE = {
    "a10g": 24, "a16": 16, "a30": 24, "l40": 48, "p100": 16, "h20": 96, "h800": 80,
    "b100": 192, "h200nvl": 141, "mi210": 64, "mi250": 128, "mi250x": 128, "mi325x": 256,
    "mi355x": 288, "rtxa2000": 12, "rtxa4000": 16, "rtxa4500": 20, "rtxa5000": 24, "rtxa5500": 24,
    "rtx4000ada": 20, "rtx4500ada": 24, "rtx5000ada": 32, "titanrtx": 24, "gtx1080ti": 11,
    "rtx2060": 6, "rtx2070": 8, "rtx2080": 8, "rtx2080ti": 11, "rtx3060ti": 8, "rtx3070": 8,
    "rtx3070ti": 8, "rtx3080": 10, "rtx3080ti": 12, "rtx3090ti": 24, "rtx4090d": 24,
    "rtx5060": 8, "rtx5090d": 32, "rtxpro4000": 24, "rtxpro4500": 32, "rtxpro5000": 48,
    "rx7900xt": 20, "7900xt": 20,
}  # fmt: skip
"""Card without figures here, as letters and digits -> GiB in its data sheet."""


class Typed(NamedTuple):
    """A card's name in parts.

    ``base``: letters and digits without maker, form and memory. ``gib``: the memory in the name,
    0 without one.
    """

    base: str
    gib: int


def typed(name: str) -> Typed:
    """Return the parts of a name, in any common spelling.

    An RTX may lack its letters (``4090``), and have S for Super.
    """
    small = re.sub(FORM, " ", re.sub(MAKERS, " ", name.lower().replace("_", " ")))
    small = re.sub(r"\bblackwell\b( workstation)?( edition)?", " ", small)
    size = re.search(r"(?<=[^0-9])(\d+) ?gi?b(?![a-z0-9])|(?<=[^a-z0-9])(\d+) ?g?$", small)
    size = size if size and (size[1] or len(size[2]) < 4) else None
    gib = int(size[1] or size[2]) if size else 0
    if size:
        small = small[: size.start()] + small[size.end() :]
    base = re.sub(r"[^a-z0-9]", "", small)
    base = re.sub(r"^(?=[1-5]0[5-9]0)", "gtx" if base.startswith("10") else "rtx", base)
    base = re.sub(r"^(?=a[245][05]00$|a6000$|pro[456][05]00)", "rtx", base)
    return Typed(re.sub(r"^(rtx\d{4}(?:ti)?)s$", r"\1super", base), gib)


def device(name: str) -> str:
    """Return a device's name of nvidia-smi as letters and digits, without its maker."""
    return re.sub(r"[^a-z0-9]", "", re.sub(MAKERS, " ", name.lower()))


def hint(name: str) -> str:
    """Return what to write for a card without figures here: its memory, if that is known."""
    if re.fullmatch(r"\s*\d+(\.\d+)? ?[gm](i?b)?\s*", name.lower()):
        return f"a size is given as --gpu-memory {name.replace(' ', '')}"
    base, gib = typed(name)
    if base.endswith("laptop"):
        size = gib or 16
        return f"a laptop's card is slower and smaller. Give its memory, as --gpu-memory {size}GiB"
    if size := gib or ELSEWHERE.get(base, 0):
        return f"no figures of it are here. Give its memory: --gpu-memory {size}GiB"
    if base == "a800":
        return "no figures of it are here. Give its memory: --gpu-memory 40GiB or 80GiB"
    return ""
