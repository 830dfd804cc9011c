"""DeepSpeed's view of a GPU that is not there: tensors on ``meta``, host memory apart."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from harness.predict.world import GPU

__all__ = ["MetaAccelerator"]


class MetaAccelerator(CPU_Accelerator):
    """The CPU's accelerator with another device: what is on the host is then not on the GPU.

    It has no streams, so that memory which CUDA keeps until a side stream is done
    (``record_stream`` under ``overlap_comm``) is freed at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._name = GPU
        self._communication_backend_name = "fake"

    def device_name(self, device_index: int | None = None) -> str:
        return GPU

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(GPU)

    def current_device_name(self) -> str:
        return GPU

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == GPU

    def pin_memory(self, tensor: Any, *given: Any, **more: Any) -> Any:
        """Pinning allocates anew; the copy replaces the original at once, so bytes are equal."""
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"
