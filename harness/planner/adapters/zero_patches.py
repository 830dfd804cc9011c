"""Patches of DeepSpeed that run ZeRO on tensors without storage. Importing it imports DeepSpeed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from harness.planner.adapters.base import AllocationRecorder
from harness.planner.tracing import side_streams


class StoragelessAccelerator(CPU_Accelerator):
    """DeepSpeed accelerator of a simulated GPU: the CPU's, with another ``device`` type and
    streams.
    Host tensors are thus not on the simulated GPU. Tensors that CUDA keeps until a side stream is
    done (``record_stream`` under ``overlap_comm``) are freed at once."""

    Stream, Event = side_streams.Stream, side_streams.Event

    def __init__(self, device: str) -> None:
        super().__init__()
        self._name = device
        self._communication_backend_name = "fake"

    def is_synchronized_device(self) -> bool:
        return False

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return side_streams.inside(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return side_streams.current()

    def default_stream(self, device_index: int | None = None) -> Any:
        return side_streams.main

    def device_name(self, device_index: int | None = None) -> str:
        return self._name

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self._name)

    def current_device_name(self) -> str:
        return self._name

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"


class AbsentKernel:
    """Replacement of DeepSpeed's compiled CPU optimizers that keeps their state and skips the
    arithmetic.
    Any method may be called; it records reads and writes of its tensor arguments."""

    def __init__(self, recorder: AllocationRecorder) -> None:
        self.recorder = recorder

    def __getattr__(self, name: str) -> Callable[..., int]:
        def left_out(*given: Any, **more: Any) -> int:
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            moved = 2 * sum(t.numel() * t.element_size() for t in tensors)
            self.recorder.work("optimizer", "host", moved)
            return 0

        return left_out


def pins(recorder: AllocationRecorder) -> list[tuple[Any, str, Any]]:
    """Return patches that record pinned memory: copies that replace the original, and own
    buffers."""

    def pin_memory(self: Any, tensor: Any, *given: Any, **more: Any) -> Any:
        recorder.pin(tensor)
        return tensor

    def empty(self: Any, tensor: Any, shape: Any) -> Any:
        made = tensor.new_empty(shape)
        recorder.pin(made)
        return made

    kind = StoragelessAccelerator
    return [(kind, "pin_memory", pin_memory), (kind, "_torch_empty_pinned", empty)]


def kernels(recorder: AllocationRecorder) -> list[tuple[Any, str, Any]]:
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
    from deepspeed.runtime.zero import linear, partition_parameters, stage3
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import numa, nvtx

    optimizers = [
        (builder, "load", lambda self, verbose=True: AbsentKernel(recorder))
        for builder in (CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder)
    ]
    # They compare numbers across ranks, and a prediction has one.
    comparisons = [
        (module, "assert_ints_same_as_other_ranks", lambda ints: None)
        for module in (partition_parameters, coordinator, stage3)
    ]
    # ZeRO-3's linear layer reads autocast by the device's name.
    autocast = [
        (linear, "_is_autocast_enabled", lambda kind: torch.is_autocast_enabled(_known(kind))),
        (linear, "_get_autocast_dtype", lambda kind: torch.get_autocast_dtype(_known(kind))),
    ]
    # An inference kernel for real ranks, whose loading takes the compiler a second.
    unused = [(sys.modules[TorchBackend.__module__], "build_shm_op", lambda: None)]
    # On a CPU it starts a program for each bucket, to count the machine's devices.
    unused += [(numa, "get_numa_cores", list)]
    unused += [(nvtx, "enable_nvtx", False)]  # profiler marks around each call
    # It delays the reuse of freed memory by the device's clock.
    unused += [(torch.Tensor, "record_stream", lambda tensor, stream: None)]
    # Called for all modules inside each released one: 150,000 times in a trace of six blocks.
    quick = [(coordinator, "iter_params", _parameters), (coordinator, "z3_leaf_module", _is_leaf)]
    return optimizers + comparisons + autocast + unused + quick


def _parameters(module: Any, recurse: bool = False) -> list[Any]:
    """Replace DeepSpeed's ``iter_params``."""
    own = module.parameters() if recurse else module._parameters.values()
    found = [parameter for parameter in own if parameter is not None]
    external = vars(module).get("_external_params")
    return [*found, *external.values()] if external else found


def _is_leaf(module: Any) -> bool:
    """Replace DeepSpeed's ``z3_leaf_module``."""
    return vars(module).get("_z3_leaf", False)


def _known(device_type: str) -> str:
    return "cuda" if device_type == "meta" else device_type
