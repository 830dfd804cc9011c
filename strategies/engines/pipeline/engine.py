"""Pipeline engines on torch.distributed.pipelining: each rank runs one or more runs of blocks.

The launch file gives the stages and the micro-batches; a recipe may choose others, and the
schedule. With more ranks than stages each stage exists several times, on other samples. It is
replicated (``Pipeline``), or sharded by FSDP2 block by block (``Sharded``, with a block
``fsdp_config`` in the launch file). No torch at import. ``cut`` cuts a model, ``stage`` runs a
step, ``schedules`` has the orders, ``state`` sums and checkpoints, ``effects`` the evidence.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import TRAITS
from strategies.engine import Engine, clip_by
from strategies.engines.fsdp.engine import WRAPPED, Fsdp, Rows
from strategies.engines.pipeline.schedules import (
    AUTO,
    OPTIMIZER,
    SCHEDULES,
    Schedule,
)
from strategies.inventory import Fragment, TensorInventory
from strategies.launch_file import PIPELINE, LaunchFile, LaunchFileError, Layout

if TYPE_CHECKING:
    from pathlib import Path

    from strategies.engine import Enter, RunContext, TrainingRun
    from strategies.initial import Draw


FSDP = "fsdp_config"
DEGREE, MICRO = "megatron_lm_pp_degree", "megatron_lm_num_micro_batches"
"""accelerate's only keys for a pipeline are those of Megatron-LM."""
BESIDE = frozenset({"recomputes", "recomputes_layers", "half_compute"})
"""Traits of other parts with which a pipeline was tried."""


def in_file(file: LaunchFile) -> bool:
    """Return True if a launch file names a pipeline beside its distributed type."""
    return DEGREE in (file.content.get(PIPELINE) or {})


class Pipeline(Engine):
    """Stages on as many ranks; micro-batches pass through them by a schedule."""

    modules: ClassVar[tuple[str, ...]] = ("torch.distributed.pipelining",)

    @classmethod
    def of(cls, file: LaunchFile) -> Pipeline:
        block = file.content[PIPELINE]
        for key in (DEGREE, MICRO):
            if not isinstance(block.get(key), int):
                raise LaunchFileError(f"{file.path}: {PIPELINE} says {key} {block.get(key)!r}")
        settings = {"stages": block[DEGREE], "micro": block[MICRO], "schedule": "1f1b"}
        settings["runs"] = AUTO
        if settings["micro"] == 1:
            settings["schedule"] = "gpipe"
        return cls(dataclasses.replace(file, settings=settings))

    # ---- facts ----

    @property
    def stages(self) -> int:
        """Ranks through which a micro-batch passes, each with its blocks."""
        return self.file.settings["stages"]

    @property
    def micro(self) -> int:
        """Micro-batches of a step."""
        return self.file.settings["micro"]

    @property
    def schedule(self) -> Schedule:
        """The order in which stages run the micro-batches."""
        return SCHEDULES[self.file.settings["schedule"]]

    @property
    def stage_runs(self) -> int:
        """Runs of blocks a stage."""
        return self.schedule.runs(self.file.settings["runs"])

    @property
    def homes(self) -> tuple[int, ...]:
        """The stage of each run of blocks, in the order in which they run."""
        return self.schedule.homes(self.stages, self.stage_runs)

    @property
    def naive(self) -> bool:
        """True if a step has one micro-batch, so one stage works at a time."""
        return self.of(self.file).micro == 1

    @property
    def choices(self) -> dict[str, Any]:
        known = self.file.settings
        if self.naive:
            return {"stages": known["stages"]}
        return {name: known[name] for name in ("stages", "schedule", "runs", "micro")}

    def chosen(self, choices: Mapping[str, Any]) -> Pipeline:
        settings = {**self.file.settings, **choices}
        least = {"stages": 2} if self.naive else {"stages": 2, "micro": 2}
        for name, low in least.items():
            value = settings[name]
            if not isinstance(value, int) or value < low:
                naive = "; one micro batch at a time is model_parallel" if name == "micro" else ""
                raise ValueError(f"{name} is {value!r}; a whole number from {low}{naive}")
        if settings["schedule"] not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(f"schedule is {settings['schedule']!r}; one of {known}")
        settings["runs"] = _counted(settings["runs"])
        return type(self)(dataclasses.replace(self.file, settings=settings))

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"stages"})

    def layout(self, ranks: int) -> Layout:
        return Layout(replicate=max(1, ranks // self.stages), pipeline=self.stages)

    def refuses(self, launch: RunContext) -> str | None:
        return self._parts(launch) or self._ranks(launch) or self._beside(launch)

    def _parts(self, launch: RunContext) -> str | None:
        subject, stages, runs = launch.subject, self.stages, self.stage_runs
        lack = subject.lacks("stages", "take ddp or fsdp2")
        if lack:
            return lack
        if self.schedule.split and subject.lacks("ends"):
            return (
                f"gradients of weights come apart, and {subject.name} does not say which weights "
                "are in front of its blocks, which every stage then has; take schedule=interleaved"
            )
        fault = self.schedule.fault(stages, runs, self.micro)
        if fault:
            return fault
        if subject.depth < stages * runs:
            each = f" of {runs} runs" if runs > 1 else ""
            most = subject.depth // runs
            ways = f"take stages of {most} or fewer" if most > 1 else "take ddp or fsdp2"
            return f"{subject.depth} blocks are fewer than {stages} stages{each} have; {ways}"
        return None

    def _ranks(self, launch: RunContext) -> str | None:
        ranks, stages = launch.processes, self.stages
        if ranks % stages:
            more = f"or stages={ranks}" if ranks > 1 else "or single"
            return (
                f"{ranks} processes are not {stages} stages, once or several times; use "
                f"--processes {stages}, {more}"
            )
        if launch.accumulation != self.micro:
            return "its micro batches are its accumulation; leave accumulate out, and take micro="
        return None

    def _beside(self, launch: RunContext) -> str | None:
        odd = sorted(launch.traits - BESIDE - self.traits)
        if not odd and self.schedule.split and "recomputes" in launch.traits:
            return (
                "gradients of weights are computed apart from the others, weight by weight, and "
                "each would recompute its block; leave checkpoint out, or take schedule=interleaved"
            )
        if not odd:
            return None
        return f"not shown beside a part where {TRAITS[odd[0]]}; leave that out, or take ddp"

    # ---- set-up ----

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        from strategies.engines.pipeline import cut

        place = (self._stage_of(accelerator), self.homes)
        cut.fill(module, draw, blocks, place, accelerator.device)

    def _stage_of(self, accelerator: Any) -> int:
        layout = self.layout(accelerator.num_processes)
        return accelerator.process_index // layout.data

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Return the cut model, called as the whole one. It is not wrapped in DDP, because DDP does
        not see the calls of torch's stages."""
        from strategies.engines.pipeline import cut, stage

        made = cut.cut(module, blocks, self._stage_of(accelerator), self.homes)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        of = stage.stage_ranks(rank, ranks, self.layout(ranks).data)
        model = stage.Staged(module, made, of)
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        model = accelerator.prepare_model(model, evaluation_mode=True)
        return model, accelerator.prepare_optimizer(optimizer)

    def ready(self, trained: TrainingRun) -> None:
        from strategies.engines.pipeline import stage

        trained.model.pipe = stage.Pipe(trained.model, self.schedule, self.micro)

    # ---- one optimizer step ----

    def micro_steps(
        self,
        trained: TrainingRun,
        batches: Iterable[Any],
        loss_of: Callable[[Any], Any],
        arrived: Callable[[], None],
    ) -> Iterator[Any]:
        """Take all micro-batches at once, because the schedule runs them in its own order."""
        pipe, taken = trained.model.pipe, list(batches)
        if pipe.schedule is None:
            pipe.begin(trained.subject, taken[0], trained.accelerator.device)
        losses = pipe.step(taken, loss_of)
        self.average(trained)
        pipe.tell(OPTIMIZER)
        arrived()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        yield from losses.unbind()

    def average(self, trained: TrainingRun) -> None:
        """Sum the gradients of shared weights over the stages, then average all gradients over the
        replicas of this stage."""
        from strategies.engines.pipeline import state

        state.sum_shared(trained, self.micro)
        own = (p.grad for p in trained.module.parameters() if p.grad is not None)
        trained.model.ranks.average(own)

    def norm(self, trained: TrainingRun, limit: float = 0.0) -> Any:
        """Sum squares over the stages: each parameter counts on one stage."""
        import torch

        from strategies.engines.pipeline import state

        mine = state.own_norm(trained) if trained.model.cut.shared else super().norm(trained)
        total = mine.detach().double().square()
        torch.distributed.all_reduce(total, group=trained.model.ranks.pipe)
        return clip_by(trained, total.sqrt().to(mine.dtype), limit)

    @contextlib.contextmanager
    def phase_hooks(self, trained: TrainingRun, enter: Enter) -> Iterator[None]:
        pipe = trained.model.pipe
        before, entered = pipe.tell, ["forward"]

        def tell(part: Any) -> None:
            before(part)
            if part and entered[-1] != part.phase:
                entered.append(part.phase)
                enter(part.phase)

        pipe.tell = tell
        enter("forward")
        try:
            yield
        finally:
            pipe.tell = before

    # ---- what is held ----

    def global_parameters(self, trained: TrainingRun) -> Mapping[str, Any]:
        return trained.model.cut.global_parameters(trained.module)

    def fragments(self, trained: TrainingRun, *, copies: bool = False) -> Iterator[Fragment]:
        """Yield this stage's parameters, on the first of its replicas; the first stage yields those
        that all stages have."""
        if trained.model.ranks.share and not copies:
            return
        named = [(n, p) for n, p in trained.module.named_parameters() if p.requires_grad]
        for index, (name, p) in enumerate(named):
            if copies or trained.model.cut.tells(name):
                yield Fragment(name, index, 0, p.numel(), 0)

    def whole(self, trained: TrainingRun, parameters: Sequence[Any]) -> Iterator[Any]:
        from strategies.engines.pipeline import state

        return state.whole(trained, parameters)

    def held(self, trained: TrainingRun) -> TensorInventory:
        """Count torch's receive buffers, one set a micro-batch, as buckets."""
        found = super().held(trained)
        return found._replace(tensors={**found.tensors, "buckets": trained.model.pipe.received()})

    def save(self, trained: TrainingRun, path: Path) -> None:
        from strategies.engines.pipeline import state

        state.save(trained, path)

    def load(self, trained: TrainingRun, path: Path) -> None:
        from strategies.engines.pipeline import state

        state.load(trained, path)

    # ---- evidence ----

    def observe(self, trained: TrainingRun) -> contextlib.AbstractContextManager[Any]:
        from strategies.engines.pipeline import effects

        return effects.observe(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.engines.pipeline import effects

        return effects.evidence(trained, self)

    def shown_alike(self, trained: TrainingRun) -> dict[str, Any]:
        """Return evidence of how the ranks of one stage share the work."""
        from strategies.engines.pipeline import effects

        return effects.replicas(trained)


def _counted(text: Any) -> Any:
    """Return ``runs`` of a recipe: a number, or ``AUTO`` for the schedule's own."""
    if isinstance(text, str) and text.isdigit() and int(text) > 0:
        return int(text)
    if text != AUTO and not isinstance(text, int):
        raise ValueError(f"runs is {text!r}; a whole number from 1, or {AUTO}")
    return text


def named(file: LaunchFile) -> type[Pipeline] | None:
    """Return the kind of pipeline that a launch file names beside its distributed type, or None."""
    if not in_file(file):
        return None
    return Sharded if FSDP in file.content else Pipeline


class Sharded(Pipeline, Rows):
    """Stages whose parameters, gradients and optimizer state are sharded by ``fully_shard``, block
    by block. The ranks of a stage work on different samples."""

    modules: ClassVar[tuple[str, ...]] = (*Pipeline.modules, *Fsdp.modules)
    hybrid: ClassVar[bool] = False
    offloads: ClassVar[bool] = False
    """Features of ``fully_shard`` that are not used here."""

    @classmethod
    def of(cls, file: LaunchFile) -> Pipeline:
        block = file.content[FSDP]
        for key, value in {"fsdp_version": 2, "fsdp_auto_wrap_policy": WRAPPED}.items():
            if block.get(key) != value:
                raise LaunchFileError(
                    f"{file.path}: {FSDP} says {key} {block.get(key)!r}; write {value}"
                )
        reshard = block.get("fsdp_reshard_after_forward", False)
        made = super().of(file)
        return cls(_with(made.file, reshard=reshard))

    # ---- facts ----

    @property
    def reshard(self) -> bool:
        """True if a block's gathered weights are freed after each use, False if they are kept for
        all micro-batches of a step."""
        return self.file.settings["reshard"]

    @property
    def choices(self) -> dict[str, Any]:
        return {**super().choices, "reshard": "on" if self.reshard else "off"}

    def chosen(self, choices: Mapping[str, Any]) -> Pipeline:
        words = {"on": True, "off": False, True: True, False: False}
        asked = choices.get("reshard", self.reshard)
        if asked not in words:
            raise ValueError(f"reshard is {asked!r}; on or off")
        return super().chosen({**choices, "reshard": words[asked]})

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | {"shards", "split_parameters", "dtensor_weights"}

    def layout(self, ranks: int) -> Layout:
        return Layout(shard=max(1, ranks // self.stages), pipeline=self.stages)

    def _ranks(self, launch: RunContext) -> str | None:
        fault = super()._ranks(launch)
        if fault is None and launch.processes == self.stages:
            more = f"--processes {2 * self.stages} or another multiple of {self.stages}"
            return f"each stage has one rank, and nobody to share it with; use {more}, or pp"
        return fault

    def _parts(self, launch: RunContext) -> str | None:
        fault = super()._parts(launch)
        if fault is None and self.schedule.split and self.reshard:
            # torch looks for weights where their gradients come apart: they must be gathered.
            return (
                "gradients of weights are computed apart from the others, on weights that were "
                "gathered for both; take reshard=off, or schedule=interleaved"
            )
        return fault

    # ---- set-up ----

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        from strategies.engines.pipeline import shards

        shards.shard(self, accelerator, module, blocks, draw)

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Make the optimizer for the sharded parameters, which replace the module's own."""
        from strategies.engines.pipeline import shards

        model = shards.shard(self, accelerator, module, blocks)
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        model = accelerator.prepare_model(model, evaluation_mode=True)
        return model, accelerator.prepare_optimizer(optimizer)

    def ready(self, trained: TrainingRun) -> None:
        from strategies.engines.pipeline import shards, stage

        pipe = stage.Pipe(trained.model, self.schedule, self.micro, shards.Reducing)
        trained.model.pipe = pipe

    # ---- one optimizer step ----

    def average(self, trained: TrainingRun) -> None:
        """Sum the gradients of shared weights; torch's reduce-scatters have averaged the others."""
        from strategies.engines.pipeline import state

        state.sum_shared(trained, 1)

    # ---- what is held ----

    def fragments(self, trained: TrainingRun, *, copies: bool = False) -> Iterator[Fragment]:
        tells = trained.model.cut.tells
        for fragment in Rows.fragments(self, trained, copies=copies):
            if copies or tells(fragment.name):
                yield fragment

    # ---- evidence ----

    def observe(self, trained: TrainingRun) -> contextlib.AbstractContextManager[Any]:
        from strategies.engines.pipeline import effects

        return effects.observe_shards(trained)

    def shown_alike(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.engines.pipeline import effects

        return effects.shards(trained)


def _with(file: LaunchFile, **settings: Any) -> LaunchFile:
    return dataclasses.replace(file, settings=file.settings | settings)
