"""What takes less memory than a recipe does: what a plan tries, and what a failure recommends."""

from __future__ import annotations

from collections.abc import Iterable

LIGHTER = {
    "single": ("zero2", "zero3"),
    "ddp": ("zero1", "zero2", "zero3"),
    "zero1": ("zero2", "zero3"),
    "zero2": ("zero3", "zero2_offload"),
    "zero1_offload": ("zero2_offload", "zero3_offload"),
    "zero2_offload": ("zero3_offload",),
    "zero3": ("zero3_offload",),
    "zero3_hpz": ("zero3", "zero3_offload"),
    "zero3_qwz": ("zero3_offload",),
    "zero3_offload_partial": ("zero3_offload",),
    "fsdp2": ("fsdp2_offload", "zero3_offload"),
    "hsdp": ("fsdp2", "fsdp2_offload"),
}
"""Sharding -> what holds less on a GPU, the faster first."""
ALONE = ("zero2_offload", "zero3_offload")
"""The same for one GPU, which has nobody to share with."""


def lighter(sharding: str, processes: int) -> tuple[str, ...]:
    """Shardings that hold less on a GPU than this one does, the faster first."""
    known = LIGHTER.get(sharding, ()) if processes > 1 else ALONE
    return tuple(name for name in known if name != sharding)


def ways_out(recipe: str, processes: int, *, host: bool) -> str:
    """What ``recipe`` has not tried yet where memory ran out, the cheapest first: the device's, or
    the ``host``'s."""
    names = [word.partition(":")[0] for word in recipe.split("+")]
    ways = [] if "checkpoint" in names else ["add checkpoint (recomputes activations)"]
    if "accumulate" not in names:
        ways.append("feed less at once with accumulate:steps=2")
    if host and "_offload" in names[0]:
        ways.append(f"take {names[0].partition('_offload')[0]} without offload, or zero3_nvme")
    elif not host and lighter(names[0], processes):
        ways.append(f"hold less with {_either(lighter(names[0], processes))}")
    return ", or ".join([*ways, "a smaller --global-batch"])


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
