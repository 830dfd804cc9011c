"""Compute capability that NVIDIA GPU features need, and preloaded imports of forks. No torch."""

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
    "int8": (7, 5),
    "attention_flash": (8, 0),
    "attention_cudnn": (8, 0),
}
"""Need named in ``strategies`` -> its least compute capability; other needs have none."""


def shortfall(need: str, capability: tuple[int, int], card: str) -> str:
    """Return why ``card`` is too old for ``need``; empty if it is not."""
    least = SINCE.get(need, (0, 0))
    if capability >= least:
        return ""
    kind, _, kernel = need.partition("_")
    what = f"{kernel} {kind}" if kernel else need
    return f"{what} needs compute capability {_dotted(least)}; {card} has {_dotted(capability)}"


def no_kernels(capability: tuple[int, int], built_for: list[str], card: str) -> str:
    """Return why a torch build cannot compute on ``card``; empty if it can, or nothing is known.

    ``built_for`` are its architectures (``torch.cuda.get_arch_list``): sm_80 is machine code, which
    runs within its generation from its own capability on; compute_90 is PTX, which runs on its
    capability and all later GPUs (CUDA C++ Programming Guide, application compatibility).
    """
    kinds = [word.partition("_") for word in built_for]
    for kind, _, number in kinds:
        digits = number.rstrip("af")  # sm_90a is for 9.0 only, and torch's builds have sm_90 too
        least = (int(digits[:-1]), int(digits[-1]))
        if capability >= least and (kind == "compute" or capability[0] == least[0]):
            return ""
    if not built_for:
        return ""
    return f"this torch is built for {', '.join(built_for)}; {card} has {_dotted(capability)}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# ---- imports for forks ----
# A fork imports torch's compiler with its first optimizer, and modules that DeepSpeed and
# accelerate import late: one to three seconds in each fork. The parent process imports them
# instead.


def load(names: Iterable[str]) -> None:
    """Import the available modules of ``names``, then exclude the live objects from collections.

    A collection in a fork would read them all and write to their pages, which copies the pages.
    """
    for name in names:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    keep()


def keep() -> None:
    gc.collect()
    gc.freeze()


def imported(before: Collection[str]) -> list[str]:
    """Return the modules imported since ``before``, in the order of their import."""
    own = ("__", "tests.")
    return [name for name in sys.modules if name not in before and not name.startswith(own)]
