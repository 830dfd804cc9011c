"""FSDP2 engine by accelerate: parameters, gradients and optimizer state sharded, gathered by block.

Its launch file sets offload to host memory, and sharding within groups of ranks (HSDP). accelerate
supports FSDP on GPUs only; elsewhere its own code runs after its state is set (``shard.stand_in``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import BadInput
from strategies.engine import Engine, Workload
from strategies.evidence.readings import stored
from strategies.inventory import (
    EngineReport,
    ParameterPart,
    Shard,
    TensorInventory,
    TracePoints,
)
from strategies.launch_file import LaunchFile, LaunchFileError, Layout

if TYPE_CHECKING:
    import torch

    from strategies.base import Sizes
    from strategies.engine import RunContext, TrainingRun
    from strategies.initial import Draw


def whole(value: Any) -> Any:
    """Return the whole tensor of a DTensor, on every rank; anything else unchanged."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _shard() -> Any:
    """Return ``strategies.engines.fsdp.shard``, which imports torch."""
    from strategies.engines.fsdp import shard

    return shard


WRAPPED = "TRANSFORMER_BASED_WRAP"
HYBRID = "HYBRID_SHARD"
USUAL = {"replicate": 2}
"""Value that accelerate's launch file has no key for."""
STAND_IN = (
    "accelerate starts FSDP only on GPUs: on this CPU its own FSDP2 code runs on "
    "processes that were started as replicas"
)


class Fsdp(Engine):
    """torch's ``fully_shard`` as accelerate applies it; the subject names the blocks."""

    modules: ClassVar[tuple[str, ...]] = (
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor",
    )

    # torch.distributed.checkpoint unpickles .metadata (filesystem.py, read_metadata).
    unpickles: ClassVar[bool] = True

    @classmethod
    def of(cls, file: LaunchFile) -> Fsdp:
        block = file.content.get("fsdp_config") or {}
        for key, value in (("fsdp_version", 2), ("fsdp_auto_wrap_policy", WRAPPED)):
            if (found := block.get(key)) != value:
                text = f"fsdp_config says {key} {found!r}; write {value}"
                raise LaunchFileError(f"{file.path}: {text}")
        reshard = block.get("fsdp_reshard_after_forward", True)
        if not isinstance(reshard, bool):
            text = f"fsdp_reshard_after_forward is {reshard!r}; write true or false"
            raise LaunchFileError(f"{file.path}: {text}")
        return cls(dataclasses.replace(file, settings={**USUAL, "reshard": reshard}))

    # ---- launch file facts ----

    @property
    def hybrid(self) -> bool:
        """True if ranks shard within groups, and average over the groups."""
        return self.file.content["fsdp_config"].get("fsdp_sharding_strategy") == HYBRID

    @property
    def offloads(self) -> bool:
        """True if this rank's shares stay in host memory, and are stepped there."""
        return bool(self.file.content["fsdp_config"].get("fsdp_offload_params"))

    @property
    def reshard(self) -> bool:
        """True if a block's gathered weights are freed between its forward and backward."""
        return self.file.settings["reshard"]

    @property
    def choices(self) -> dict[str, Any]:
        return {"reshard": self.reshard} | (
            {"replicate": self.file.settings["replicate"]} if self.hybrid else {}
        )

    def chosen(self, choices: Mapping[str, Any]) -> Fsdp:
        settings = {**self.file.settings, **choices}
        if not isinstance(settings["replicate"], int) or settings["replicate"] < 2:
            text = f"replicate is {settings['replicate']!r}; a whole number of groups from 2"
            raise ValueError(text)
        return type(self)(dataclasses.replace(self.file, settings=settings))

    @property
    def traits(self) -> frozenset[str]:
        found = {"shards", "split_parameters", "dtensor_weights"}
        found |= {"host_weights"} if self.offloads else set()
        return frozenset(found | ({"held_gradients"} if self.hybrid else set()))

    def layout(self, ranks: int) -> Layout:
        groups = self.file.settings["replicate"] if self.hybrid else 1
        return Layout(replicate=groups, shard=max(1, ranks // groups))

    def place(self, what: str) -> str:
        return "cpu" if self.offloads else "device"

    def refuses(self, launch: RunContext) -> str | None:
        layout, ranks = self.layout(launch.processes), launch.processes
        if ranks == 1:
            return "one process cannot shard; use single, or more processes"
        if self.hybrid and (layout.ranks != ranks or layout.shard < 2):
            groups = layout.replicate
            return (
                f"{ranks} processes are not {groups} groups of two or more; use --processes "
                f"{2 * groups} (or a multiple of {groups} above it), another replicate, or fsdp2"
            )
        lent = launch.subject.lent
        if lent and self.reshard:
            return (
                f"the model calls {lent[0]} outside of its block, where the block's weights are "
                "sharded; take zero3, or reshard=off if the block runs before that call"
            )
        if "compiled_whole" in launch.traits:
            return "it gathers between blocks, where one graph has no room; leave scope=model out"
        return None

    def environment(self, device: str) -> dict[str, str]:
        return {}  # ACCELERATE_USE_CPU would turn FSDP off in its launcher

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        asked = super().accelerator_kwargs(launch)
        if launch.device != "cpu" and not launch.simulated and _shard().meshed(launch.layout):
            asked["parallelism_config"] = _shard().parallelism(launch.layout)
        return asked

    def remarks(self, launch: RunContext, sizes: Sizes | None) -> list[str]:
        return [STAND_IN] if launch.device == "cpu" else []

    # ---- set-up ----

    def configure(self, accelerator: Any, work: Workload) -> None:
        if accelerator.device.type == "cpu":
            _shard().stand_in(accelerator, work.layout)
        _shard().settle(accelerator, self.reshard)

    def runs(self, accelerator: Any) -> bool:
        return super().runs(accelerator) and bool(accelerator.is_fsdp2)

    def adopt(self, accelerator: Any, layout: Layout) -> None:
        if accelerator.device.type == "cpu":
            _shard().stand_in(accelerator, layout)
        accelerator.state.fsdp_plugin.reshard_after_forward = self.reshard

    def adopt_model(
        self, accelerator: Any, module: Any, blocks: Sequence[Any], work: Workload
    ) -> None:
        """Name the blocks' classes, which many models do not.

        Raises:
            BadInput: the model has no blocks, so that all of it would be gathered as one unit.
        """
        names = sorted({type(block).__name__ for block in blocks if block is not module})
        if not names:
            raise BadInput(
                f"FSDP2 would gather {type(module).__name__} as one unit: it has no blocks; name "
                "their classes in its _no_split_modules, or keep them in a ModuleList"
            )
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = names

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        _shard().shard(accelerator, module, blocks, draw)

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Shard the model, then make the optimizer for the sharded parameters.

        An optimizer of the parameters before sharding would never move them, without an error.
        """
        _shard().shard(accelerator, module, blocks)
        _shard().enlist(accelerator, module)
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        return module, accelerator.prepare_optimizer(optimizer)

    # ---- one optimizer step ----

    def norm(self, run: TrainingRun, limit: float = 0.0) -> Any:
        if run.launch.layout.tensor > 1:
            from strategies.parallel.tensor import parallelize

            return parallelize.norm([*run.module.parameters()], limit)
        return whole(super().norm(run, limit))

    # ---- tensors of a rank: rows of every parameter, as DTensors ----

    def optimized(self, run: TrainingRun) -> list[torch.Tensor]:
        return [_shard().local(p) for p in super().optimized(run)]

    def shards(self, run: TrainingRun) -> Iterator[Shard]:
        from strategies.parallel.tensor import parallelize

        pieces = parallelize.pieces if run.launch.layout.tensor > 1 else _shard().pieces
        local, states = _shard().local, run.inner_optimizer.state

        def state(p: Any) -> Mapping[str, Any]:
            return {key: local(value) for key, value in states.get(p, {}).items()}

        named = [(n, p) for n, p in run.module.named_parameters() if p.requires_grad]
        for number, (name, p) in enumerate(named):
            yield Shard(number, local(p), partial(state, p), partial(pieces, name, p))

    def trace_points(self, run: TrainingRun) -> TracePoints:
        """Return the gathered parameters as leaves; they exist from the first forward on."""
        return TracePoints(_shard().gathered(run.module), tuple(_shard().makers()))

    def part(self, parameter: Any) -> ParameterPart:
        return ParameterPart(_shard().local(parameter), parameter.shape)

    def whole(self, run: TrainingRun, parameters: Sequence[Any]) -> Iterator[Any]:
        from strategies.parallel.tensor import parallelize

        for parameter in parameters:
            yield parallelize.whole(whole(parameter.detach()), parameter)

    def held(self, run: TrainingRun) -> TensorInventory:
        found = super().held(run)
        if not self.offloads:
            return found
        of_weights = [t for p in run.module.parameters() for t in stored(p.data)]
        gradients = [t for g in found.tensors["gradients"] for t in stored(g)]
        return found._replace(host=(*of_weights, *gradients, *found.tensors["optimizer_state"]))

    # ---- evidence ----

    def report(self, run: TrainingRun) -> EngineReport:
        sizes = tuple(_shard().gradient_bucket_bytes(run.module))
        return super().report(run)._replace(gradient_bucket_bytes=sizes)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.engines.fsdp import effects

        return effects.evidence(run)
