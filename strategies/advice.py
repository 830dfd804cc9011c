"""Suggestions that reduce a recipe's memory, for plans and for out-of-memory failures."""

from __future__ import annotations

LIGHTER = {
    "single": ("zero2", "zero3"),
    "ddp": ("zero1", "zero2", "zero3"),
    "zero1": ("zero2", "zero3"),
    "zero2": ("zero3", "zero2_offload"),
    "zero1_offload": ("zero2_offload", "zero3_offload"),
    "zero2_offload": ("zero3_offload",),
    "zero3": ("zero3_offload",),
    "fsdp2": ("fsdp2_offload", "zero3_offload"),
    "hsdp": ("fsdp2", "fsdp2_offload"),
}
"""Sharding -> shardings that use less GPU memory, the fastest first."""
ALONE = ("zero2_offload", "zero3_offload")
"""Shardings that use less memory on one GPU, where there are no ranks to shard over."""


def lighter(sharding: str, processes: int) -> tuple[str, ...]:
    """Return shardings that use less GPU memory than this one, the fastest first."""
    known = LIGHTER.get(sharding, ()) if processes > 1 else ALONE
    return tuple(name for name in known if name != sharding)


def suggestions(recipe: str, processes: int, *, host: bool) -> str:
    """Return suggestions after an out-of-memory failure of ``recipe``, the cheapest first.

    ``host``: host memory ran out, not the device's.
    """
    names = [word.partition(":")[0] for word in recipe.split("+")]
    ways = [] if "checkpoint" in names else ["add checkpoint (recomputes activations)"]
    if "accumulate" not in names:
        ways.append("feed less at once with accumulate:steps=2")
    if host and "_offload" in names[0]:
        ways.append(f"take {names[0].partition('_offload')[0]} without offload, or zero3_nvme")
    elif not host and lighter(names[0], processes):
        ways.append(f"hold less with {' or '.join(lighter(names[0], processes))}")
    return ", or ".join([*ways, "a smaller --global-batch"])
