"""DeepSpeed ZeRO engine: optimizer state, gradients and parameters sharded over the ranks, by
stage.

Its launch file names a DeepSpeed JSON, which sets stage, offload and buckets; ``"auto"`` is
resolved from the model and the training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import BadInput, Sizes
from strategies.engine import Engine, Enter, Workload, backward_hook, process_group
from strategies.engines.zero import config as ds_config
from strategies.engines.zero import effects, facts
from strategies.engines.zero.inputs import (
    forget_group,
    give_by_place,
    plain_file_access,
    tell_local_ranks,
)
from strategies.engines.zero.waste import Job, waste
from strategies.inventory import (
    EngineReport,
    ParameterPart,
    Shard,
    TensorInventory,
    TracePoints,
)
from strategies.launch_file import LaunchFile, LaunchFileError, Layout, text_of
from strategies.launch_keys import truth

if TYPE_CHECKING:
    import torch

    from strategies.engine import RunContext, TrainingRun
    from strategies.initial import Draw


BLOCK_OF = dict(zip(("optimizer", "parameters"), ds_config.OFFLOADS, strict=True))
"""Tensors that can be offloaded -> their block of the JSON."""


class Zero(Engine):
    """DeepSpeed engine of a launch file."""

    modules: ClassVar[tuple[str, ...]] = (
        "deepspeed.runtime.zero.stage3",
        "deepspeed.runtime.zero.stage_1_and_2",
        "deepspeed.ops.adam",
        "deepspeed.checkpoint",
    )
    buckets: ClassVar[str] = "gradients"
    """They hold gradients that are sent to their owners."""
    host_adamw: ClassVar[str] = "strategies.engines.zero.processor:DeepSpeedCPUAdam"
    # DeepSpeed loads with weights_only=False (checkpoint_engine/torch_checkpoint_engine.py).
    unpickles: ClassVar[bool] = True

    @classmethod
    def of(cls, file: LaunchFile) -> Zero:
        path, config = file.path, file.settings
        if file.own:
            name = (file.content.get("deepspeed_config") or {}).get("deepspeed_config_file")
            if not name:
                text = "names no deepspeed_config_file under deepspeed_config"
                raise LaunchFileError(f"{path}: {text}")
            path = path.parent.parent / name
            try:
                config = json.loads(text_of(path))
            except (ValueError, RecursionError) as error:
                raise LaunchFileError(f"{path}: not JSON ({error})") from None
        block = config.get("zero_optimization") if isinstance(config, dict) else None
        if not isinstance(block, dict) or block.get("stage") not in (1, 2, 3):
            raise LaunchFileError(f"{path}: no zero_optimization block with a stage from 1 to 3")
        if fault := ds_config.fault(config):
            raise LaunchFileError(f"{path}: {fault}")
        return cls(dataclasses.replace(file, settings=config))

    def refuses(self, launch: RunContext) -> str | None:
        """Refuse what a user's file sets against the recipe, or what is not run here."""
        if self.file.own or launch.simulated:
            return super().refuses(launch)
        if self.place("parameters") == "nvme":
            return "offload_param on NVMe is not run here; write its device as cpu"
        if "own_loop" in launch.traits:
            return super().refuses(launch)
        if "optimizer" in self.file.settings:
            return f"{self.file.path.name} makes an optimizer, as the recipe does; leave it out"
        half = "half_compute" in launch.traits
        for name in ("bf16", "fp16"):
            on = truth(self.file.settings[name].get("enabled")) is True
            if on and not half:
                return f"{self.file.path.name} switches {name} on; add +{name} to the recipe"
        return super().refuses(launch)

    # ---- launch file facts ----

    @property
    def zero(self) -> dict[str, Any]:
        """zero_optimization block of the JSON."""
        return self.file.settings["zero_optimization"]

    @property
    def stage(self) -> int:
        return self.zero["stage"]

    @property
    def usual_name(self) -> str:
        places = {self.place(what) for what in BLOCK_OF}
        end = "_nvme" if "nvme" in places else "_offload" if "cpu" in places else ""
        return f"zero{self.stage}{end}"

    @property
    def needs(self) -> tuple[str, ...]:
        places = {self.place(what) for what in BLOCK_OF}
        adam = ("cpu_adam",) if self.place("optimizer") != "device" else ()
        return ("deepspeed", *adam, *(("async_io",) if "nvme" in places else ()))

    @property
    def traits(self) -> frozenset[str]:
        found = {"shards", "flat_weights", "float_master", "own_step", "own_clipping"}
        found |= {"split_parameters", "gathers_ahead"} if self.stage == 3 else set()
        place = self.place("optimizer")
        found |= {"host_optimizer"} if place != "device" else set()
        return frozenset(found | ({"swapped_weights"} if place == "nvme" else set()))

    def layout(self, ranks: int) -> Layout:
        return Layout(shard=ranks)

    def place(self, what: str) -> str:
        device = (self.zero.get(BLOCK_OF[what]) or {}).get("device", "none")
        return "device" if device == "none" else device

    def environment(self, device: str) -> dict[str, str]:
        # With ACCELERATE_USE_CPU set, accelerate would train DDP without an error.
        return {"DS_ACCELERATOR": "cpu"} if device == "cpu" else {}

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        # Without a backend's name accelerate gives DeepSpeed no process group on a CPU.
        if launch.simulated:
            return process_group("fake")
        return process_group("gloo") if launch.device == "cpu" else {}

    def remarks(self, launch: RunContext, sizes: Sizes | None) -> list[str]:
        alone = "one process: ZeRO cannot shard, so all of the state is on it"
        texts = [alone] if launch.processes == 1 else []
        if sizes is None:
            return texts
        itemsize = 2 if "half_compute" in launch.traits else 4  # DeepSpeed's storage type
        job = Job(sizes=sizes, itemsize=itemsize, ranks=launch.processes, device=launch.device)
        name = self.file.path.name
        return [*texts, *(f"{name}: {finding}" for finding in waste(self.zero, job))]

    # ---- set-up ----

    def configure(self, accelerator: Any, work: Workload) -> None:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        if ds_config.nvme_blocks(config):
            plain_file_access()
            work.scratch.mkdir(parents=True, exist_ok=True)
        ds_config.settle(config, work, accelerator.num_processes, accelerator.device.type)
        forget_group()
        if accelerator.device.type == "cpu":
            tell_local_ranks()

    def runs(self, accelerator: Any) -> bool:
        if not super().runs(accelerator):
            return False
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        found = type(self)(dataclasses.replace(self.file, settings={"zero_optimization": zero}))
        facts = [(e.stage, *map(e.place, BLOCK_OF)) for e in (self, found)]
        return facts[0] == facts[1]

    def adopt(self, accelerator: Any, layout: Layout) -> None:
        """Unregister ZeRO-3 with transformers unless the launch file asks for it: accelerate 1.15
        registers it whatever ``zero3_init_flag`` says (utils/dataclasses.py, ``DeepSpeedPlugin``),
        and ``from_pretrained`` would shard frozen models that no engine gathers."""
        if not self.file.content["deepspeed_config"].get("zero3_init_flag"):
            from transformers.integrations import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()

    def adopt_model(
        self, accelerator: Any, module: Any, blocks: Sequence[Any], work: Workload
    ) -> None:
        if not work.micro_batch:
            raise BadInput(
                "DeepSpeed reads the micro-batch from a DataLoader in the same prepare call, and "
                "the script prepares its model without one; take ddp or fsdp2"
            )
        self.configure(accelerator, work)

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        from strategies.engines.zero.fill import fill

        fill(accelerator, module, draw, split=self.stage == 3)

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        if self.stage == 3:
            give_by_place(module)
        return super().prepare(accelerator, module, make_optimizer, blocks)

    def sixteen_bits(self, accelerator: Any, *, master: bool = True, scale: int = 0) -> None:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        ds_config.sixteen_bits(config, master=master, scale=scale)

    # ---- one optimizer step ----

    def norm(self, run: TrainingRun, limit: float = 0.0) -> Any:
        return run.model.get_global_grad_norm()

    @contextlib.contextmanager
    def phase_hooks(self, run: TrainingRun, enter: Enter) -> Iterator[None]:
        """Mark the optimizer phase at DeepSpeed's ``step``, which accelerate's ``backward``
        calls."""
        step = run.model.step

        def marked(*given: Any, **more: Any) -> None:
            enter("optimizer")
            step(*given, **more)

        run.model.step = marked
        try:
            with backward_hook(run, enter, behind=""):
                yield
        finally:
            del run.model.step

    # ---- tensors and checkpoints ----

    def optimized(self, run: TrainingRun) -> list[torch.Tensor]:
        if self.stage < 3:
            return super().optimized(run)
        # ZeRO-3 empties the inner optimizer's groups between steps.
        return list(run.model.optimizer.fp32_partitioned_groups_flat)

    def shards(self, run: TrainingRun) -> Iterator[Shard]:
        return facts.shards(run)

    def whole(self, run: TrainingRun, parameters: Sequence[Any]) -> Iterator[Any]:
        if self.stage < 3:
            yield from parameters
            return
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        # Gathers that ZeRO-3 began ahead of a forward pass that did not come must end first: a
        # parameter in flight cannot be made whole and split again.
        run.model.empty_partition_cache()
        for p in parameters:
            with GatheredParameters([p]):
                yield p

    def part(self, parameter: Any) -> ParameterPart:
        shape = getattr(parameter, "ds_shape", parameter.shape)
        return ParameterPart(getattr(parameter, "ds_tensor", parameter), shape)

    def held(self, run: TrainingRun) -> TensorInventory:
        return TensorInventory(facts.held(run), host=tuple(facts.hosted(run)))

    def trace_points(self, run: TrainingRun) -> TracePoints:
        return super().trace_points(run)._replace(scopes=tuple(facts.makers()))

    # ---- evidence ----

    def report(self, run: TrainingRun) -> EngineReport:
        ds, scale = run.model, getattr(run.model.optimizer, "loss_scale", None)
        return EngineReport(
            steps=int(ds.global_steps),
            clip=float(ds.gradient_clipping()),
            accumulation=ds.gradient_accumulation_steps(),
            micro_batch=ds.train_micro_batch_size_per_gpu(),
            loss_scale=None if scale is None else float(scale),
            config=ds.config,
            swapped_bytes=sum(size for _, size in facts.swap_files(ds)),
        )

    def observe(self, run: TrainingRun) -> contextlib.AbstractContextManager[Any]:
        own = "own_loop" in run.launch.traits  # it may step without this engine's model
        return contextlib.nullcontext() if own else effects.observe(run)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        return effects.evidence(run)
