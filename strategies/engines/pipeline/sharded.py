"""A pipeline whose stages are sharded: the ranks that have the same stage, each of other samples,
share its parameters, gradients and optimizer state by FSDP2, each block by itself.

The launch file says so by a block of FSDP's beside the pipeline's. How a stage is sharded, and
when its gradients are reduced, stands in ``shards``; what shows it in ``shards_effects``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.engine import Imitation
from strategies.engines.fsdp.engine import WRAPPED, Fsdp
from strategies.engines.fsdp.rows import Rows
from strategies.engines.pipeline.engine import Pipeline, in_file
from strategies.holdings import Fragment
from strategies.launch_file import LaunchFile, LaunchFileError
from strategies.layout import Layout

if TYPE_CHECKING:
    from strategies.engine import Launch, Trained
    from strategies.initial import Draw

__all__ = ["Sharded", "named"]

BLOCK = "fsdp_config"


def named(file: LaunchFile) -> type[Pipeline] | None:
    """The kind of pipeline that a launch file names beside its distributed type, if it does."""
    if not in_file(file):
        return None
    return Sharded if BLOCK in file.content else Pipeline


class Sharded(Pipeline, Rows):
    """Stages of a pipeline that ranks share, as torch's ``fully_shard`` cuts them."""

    modules: ClassVar[tuple[str, ...]] = (*Pipeline.modules, *Fsdp.modules)
    hybrid: ClassVar[bool] = False
    offloads: ClassVar[bool] = False
    """What ``fully_shard`` can do beside, and does not here."""

    @classmethod
    def of(cls, file: LaunchFile) -> Pipeline:
        block = file.content[BLOCK]
        for key, value in {"fsdp_version": 2, "fsdp_auto_wrap_policy": WRAPPED}.items():
            if block.get(key) != value:
                raise LaunchFileError(
                    f"{file.path}: {BLOCK} says {key} {block.get(key)!r}; write {value}"
                )
        reshard = block.get("fsdp_reshard_after_forward", False)
        made = super().of(file)
        return cls(_with(made.file, reshard=reshard))

    # ---- facts ----

    @property
    def reshard(self) -> bool:
        """Whether a block's gathered weights are freed behind each use, or kept for all micro
        batches of a step."""
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

    def _ranks(self, launch: Launch) -> str | None:
        fault = super()._ranks(launch)
        if fault is None and launch.processes == self.stages:
            more = f"--processes {2 * self.stages} or another multiple of {self.stages}"
            return f"each stage has one rank, and nobody to share it with; use {more}, or pp"
        return fault

    def _parts(self, launch: Launch) -> str | None:
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
        """The optimizer is made for the sharded parameters, which take the place of others."""
        from strategies.engines.pipeline import shards

        model = shards.shard(self, accelerator, module, blocks)
        optimizer = make_optimizer([p for p in module.parameters() if p.requires_grad])
        model = accelerator.prepare_model(model, evaluation_mode=True)
        return model, accelerator.prepare_optimizer(optimizer)

    def ready(self, trained: Trained) -> None:
        from strategies.engines.pipeline import shards, staged

        pipe = staged.Pipe(trained.model, self.schedule, self.micro, shards.Reducing)
        trained.model.pipe = pipe

    # ---- one optimizer step ----

    def average(self, trained: Trained) -> None:
        """torch's reductions have done it, but for what all stages have."""
        from strategies.engines.pipeline import shared

        shared.added_up(trained, 1)

    # ---- what is held ----

    def fragments(self, trained: Trained, *, copies: bool = False) -> Iterator[Fragment]:
        tells = trained.model.cut.tells
        for fragment in Rows.fragments(self, trained, copies=copies):
            if copies or tells(fragment.name):
                yield fragment

    # ---- proof and prediction ----

    def observe(self, trained: Trained) -> contextlib.AbstractContextManager[Any]:
        from strategies.engines.pipeline import shards_effects

        return shards_effects.observe(trained)

    def shown_alike(self, trained: Trained) -> dict[str, Any]:
        from strategies.engines.pipeline import shards_effects

        return shards_effects.evidence(trained)

    def imitation(self) -> Imitation:
        from strategies.engines.pipeline.imitation import Sharing

        return Sharing(self, self.file.settings.get("rank", 0))


def _with(file: LaunchFile, **settings: Any) -> LaunchFile:
    return dataclasses.replace(file, settings=file.settings | settings)
