"""A pipeline of stages by torch.distributed.pipelining: each rank has a run of the blocks.

The launch file says how many stages and micro batches there are; a recipe may choose others, and
the schedule. How a model is cut stands in ``cut``, how a step runs in ``staged``, what shows it in
``effects``, and its checkpoints in ``joined``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import TRAITS
from strategies.engine import Engine, Imitation
from strategies.engines.pipeline.schedules import SCHEDULES, UNTRIED
from strategies.holdings import Fragment, Holdings
from strategies.launch_file import LaunchFile, LaunchFileError
from strategies.layout import Layout

if TYPE_CHECKING:
    from pathlib import Path

    from strategies.engine import Enter, Launch, Trained
    from strategies.initial import Draw

__all__ = ["Pipeline", "in_file"]

BLOCK = "megatron_lm_config"
DEGREE, MICRO = "megatron_lm_pp_degree", "megatron_lm_num_micro_batches"
"""accelerate has keys for a pipeline in the block of Megatron-LM alone."""
BESIDE = frozenset({"recomputes", "half_compute", "stages"})
"""Traits of other parts beside which a pipeline was tried."""


def in_file(file: LaunchFile) -> bool:
    """Whether a launch file names a pipeline beside its distributed type."""
    return DEGREE in (file.content.get(BLOCK) or {})


class Pipeline(Engine):
    """Stages on as many ranks; micro batches pass through them by a schedule."""

    kinds: ClassVar[tuple[str, ...]] = ("MULTI_CPU", "MULTI_GPU")
    modules: ClassVar[tuple[str, ...]] = ("torch.distributed.pipelining",)

    @classmethod
    def of(cls, file: LaunchFile) -> Pipeline:
        block = file.content[BLOCK]
        for key in (DEGREE, MICRO):
            if not isinstance(block.get(key), int):
                raise LaunchFileError(f"{file.path}: {BLOCK} says {key} {block.get(key)!r}")
        settings = {"stages": block[DEGREE], "micro": block[MICRO], "schedule": "1f1b"}
        if settings["micro"] == 1:
            settings["schedule"] = "gpipe"
        return cls(dataclasses.replace(file, settings=settings))

    # ---- facts ----

    @property
    def stages(self) -> int:
        """Ranks, each with one run of the blocks."""
        return self.file.settings["stages"]

    @property
    def micro(self) -> int:
        """Micro batches that pass in a step."""
        return self.file.settings["micro"]

    @property
    def schedule(self) -> Any:
        """The order in which a stage runs them."""
        return SCHEDULES[self.file.settings["schedule"]]

    @property
    def naive(self) -> bool:
        """Whether one micro batch passes, so that one stage works at a time."""
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
        if settings["schedule"] not in {**SCHEDULES, **UNTRIED}:
            known = ", ".join([*SCHEDULES, *UNTRIED])
            raise ValueError(f"schedule is {settings['schedule']!r}; one of {known}")
        return type(self)(dataclasses.replace(self.file, settings=settings))

    @property
    def traits(self) -> frozenset[str]:
        return frozenset({"stages"})

    def layout(self, ranks: int) -> Layout:
        return Layout(replicate=max(1, ranks // self.stages), pipeline=self.stages)

    def refuses(self, launch: Launch) -> str | None:
        return self._parts(launch) or self._ranks(launch) or self._beside(launch)

    def _parts(self, launch: Launch) -> str | None:
        subject, stages = launch.subject, self.stages
        lack = subject.lacks("stages", "take ddp or fsdp2")
        if lack:
            return lack
        if subject.depth % stages:
            fitting = [str(n) for n in range(2, subject.depth + 1) if subject.depth % n == 0]
            ways = f"take stages of {' or '.join(fitting)}" if fitting else "take ddp or fsdp2"
            return f"{subject.depth} blocks are not {stages} equal stages; {ways}"
        schedule = self.file.settings["schedule"]
        if schedule in UNTRIED:
            return f"{schedule}: {UNTRIED[schedule]}; take schedule=1f1b"
        return self.schedule.fault(stages, self.micro)

    def _ranks(self, launch: Launch) -> str | None:
        ranks, stages = launch.processes, self.stages
        if ranks != stages:
            more = f"or stages={ranks}" if ranks > 1 else "or single"
            return (
                f"{ranks} processes are not {stages} stages, and stages are not repeated; use "
                f"--processes {stages}, {more}"
            )
        if launch.accumulation != self.micro:
            return "its micro batches are its accumulation; leave accumulate out, and take micro="
        if launch.simulated:
            return "it computes on what other stages send; leave --world out"
        return None

    def _beside(self, launch: Launch) -> str | None:
        odd = sorted(launch.traits - BESIDE)
        if not odd:
            return None
        return f"not shown beside a part where {TRAITS[odd[0]]}; leave that out, or take ddp"

    # ---- set-up ----

    def fill(self, accelerator: Any, module: Any, draw: Draw, blocks: Sequence[Any]) -> None:
        from strategies.engines.pipeline import cut

        place = (accelerator.process_index, self.stages)
        cut.fill(module, draw, blocks, place, accelerator.device)

    def prepare(
        self,
        accelerator: Any,
        module: Any,
        make_optimizer: Callable[[list[Any]], Any],
        blocks: Sequence[Any],
    ) -> tuple[Any, Any]:
        """The cut model, called as the whole one is; not wrapped in DDP, for no two ranks have
        the same weights."""
        from strategies.engines.pipeline import cut, staged

        made = cut.cut(module, blocks, accelerator.process_index, self.stages)
        own = {id(part) for part in module.modules()}
        model = staged.Staged(module, made, [block for block in blocks if id(block) in own])
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        model = accelerator.prepare_model(model, evaluation_mode=True)
        return model, accelerator.prepare_optimizer(optimizer)

    def ready(self, trained: Trained) -> None:
        from strategies.engines.pipeline import staged

        trained.model.pipe = staged.Pipe(trained.model, self.schedule, self.micro)

    # ---- one optimizer step ----

    def micro_steps(
        self,
        trained: Trained,
        batches: Iterable[Any],
        loss_of: Callable[[Any], Any],
        arrived: Callable[[], None],
    ) -> Iterator[Any]:
        """All micro batches are there at once, for the schedule runs them in its own order."""
        pipe, taken = trained.model.pipe, list(batches)
        if pipe.schedule is None:
            pipe.begin(trained.subject, taken[0], trained.accelerator.device)
        losses = pipe.step(taken, loss_of)
        pipe.tell("optimizer", 0)
        arrived()
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        yield from losses.unbind()

    def norm(self, trained: Trained) -> Any:
        """Each parameter is of one stage: squares add up."""
        import torch

        mine = super().norm(trained)
        total = mine.detach().double().square()
        torch.distributed.all_reduce(total)
        return total.sqrt().to(mine.dtype)

    def clip(self, trained: Trained, limit: float) -> Any:
        return self.clip_by(trained, self.norm(trained), limit)

    @contextlib.contextmanager
    def marks(self, trained: Trained, enter: Enter) -> Iterator[None]:
        pipe = trained.model.pipe
        before, entered = pipe.tell, ["forward"]

        def tell(what: str, number: int) -> None:
            before(what, number)
            if what and entered[-1] != what:
                entered.append(what)
                enter(what)

        pipe.tell = tell
        enter("forward")
        try:
            yield
        finally:
            pipe.tell = before

    # ---- what is held ----

    def everywhere(self, trained: Trained) -> Mapping[str, Any]:
        return trained.model.cut.everywhere(trained.module)

    def fragments(self, trained: Trained, *, copies: bool = False) -> Iterator[Fragment]:
        """Each stage has all of its own parameters, and nobody else has."""
        named = [(n, p) for n, p in trained.module.named_parameters() if p.requires_grad]
        for index, (name, p) in enumerate(named):
            yield Fragment(name, index, 0, p.numel(), 0)

    def whole(self, trained: Trained, parameters: Sequence[Any]) -> Iterator[Any]:
        from strategies.engines.pipeline import joined

        return joined.whole(trained, parameters)

    def held(self, trained: Trained) -> Holdings:
        """torch keeps room for what every micro batch of a step receives."""
        found = super().held(trained)
        return found._replace(tensors={**found.tensors, "buckets": trained.model.pipe.received()})

    def save(self, trained: Trained, path: Path) -> None:
        from strategies.engines.pipeline import joined

        joined.save(trained, path)

    def load(self, trained: Trained, path: Path) -> None:
        from strategies.engines.pipeline import joined

        joined.load(trained, path)

    # ---- proof and prediction ----

    def observe(self, trained: Trained) -> contextlib.AbstractContextManager[Any]:
        from strategies.engines.pipeline import effects

        return effects.observe(trained)

    def unlike(self, launch: Launch) -> Sequence[int]:
        return range(self.stages)

    def standing_for(self, rank: int) -> Pipeline:
        settings = self.file.settings | {"rank": rank}
        return type(self)(dataclasses.replace(self.file, settings=settings))

    @property
    def chain(self) -> int:
        return self.stages

    def imitation(self) -> Imitation:
        from strategies.engines.pipeline.imitation import Lonely

        return Lonely(self.file.settings.get("rank", 0))

    def evidence(self, trained: Trained) -> dict[str, Any]:
        from strategies.engines.pipeline import effects

        return effects.evidence(trained, self)
