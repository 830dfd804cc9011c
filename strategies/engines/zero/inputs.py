"""Adjustments before DeepSpeed prepares a model: positional module inputs, async I/O, local rank
count, and its group of a process.

DeepSpeed's ZeRO-3 hooks read only positional inputs (``parameter_offload.py``,
``_post_backward_module_hook``). For a module called by keyword they miss the end of backward, and
weights gathered for recomputation stay until the step ends (DeepSpeed issue 5524 is similar).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import cache
from typing import Any


def give_by_place(module: Any) -> None:
    """Make ``module`` and all modules in it take keyword inputs by position, before DeepSpeed
    registers its own hooks."""
    for part in module.modules():
        part.register_forward_pre_hook(_moved, with_kwargs=True)


def _moved(module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    if not named:
        return None
    kind: Any = type(module)
    bound = _signature(kind).bind(module, *given, **named)
    bound.apply_defaults()  # of what lies between two inputs
    return bound.args[1:], bound.kwargs


@cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


# ---- async I/O and local ranks ----


def plain_file_access() -> bool:
    """Load the CPU's ``async_io`` if there is no CUDA toolkit (nvcc). Return whether it was loaded.

    The CUDA builder fails without CUDA_HOME (DeepSpeed 0.19, ``op_builder/async_io.py``). Swapping
    needs only files and host memory. An op is loaded once: CUDA's builder then returns this one.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is not None:
        return False
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)
    return True


def tell_local_ranks() -> None:
    """Set the number of local ranks, as DeepSpeed's own launcher does and torchrun does not.

    Without it stage 3 on CPUs starts ``numactl`` for each gradient bucket of each step (0.19,
    ``accelerator/cpu_accelerator.py``, ``device_count``): a fifth of a small model's step.
    """
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))


def forget_group() -> None:
    """Clear hpZ's group of ranks; DeepSpeed refuses a second training of the process otherwise."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
