"""Adapter of DeepSpeed's ZeRO for predictions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from harness.planner.adapters.base import (
    AllocationRecorder,
    ResolvedConfig,
    TraceAdapter,
    launcher_arguments,
)
from strategies.base import pinned_block
from strategies.engines.zero.config import fill, nvme_blocks, overlaps, settle

if TYPE_CHECKING:
    from strategies.engine import RunContext, TrainingRun, Workload


BUFFERS = 4
"""DeepSpeed's default ``buffer_count`` of an optimizer on NVMe."""
JSON = "deepspeed.json"
NVME_BLANK = "/FILL/IN/A/FOLDER/ON/NVME"
NVME_TOLD = "a folder on a local NVMe drive; each process swaps its shard there"
PRECISIONS = ("bf16", "fp16")


class ZeroAdapter(TraceAdapter):
    """Adapter that runs ZeRO's own set-up and step without storage."""

    shapes_in: ClassVar[tuple[str, ...]] = ("zero/stage_1_and_2.py",)

    def by_block(self, depth: int) -> Sequence[Hashable]:
        """Return a key of its own for each block if host memory holds a part of the training.
        Buffers span blocks, and torch rounds each pinned one to a power of two
        (``strategies.base.pinned_block``), so host memory does not grow linearly with the number of
        blocks."""
        places = {self.engine.place(what) for what in ("optimizer", "parameters")}
        return super().by_block(depth) if places == {"device"} else range(depth)

    def resolved_config(
        self,
        launch: RunContext,
        work: Callable[[Path], Workload],
        mixed_precision: str,
        configure: Callable[[Any], None],
        folder: Path,
    ) -> ResolvedConfig:
        """Return the launch file and its JSON with the values of a run of ``launch``."""
        file = self.engine.file
        config = copy.deepcopy(file.settings)
        settle(config, work(Path(NVME_BLANK)), launch.processes, launch.device)
        # In the place of an ``Accelerator``: it has only DeepSpeed's config.
        plugin = SimpleNamespace(deepspeed_config=config)
        configure(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))
        # In the place of "auto", the values that accelerate writes while it prepares.
        accumulation = launch.accumulation
        samples = config["train_micro_batch_size_per_gpu"] * accumulation * launch.layout.data
        fill(config, {"train_batch_size": samples, "gradient_accumulation_steps": accumulation})
        for name in PRECISIONS:
            fill(config.setdefault(name, {"enabled": "auto"}), {"enabled": name == mixed_precision})
        content = copy.deepcopy(file.content)
        content["num_processes"] = launch.processes
        # accelerate refuses "mixed_precision" with a DeepSpeed file: the JSON sets it.
        content["deepspeed_config"]["deepspeed_config_file"] = str(folder / JSON)
        blanks = {f"{JSON}: zero_optimization.{name}.nvme_path": NVME_TOLD
                  for name, _ in nvme_blocks(config)}  # fmt: skip
        return ResolvedConfig(content, {JSON: config}, blanks)

    def overlapped_phases(self, launch: RunContext) -> frozenset[str]:
        """Return backward (reductions), and for stage 3 forward (gathers), if the launch
        overlaps."""
        if not overlaps(self.engine.zero, launch.device):
            return frozenset()
        return frozenset(("forward", "backward") if self.engine.stage == 3 else ("backward",))

    def environment(self, launch: RunContext) -> dict[str, str]:
        """Return accelerate's translation of the launch file."""
        from accelerate.utils.launch import prepare_deepspeed_cmd_env

        args, defaults = launcher_arguments(self.engine.file, launch.processes)
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, variables = prepare_deepspeed_cmd_env(args)
        return {k: v for k, v in variables.items() if k.startswith("ACCELERATE_")}

    def begin(self, launch: RunContext, device: str) -> None:
        if launch.device == "cuda":
            from deepspeed.accelerator import set_accelerator

            from harness.planner.adapters.zero_patches import StoragelessAccelerator

            set_accelerator(StoragelessAccelerator(device))

    def patches(
        self, launch: RunContext, recorder: AllocationRecorder
    ) -> list[contextlib.AbstractContextManager[Any]]:
        from harness.planner.adapters.zero_patches import kernels, pins

        return [mock.patch.object(*patch) for patch in [*kernels(recorder), *pins(recorder)]]

    def adapt_accelerator(self, accelerator: Any, launch: RunContext) -> None:
        """Replace NVMe by host memory, since swapping does I/O on real bytes.
        ``prepared`` counts that memory as on the drive."""
        config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        for what in ("offload_optimizer", "offload_param"):
            block = config.get(what, {})
            if block.get("device") == "nvme":
                block["device"] = "cpu"
                block.pop("nvme_path", None)

    def prepared(self, run: TrainingRun, recorder: AllocationRecorder) -> Callable[[], None]:
        """Record the buffers through which DeepSpeed swaps.
        Source: deepspeed 0.19, runtime/swap_tensor/partitioned_optimizer_swapper.py
        (``buffer_count`` pinned buffers, each as large as the largest sub-group in float32)."""
        if self.engine.place("optimizer") != "nvme":
            return lambda: None
        masters = run.model.optimizer.fp32_partitioned_groups_flat
        # Offload to memory keeps a float32 gradient for each master; swapping does not.
        gradients = [m.grad for m in masters if m.grad is not None]
        recorder.tag("optimizer_state", gradients)
        for gradient in gradients:
            recorder.pin(gradient, False)
        count = self.engine.zero["offload_optimizer"].get("buffer_count", BUFFERS)
        size = 4 * max(master.numel() for master in masters)
        if run.launch.device != "cpu":  # a CPU run pins nothing
            size = pinned_block(size)
        for _ in range(count):
            recorder.hold("host", size, "swap buffers", "temporaries")

        def finish() -> None:
            size = recorder.move("optimizer_state", "host", "nvme")
            recorder.work("optimizer", "nvme", 2 * size)

        return finish
