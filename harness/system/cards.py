"""Memory, bandwidths and peaks of common cards (``cards.json``), and of CPUs. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import RUN
from strategies.base import BadInput

TABLE = Path(__file__).with_name("cards.json")
UNITS = {"gib": 2**30, "g": 2**30, "gb": 10**9, "mib": 2**20, "m": 2**20, "mb": 10**6, "": 2**30}
FLOAT8 = "float8"
"""Type of a product of float8 operands, of either format and with any scales (MX too)."""
COLUMNS = {
    "float16": "fp16_tflops",
    "bfloat16": "bf16_tflops",
    "float32": "fp32_tflops",
    "tf32": "tf32_tflops",
    FLOAT8: "fp8_tflops",
}
"""Dtype of a matrix product -> column of the table."""
LIKE = {"int32": "float16"}
"""Dtype of a product (int32: of int8 operands) -> the one whose rate is assumed."""
WITHOUT = {FLOAT8: "bfloat16"}
"""Dtype of a product -> the one whose rate counts on a card without its unit."""
PRODUCTS, ATTENTION, STREAMING = 0.75, 0.40, 0.80
"""Shares of the peak FLOP/s (products, attention) and of the memory bandwidth that kernels reach,
on a card without a family: a CPU, or one that no table knows."""
OFF = 0.12
"""Relative difference allowed between a card's memory and the size in its name."""
NODE = 8
"""Default number of GPUs per machine."""
DESKTOP_HOST, SERVER_HOST = 64 * 2**30, 256 * 2**30
"""Bytes of host memory assumed per GPU, for a desktop card and for a server."""
DESKTOP_MEMORY = 32 * 2**30
"""Largest memory of a desktop card, if only the memory of the card is known."""
CORE_FLOPS, CORE_BANDWIDTH, CPU_BANDWIDTH = 64e9, 10e9, 200e9
"""Of a CPU: FLOP/s per core in float32 (AVX2 at 2 GHz), bytes/s per core and of all cores."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One card. Bytes, bytes per second (each direction), dense FLOP/s.

    - ``memory_bytes``: the total that CUDA reports for the device.
    - ``bandwidth``, ``link_bandwidth``, ``network_bandwidth``, ``host_bandwidth``: of its memory,
    the link between GPUs of a node, the network between nodes, and copies to host memory.
    - ``peaks``: dtype -> FLOP/s; None without such a unit.
    - ``pattern``: regular expression for the device's name; ``device`` is one such name.
    - ``hopper``: compute capability 9.x or 10.x, for which cuBLAS takes larger workspaces.
    - ``like``: the card whose speed is assumed, if only a memory size was given.
    - ``timed``: measured step times of this card were compared with predictions; ``unmeasured``:
    no public measurement says which share of its peaks kernels reach.
    - ``unified``: host and device share one memory, so that their needs add up; ``shared``: a CPU,
    whose cores, memory and bandwidth all processes share.
    - ``products``: dtype -> shares of the peak that slender and wide products reach, in steps;
    ``attention``: dtype -> (tokens, share); ``streaming``: of the memory bandwidth.
    - ``calibrated``: measured rates, which replace the figures above.
    - ``node``: GPUs per machine; ``domain``: GPUs that NVLink joins, also of several machines (0:
    those of a machine). ``network_told``: where the network's bandwidth was measured.
    - ``beside``: bytes of resident models on each card, named by ``beside_told``
    (``harness.planner.resident_models``); ``also``: the words that asked for them.
    - ``host_memory``: bytes of a machine's, from the source ``host_told``; 0: by the kind of card.
    """

    name: str
    pattern: str
    device: str
    capability: tuple[int, int] | None
    memory_bytes: int
    bandwidth: float
    peaks: Mapping[str, float | None]
    link_bandwidth: float
    network_bandwidth: float
    hopper: bool
    host_bandwidth: float
    like: str = ""
    timed: bool = False
    unmeasured: bool = False
    unified: bool = False
    shared: bool = False
    products: Mapping[str, Sequence[float]] = field(default_factory=dict)
    attention: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    streaming: float = STREAMING
    calibrated: Any = None
    node: int = NODE
    domain: int = 0
    network_told: str = ""
    beside: int = 0
    beside_told: str = ""
    also: tuple[str, ...] = ()
    host_memory: int = 0
    host_told: str = ""

    @property
    def linked(self) -> int:
        """Number of GPUs that communicate without the network; more communicate over it."""
        return max(self.node, self.domain)

    @property
    def host_share(self) -> int:
        alone = self.memory_bytes <= DESKTOP_MEMORY if self.like else "RTX" in self.name
        return DESKTOP_HOST if alone else SERVER_HOST

    def host_bytes(self, processes: int) -> int:
        """Return the bytes of host memory that one machine has for its share of ``processes``."""
        if self.unified:
            return self.memory_bytes
        return self.host_memory or self.host_share * min(self.node, processes)

    @property
    def words(self) -> str:
        size = f"{self.memory_bytes / 2**30:.1f} GiB"
        if self.like:
            return f"{size} (speed assumed: {self.like})"
        size += " for host and device" if self.unified else ""
        times = ", times unknown" if self.unmeasured else ", times untried" if self.untried else ""
        return f"{self.name} ({size}{times})"

    @property
    def untried(self) -> bool:
        """True if no measured step time of this card was compared with a prediction."""
        return not (self.timed or self.shared or self.calibrated)

    def flops(self, dtype: str, tf32: bool = False) -> float:
        """Return the peak FLOP/s of products in ``dtype``; float32's without that unit."""
        kind = "tf32" if tf32 and dtype == "float32" else LIKE.get(dtype, dtype)
        kinds = (kind, WITHOUT.get(kind, kind), "float32")
        return next((peak for one in kinds if (peak := self.peaks.get(one))), 0.0)

    def product_shares(self, kind: str) -> tuple[float, float]:
        """Return the shares of the peak that slender and wide products of a ``kind`` reach.

        Without its own, a type has those of the other of 16 bits, or of the type whose rate counts.
        """
        kind = LIKE.get(kind, kind)
        while kind != "float32" and not self.peaks.get(kind):
            kind = WITHOUT.get(kind, "float32")
        others = () if kind == "float32" else ("bfloat16", "float16")
        known = (found for one in (kind, *others) if (found := self.products.get(one)))
        slender, wide = next(known, (PRODUCTS, PRODUCTS))
        return slender, wide

    def attention_shares(self, dtype: str) -> list[tuple[float, float]]:
        """Return (tokens, share of the peak) of fused attention; at most the share of products."""
        known = self.attention.get(dtype) or self.attention.get("bfloat16") or ((1, ATTENTION),)
        _, wide = self.product_shares(dtype)
        return [(tokens, min(share, wide)) for tokens, share in known]


@functools.cache
def table() -> dict[str, Card]:
    data = json.loads(TABLE.read_text(encoding="utf-8"))
    cards = {}
    for row in data["gpus"]:
        family, capability = data["families"][row["family"]], row["capability"]
        peaks = {kind: row[column] for kind, column in COLUMNS.items()}
        cards[row["name"]] = Card(
            name=row["name"],
            pattern=row["pattern"],
            device=row["device"],
            capability=tuple(capability) if capability else None,
            memory_bytes=int(row["memory_gib"] * 2**30),
            bandwidth=row["bandwidth_gb_s"] * 1e9,
            peaks={k: None if peak is None else peak * 1e12 for k, peak in peaks.items()},
            link_bandwidth=row["link_gb_s"] * 1e9,
            network_bandwidth=row["network_gb_s"] * 1e9,
            hopper=bool(capability) and capability[0] in (9, 10),
            host_bandwidth=row["host_gb_s"] * 1e9,
            timed=row.get("timed", False),
            unmeasured=family.get("unknown", False),
            unified=row.get("unified", False),
            products={**family["products"], **row.get("products", {})},
            attention=family["attention"],
            streaming=family.get("streaming", STREAMING),
            node=row.get("node", NODE),
            domain=row.get("domain", 0),
        )
    return cards


MAKERS = r"\b(nvidia|geforce|tesla|amd|instinct|graphics|gpu)\b"
FORM = r"sxm(\d(?!\d))?|hbm(\d(?!\d))?e?|nvl(4|36|72)\b"
"""Parts of a name that every card of its kind in the table has."""


def _typed(name: str) -> tuple[str, int]:
    """Return a name as letters and digits without maker, form and memory, and its GiB (0: none).

    An RTX may lack its letters (``4090``), and have S for Super.
    """
    small = re.sub(FORM, " ", re.sub(MAKERS, " ", name.lower().replace("_", " ")))
    small = re.sub(r"\bblackwell\b( workstation)?( edition)?", " ", small)
    size = re.search(r"(?<=[^0-9])(\d+) ?gi?b(?![a-z0-9])|(?<=[^a-z0-9])(\d+) ?g?$", small)
    gib = 0
    if size and (size[1] or len(size[2]) < 4):
        gib = int(size[1] or size[2])
        small = small[: size.start()] + small[size.end() :]
    base = re.sub(r"[^a-z0-9]", "", small)
    base = re.sub(r"^(?=[1-5]0[5-9]0)", "gtx" if base.startswith("10") else "rtx", base)
    base = re.sub(r"^(?=a[245][05]00$|a6000$|pro[456][05]00)", "rtx", base)
    return re.sub(r"^(rtx\d{4}(?:ti)?)s$", r"\1super", base), gib


def _device(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", re.sub(MAKERS, " ", name.lower()))


def find(name: str) -> Card:
    """Return the card of that name, in any common spelling.

    A name without a memory size may be ambiguous; one of the PCIe or NVL form never gives another.

    Raises:
        BadInput: an unknown or ambiguous name; the message has the nearest.
    """
    known, plain = table().values(), _device(name)
    exact = [card for card in known if plain == _device(card.name)]
    devices = [card for card in known if plain == _device(card.device)]
    if exact or len(devices) == 1:
        return (exact or devices)[0]
    base, gib = _typed(name)
    same = [card for card in known if _typed(card.name)[0] == base]
    fit = [card for card in same if not gib or abs(card.memory_bytes / 2**30 / gib - 1) < OFF]
    kinds = [f"{base}{form}" for form in ("pcie", "nvl", "x") if base]  # as H100-NVL is an H100
    forms = [card for card in known if _typed(card.name)[0] in kinds]
    sxm = re.search("sxm", name, re.IGNORECASE)
    some = fit if gib or sxm else fit + forms
    if len(some) == 1:
        return some[0]
    listed = ", ".join(f"{card.name} ({card.memory_bytes / 2**30:.1f} GiB)" for card in some)
    if some:
        raise BadInput(f"gpu {name!r} is several cards; one of {listed}")
    raise BadInput(f"unknown gpu {name!r}; {_hint(name, base, gib)}")


def _hint(name: str, base: str, gib: int) -> str:
    if re.fullmatch(r"\s*\d+(\.\d+)? ?[gm](i?b)?\s*", name.lower()):
        return f"a size is given as --gpu-memory {name.replace(' ', '')}"
    memory = f"give its memory, as --gpu-memory {gib or 24}GiB"
    if base.endswith("laptop"):
        return f"a laptop's card is slower and smaller: {memory}"
    names: dict[str, list[str]] = {}
    for card in table().values():
        names.setdefault(_typed(card.name)[0], []).append(card.name)
    digits = re.findall(r"\d+", base) if len(base) > 2 else []
    alike = [one for one in names if digits and re.findall(r"\d+", one) == digits]
    near = [one for one in alike if base.startswith(one)]
    near = near or difflib.get_close_matches(base, alike, n=4, cutoff=0.8)
    if near:
        cards = " or ".join(card for one in near for card in names[one])
        return f"did you mean {cards}? Or {memory}"
    return f"{RUN} list cards shows what there is. Or {memory}"


def named(device: str, memory_bytes: int = 0) -> Card | None:
    """Return the card with nvidia-smi's and torch's name ``device``, or None if unknown.

    ``memory_bytes`` chooses among cards of one name (0: the first). A MIG slice is unknown.
    """
    if re.search(r"\bMIG\b", device):
        return None
    known = table().values()
    match = next((gpu for gpu in known if re.search(gpu.pattern, device, re.IGNORECASE)), None)
    if match is None or not memory_bytes:
        return match
    same = (gpu for gpu in known if gpu.pattern == match.pattern)
    return min(same, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))


def of_size(size: int) -> Card:
    """Return a card known only by its memory, as fast as the slowest card in ``alike``."""
    like = alike(size)[0]
    unknown: dict[str, Any] = {"capability": None, "timed": False, "unified": False}
    name = f"{size / 2**30:.4g} GiB"
    return dataclasses.replace(like, name=name, like=like.name, memory_bytes=size, **unknown)


def alike(size: int) -> list[Card]:
    """Return the table's cards nearest to ``size`` bytes, to a GiB, the slowest first.

    All have bfloat16; without that unit, the times of 16-bit products would be float32's.
    """
    able = [gpu for gpu in table().values() if gpu.peaks["bfloat16"]]
    off = {gpu.name: round(abs(gpu.memory_bytes - size) / 2**30) for gpu in able}
    near = [gpu for gpu in able if off[gpu.name] == min(off.values())]
    return sorted(near, key=lambda gpu: gpu.peaks["bfloat16"] or 0.0)


def of_cpu(name: str, cores: int, memory_bytes: int) -> Card:
    """Return a CPU of that many cores, with typical figures."""
    flops, bandwidth = CORE_FLOPS * cores, min(CORE_BANDWIDTH * cores, CPU_BANDWIDTH)
    return Card(
        name=name,
        pattern="",
        device="cpu",
        capability=None,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        peaks={**dict.fromkeys(COLUMNS), "float32": flops, "bfloat16": flops},
        link_bandwidth=bandwidth,
        network_bandwidth=bandwidth,
        hopper=False,
        host_bandwidth=bandwidth,
        shared=True,
    )


def parse_bytes(text: str, option: str = "gpu-memory") -> int:
    """Return ``24GiB``, ``80GB``, ``40g`` or ``24`` (GiB) in bytes; a BadInput names ``option``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size <= 0:
        raise BadInput(f"{option} is {text!r}; write a size as in 24GiB or 80GB")
    return size


def size_words(size: int) -> str:
    """Return a size that ``parse_bytes`` reads back exactly."""
    for unit, scale in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20)):
        if size % scale == 0:
            return f"{size // scale}{unit}"
    return f"{size / 2**30!r}GiB"
