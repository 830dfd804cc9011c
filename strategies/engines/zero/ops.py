"""What DeepSpeed would ask other programs, and is told: which asynchronous file access it has where
there is a GPU but no CUDA toolkit (nvcc), and how many ranks a machine has."""

from __future__ import annotations

import os

__all__ = ["plain_file_access", "tell_local_ranks"]


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
