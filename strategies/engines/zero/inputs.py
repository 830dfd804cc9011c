"""Modules that are called by keyword, for ZeRO-3: what has a place is given by place.

DeepSpeed's hooks look at positional inputs alone (``parameter_offload.py``,
``_post_backward_module_hook``). Backward of a module that was given its tensors by keyword has no
end there, and frozen weights that were gathered to recompute it stay until the step is over: for
Flux under adapters and checkpoints all of them. (DeepSpeed issue 5524 has a like cause.)
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import cache
from typing import Any


def give_by_place(module: Any) -> None:
    """Have ``module`` and all modules in it take by place what they are given by keyword. To be
    called before DeepSpeed puts its own hooks there, which then see it."""
    for part in module.modules():
        part.register_forward_pre_hook(_moved, with_kwargs=True)


def _moved(module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    return placed(_parameters(type(module)), given, named) if named else None


@cache
def _parameters(kind: type) -> tuple[inspect.Parameter, ...]:
    """What ``kind.forward`` takes by place or keyword, behind the module itself."""
    parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    places = [p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters]
    count = places.index(False) if False in places else len(places)
    return tuple(parameters[:count])


def placed(
    parameters: tuple[inspect.Parameter, ...], given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of the same call, with as many by place as can be; a
    parameter between that was not given has its default."""
    values, left = list(given), dict(named)
    for parameter in parameters[len(given) :]:
        missing = parameter.name not in left and parameter.default is inspect.Parameter.empty
        if missing or not any(p.name in left for p in parameters[len(values) :]):
            break
        values.append(left.pop(parameter.name, parameter.default))
    return tuple(values), left


# ---- ops ----
# What DeepSpeed would ask other programs, and is told: which asynchronous file access it has where
# there is a GPU but no CUDA toolkit (nvcc), and how many ranks a machine has.


def plain_file_access() -> bool:
    """Load the ``async_io`` that needs no toolkit where there is none; whether it was loaded.

    The CUDA builder wants headers below CUDA_HOME and joins a path to None without one (DeepSpeed
    0.19, ``op_builder/async_io.py``). Swapping needs files and host memory alone, which the CPU's
    builder has, and an op is loaded once a process: whoever asks the CUDA builder then gets it.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is not None:
        return False
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    AsyncIOBuilder().load(verbose=False)
    return True


def tell_local_ranks() -> None:
    """Say how many ranks this machine has, as DeepSpeed's own launcher does, and torchrun does not.

    On CPUs the number decides which way quantised gradients take. Where it is missing, stage 3
    starts ``numactl`` to guess it from the sockets, for each bucket of gradients of each step
    (0.19, ``accelerator/cpu_accelerator.py``, ``device_count``): a fifth of a small model's step.
    """
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
