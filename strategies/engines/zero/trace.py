"""Trace adapter of DeepSpeed: runs ZeRO on tensors without storage in a prediction.

Import it only in a prediction: it imports DeepSpeed and patches it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from strategies import side_streams
from strategies.base import pinned_block
from strategies.engine import Engine, TraceAdapter
from strategies.engines.launcher import arguments
from strategies.engines.zero.config import overlaps
from strategies.inventory import AllocationRecorder

if TYPE_CHECKING:
    from strategies.engine import RunContext, TrainingRun


BUFFERS = 4
"""DeepSpeed's default ``buffer_count`` of an optimizer on NVMe."""


class Storageless(TraceAdapter):
    """Adapter that runs ZeRO's own set-up and step for the launch of ``engine``."""

    shapes_in: ClassVar[tuple[str, ...]] = ("zero/stage_1_and_2.py",)

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def beside(self, launch: RunContext) -> frozenset[str]:
        """Return backward (reductions), and for stage 3 forward (gathers), if the launch
        overlaps."""
        if not overlaps(self.engine.zero, launch.device):
            return frozenset()
        return frozenset(("forward", "backward") if self.engine.stage == 3 else ("backward",))

    def environment(self, launch: RunContext) -> dict[str, str]:
        """Return accelerate's translation of the launch file."""
        from accelerate.utils.launch import prepare_deepspeed_cmd_env

        args, defaults = arguments(self.engine.file.path, launch.processes)
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, variables = prepare_deepspeed_cmd_env(args)
        return {k: v for k, v in variables.items() if k.startswith("ACCELERATE_")}

    def begin(self, launch: RunContext, device: str) -> None:
        if launch.device == "cuda":
            from deepspeed.accelerator import set_accelerator

            set_accelerator(StoragelessAccelerator(device))

    def made(self, accelerator: Any, launch: RunContext) -> None:
        """Replace NVMe by host memory, since swapping does I/O on real bytes.

        ``prepared`` counts that memory as on the drive.
        """
        config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        for what in ("offload_optimizer", "offload_param"):
            block = config.get(what, {})
            if block.get("device") == "nvme":
                block["device"] = "cpu"
                block.pop("nvme_path", None)

    def stand_ins(self, books: AllocationRecorder) -> list[contextlib.AbstractContextManager[Any]]:
        return [mock.patch.object(*patch) for patch in [*_patches(books), *_pins(books)]]

    def prepared(self, trained: TrainingRun, books: AllocationRecorder) -> Callable[[], None]:
        """Record the buffers through which DeepSpeed swaps.

        Source: deepspeed 0.19, runtime/swap_tensor/partitioned_optimizer_swapper.py
        (``buffer_count`` pinned buffers, each as large as the largest sub-group in float32).
        """
        if self.engine.place("optimizer") != "nvme":
            return lambda: None
        masters = trained.model.optimizer.fp32_partitioned_groups_flat
        # Offload to memory keeps a float32 gradient for each master; swapping does not.
        gradients = [m.grad for m in masters if m.grad is not None]
        books.tag("optimizer_state", gradients)
        for gradient in gradients:
            books.pin(gradient, False)
        count = self.engine.zero["offload_optimizer"].get("buffer_count", BUFFERS)
        size = 4 * max(master.numel() for master in masters)
        if trained.launch.device != "cpu":  # a CPU run pins nothing
            size = pinned_block(size)
        for _ in range(count):
            books.hold("host", size, "swap buffers", "temporaries")

        def finish() -> None:
            size = books.move("optimizer_state", "host", "nvme")
            books.work("optimizer", "nvme", 2 * size)

        return finish


class StoragelessAccelerator(CPU_Accelerator):
    """DeepSpeed accelerator of a simulated GPU: the CPU's, with another ``device`` type and
    streams.

    Host tensors are thus not on the simulated GPU. Tensors that CUDA keeps until a side stream is
    done (``record_stream`` under ``overlap_comm``) are freed at once.
    """

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

    Any method may be called; it records reads and writes of its tensor arguments.
    """

    def __init__(self, books: AllocationRecorder) -> None:
        self.books = books

    def __getattr__(self, name: str) -> Callable[..., int]:
        def left_out(*given: Any, **more: Any) -> int:
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            moved = 2 * sum(t.numel() * t.element_size() for t in tensors)
            self.books.work("optimizer", "host", moved)
            return 0

        return left_out


class RoundedKernel:
    """Replacement of DeepSpeed's quantizer with its shapes and types.

    Codes have 8 bits per element, with a float32 scale per group; decoding returns float16.
    """

    Symmetric = 0

    def quantize(self, tensor: Any, groups: int, bits: int, kind: int) -> tuple[Any, Any]:
        return tensor.new_empty(tensor.shape, dtype=torch.int8), tensor.new_empty(
            (groups,), dtype=torch.float32
        )

    def dequantize(self, codes: Any, scales: Any, groups: int, bits: int, kind: int) -> Any:
        return codes.new_empty(codes.shape, dtype=torch.float16)


def _pins(books: AllocationRecorder) -> list[tuple[Any, str, Any]]:
    """Return patches that record pinned memory: copies that replace the original, and own
    buffers."""

    def pin_memory(self: Any, tensor: Any, *given: Any, **more: Any) -> Any:
        books.pin(tensor)
        return tensor

    def empty(self: Any, tensor: Any, shape: Any) -> Any:
        made = tensor.new_empty(shape)
        books.pin(made)
        return made

    kind = StoragelessAccelerator
    return [(kind, "pin_memory", pin_memory), (kind, "_torch_empty_pinned", empty)]


def _patches(books: AllocationRecorder) -> list[tuple[Any, str, Any]]:
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.ops import op_builder
    from deepspeed.ops.op_builder import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
    from deepspeed.runtime.zero import linear, partition_parameters, stage3
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.utils import numa, nvtx

    kernels = [
        (builder, "load", lambda self, verbose=True: AbsentKernel(books))
        for builder in (CPUAdamBuilder, CPUAdagradBuilder, CPULionBuilder)
    ]
    quantiser = [(op_builder.QuantizerBuilder, "load", lambda self, **more: RoundedKernel())]
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
    quick = [(coordinator, "iter_params", _parameters), (coordinator, "z3_leaf_module", _whole)]
    return kernels + quantiser + comparisons + autocast + unused + quick


def _parameters(module: Any, recurse: bool = False) -> list[Any]:
    """Replace DeepSpeed's ``iter_params``."""
    own = module.parameters() if recurse else module._parameters.values()
    found = [parameter for parameter in own if parameter is not None]
    external = vars(module).get("_external_params")
    return [*found, *external.values()] if external else found


def _whole(module: Any) -> bool:
    """Replace DeepSpeed's ``z3_leaf_module``."""
    return vars(module).get("_z3_leaf", False)


def _known(device_type: str) -> str:
    return "cuda" if device_type == "meta" else device_type
