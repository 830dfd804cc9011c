"""Pipeline engine on torch.distributed.pipelining: each rank runs one or more runs of blocks.

The launch file gives the stages and the micro-batches; a recipe may choose others, and the
schedule. With more ranks than stages each stage exists several times, on other samples. No torch at
import.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.conflicts import TRAITS
from strategies.engine import Engine
from strategies.engines.pipeline.schedules import SCHEDULES, Schedule
from strategies.inventory import Piece, Shard, TensorInventory
from strategies.launch_file import PIPELINE, LaunchFile, LaunchFileError, Layout

if TYPE_CHECKING:
    from pathlib import Path

    from strategies.engine import Enter, RunContext, TrainingRun
    from strategies.initial import Draw


DEGREE, MICRO = "megatron_lm_pp_degree", "megatron_lm_num_micro_batches"
"""accelerate's only keys for a pipeline are those of Megatron-LM."""
BESIDE = frozenset({"recomputes", "recomputes_layers", "half_compute"})
"""Traits of other parts with which a pipeline was tried."""


def in_file(file: LaunchFile) -> bool:
    """Return True if a launch file names a pipeline beside its distributed type."""
    return DEGREE in (file.content.get(PIPELINE) or {})


class Pipeline(Engine):
    """Stages on as many ranks; micro-batches pass through them by a schedule."""

    modules: ClassVar[tuple[str, ...]] = (
        "torch.distributed.pipelining",
        "torch.distributed.checkpoint.state_dict",
    )
    # torch.distributed.checkpoint unpickles .metadata (filesystem.py, read_metadata).
    unpickles: ClassVar[bool] = True

    @classmethod
    def of(cls, file: LaunchFile) -> Pipeline:
        block = file.content[PIPELINE]
        for key in (DEGREE, MICRO):
            if not isinstance(block.get(key), int):
                raise LaunchFileError(f"{file.path}: {PIPELINE} says {key} {block.get(key)!r}")
        settings = {"stages": block[DEGREE], "micro": block[MICRO], "schedule": "1f1b"}
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
        return self.schedule.runs

    @property
    def naive(self) -> bool:
        """True if a step has one micro-batch, so one stage works at a time."""
        return self.of(self.file).micro == 1

    @property
    def choices(self) -> dict[str, Any]:
        known = self.file.settings
        if self.naive:
            return {"stages": known["stages"]}
        return {name: known[name] for name in ("stages", "schedule", "micro")}

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
        return type(self)(dataclasses.replace(self.file, settings=settings))

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"stages"})

    def layout(self, ranks: int) -> Layout:
        return Layout(replicate=max(1, ranks // self.stages), pipeline=self.stages)

    def refuses(self, launch: RunContext) -> str | None:
        subject, stages, runs = launch.subject, self.stages, self.stage_runs
        lack = subject.lacks("ends", "take ddp or fsdp2")
        if fault := lack or self.schedule.fault(stages, self.micro):
            return fault
        if subject.depth < stages * runs:
            each = f" of {runs} runs" if runs > 1 else ""
            most = subject.depth // runs
            ways = f"take stages of {most} or fewer" if most > 1 else "take ddp or fsdp2"
            return f"{subject.depth} blocks are fewer than {stages} stages{each} have; {ways}"
        ranks = launch.processes
        if ranks % stages:
            more = f"or stages={ranks}" if ranks > 1 else "or single"
            return (
                f"{ranks} processes are not {stages} stages, once or several times; use "
                f"--processes {stages}, {more}"
            )
        if launch.accumulation != self.micro:
            return "its micro batches are its accumulation; leave accumulate out, and take micro="
        odd = sorted(launch.traits - BESIDE - self.traits)
        text = "not shown beside a part where {}; leave that out, or take ddp"
        return text.format(TRAITS[odd[0]]) if odd else None

    # ---- set-up ----

    def _place(self, accelerator: Any) -> tuple[int, int, int]:
        """Return this rank's stage, the number of stages, and the runs of all stages."""
        data = self.layout(accelerator.num_processes).data
        return accelerator.process_index // data, self.stages, self.stages * self.stage_runs

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        from strategies.engines.pipeline import stage

        stage.fill(module, draw, blocks, self._place(accelerator), accelerator.device)

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        """Return the cut model, called as the whole one. It is not wrapped in DDP, because DDP does
        not see the calls of torch's stages."""
        from strategies.engines.pipeline import stage
        from strategies.parallel import groups

        made = stage.cut(module, blocks, *self._place(accelerator))
        ranks, place = accelerator.num_processes, stage.StageRanks(0, 1)
        data = self.layout(ranks).data
        if data > 1:
            replicas = groups.group_of(data, 1, ranks)
            pipe = groups.group_of(ranks // data, data, ranks)
            place = stage.StageRanks(accelerator.process_index % data, data, pipe, replicas)
        model = stage.Staged(module, made, place, accelerator.autocast)
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        model = accelerator.prepare_model(model, evaluation_mode=True)
        return model, accelerator.prepare_optimizer(optimizer)

    # ---- one optimizer step ----

    def micro_steps(
        self,
        run: TrainingRun,
        batches: Iterable[Any],
        arrived: Callable[[], None],
    ) -> Iterator[Any]:
        """Take all micro-batches at once, because the schedule runs them in its own order."""
        losses = run.model.step(run, list(batches), self.schedule)
        grads = (p.grad for p in run.module.parameters() if p.grad is not None)
        run.model.ranks.average(grads)
        run.model.enter("optimizer")
        arrived()
        run.optimizer.step()
        run.optimizer.zero_grad()
        yield from losses.unbind()

    def norm(self, run: TrainingRun, limit: float = 0.0) -> Any:
        """Sum squares over the stages: each parameter is on one stage."""
        import torch

        mine = super().norm(run)
        total = mine.detach().double().square()
        torch.distributed.all_reduce(total, group=run.model.ranks.pipe)
        norm = total.sqrt().to(mine.dtype)
        if limit:
            own = [p for p in run.module.parameters() if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(own, limit, norm)
        return norm

    @contextlib.contextmanager
    def phase_hooks(self, run: TrainingRun, enter: Enter) -> Iterator[None]:
        model, entered = run.model, ["forward"]
        before = model.enter

        def begins(phase: str) -> None:
            before(phase)
            if entered[-1] != phase:
                entered.append(phase)
                enter(phase)

        model.enter = begins
        enter("forward")
        try:
            yield
        finally:
            model.enter = before

    # ---- what is held ----

    def global_parameters(self, run: TrainingRun) -> Mapping[str, Any]:
        cut, here = run.model.cut, dict(run.module.named_parameters())
        return {name: here[name] if name in here else cut.elsewhere[name] for name in cut.owners}

    def shards(self, run: TrainingRun) -> Iterator[Shard]:
        """Yield this stage's parameters; the first of its replicas answers for them."""
        named = [n for n, p in run.module.named_parameters() if p.requires_grad]

        def pieces(name: str, p: Any) -> Iterator[Piece]:
            if not run.model.ranks.share:
                yield Piece(name, 0, p.numel(), 0)

        for shard in super().shards(run):
            yield shard._replace(pieces=partial(pieces, named[shard.number], shard.tensor))

    def whole(self, run: TrainingRun, parameters: Sequence[Any]) -> Iterator[Any]:
        from strategies.engines.pipeline import stage

        return stage.whole(run, parameters)

    def held(self, run: TrainingRun) -> TensorInventory:
        """Count torch's receive buffers, one set a micro-batch, as buckets."""
        found = super().held(run)
        return found._replace(tensors={**found.tensors, "buckets": run.model.received()})

    def save(self, run: TrainingRun, path: Path) -> None:
        from strategies.engines.pipeline import stage

        stage.save(run, path)

    def load(self, run: TrainingRun, path: Path) -> None:
        from strategies.engines.pipeline import stage

        stage.load(run, path)

    # ---- evidence ----

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.engines.pipeline import effects

        return effects.evidence(run)
