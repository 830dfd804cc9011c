"""DeepSpeed's asynchronous file access where there is a GPU but no CUDA toolkit (nvcc)."""

from __future__ import annotations

__all__ = ["plain_file_access"]


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
