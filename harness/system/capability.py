"""Compute capability: what NVIDIA GPUs can do since which generation. No torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Collection, Iterable

SINCE = {
    "bf16": (8, 0),
    "tf32": (8, 0),
    "sparse24": (8, 0),
    "fp8": (8, 9),
    "attention_flash": (8, 0),
    "attention_cudnn": (8, 0),
}
"""Need named in ``strategies`` -> the compute capability it begins with; others have no such."""


def shortfall(need: str, capability: tuple[int, int], card: str) -> str:
    """Why ``card`` is too old for ``need``, in words; empty where it is not."""
    least = SINCE.get(need, (0, 0))
    if capability >= least:
        return ""
    kind, _, kernel = need.partition("_")
    what = f"{kernel} {kind}" if kernel else need
    return f"{what} needs compute capability {_dotted(least)}; {card} has {_dotted(capability)}"


def no_kernels(capability: tuple[int, int], built_for: list[str], card: str) -> str:
    """Why a torch that is ``built_for`` these architectures (``torch.cuda.get_arch_list``: sm_80
    is machine code, compute_90 is what a driver translates) computes nothing on ``card``; empty
    where it does, or where nothing is known of the build.

    Machine code runs within its generation from its own capability on; what a driver translates,
    on that and all later cards (CUDA C++ Programming Guide, application compatibility).
    """
    kinds = [word.partition("_") for word in built_for]
    for kind, _, number in kinds:
        digits = number.rstrip("af")  # sm_90a is for 9.0 alone, and torch's builds have sm_90 too
        least = (int(digits[:-1]), int(digits[-1]))
        if capability >= least and (kind == "compute" or capability[0] == least[0]):
            return ""
    if not built_for:
        return ""
    return f"this torch is built for {', '.join(built_for)}; {card} has {_dotted(capability)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# ---- imports ----
# What one fork of a process imported, imported in the process itself for the forks that follow.
#
# A fork imports torch's compiler with its first optimizer, and what DeepSpeed and accelerate put
# off until they are used: one to three seconds, again in each.


def load(names: Iterable[str]) -> None:
    """Import what can be imported of ``names``, and keep collections away from what lives then:
    each fork's would read all of it anew, and write to its pages, and so copy them."""
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    keep()


def keep() -> None:
    """Keep collections away from what lives now."""
    gc.collect()
    gc.freeze()


def imported(before: Collection[str]) -> list[str]:
    """Modules that are here and were not ``before``, in the order of their import."""
    own = ("__", "tests.")
    return [name for name in sys.modules if name not in before and not name.startswith(own)]
