"""Sharding: who holds which parameters, gradients and optimizer state. Its launch file says so.

A sharding strategy *is* its file in ``launch_configs/``, which names an engine
(``strategies.engines``). Adding one adds a YAML (and what it names), no Python. What an engine lets
a recipe choose beside its file (``Engine.choices``) are the strategy's parameters.

``NAME.yaml`` serves every device; where ``NAME.cpu.yaml`` lies beside it, that one serves
machines without a GPU (accelerate's GPU launch types silently train unconnected models there).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from strategies import engines
from strategies.base import Parity, Slot, demand
from strategies.engine import STEP_PHASES, Engine, RunContext, TrainingRun
from strategies.evidence.rules import label
from strategies.launch_file import FOLDER, names
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import SAMPLE

EIGHT_BITS = 2.0**-8
"""Unit roundoff of a code of 8 bits, of the largest of its block."""


@dataclass(frozen=True, kw_only=True)
class Sharding(Strategy):
    """Whatever the launch file of this name says."""

    slot: ClassVar[Slot] = Slot.SHARD
    folder: ClassVar[Path] = FOLDER

    @classmethod
    def engine(cls, device: str) -> Engine:
        """What the launch file for ``device`` names: the CPU's own where there is one."""
        special = cls.folder / f"{cls.name}.{device}.yaml"
        return engines.of_file(special if special.exists() else cls.folder / f"{cls.name}.yaml")

    @classmethod
    def launch(cls, device: str, processes: int, subject: Subject) -> RunContext:
        """A launch of ``subject`` by that file."""
        engine = cls.engine(device)
        return RunContext(
            sharding=cls.name,
            engine=engine,
            subject=subject,
            device=device,
            processes=processes,
            traits=engine.traits,
        )

    @property
    def choices(self) -> dict[str, Any]:
        """The recipe's values of ``Engine.choices``."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def micro_batches(self) -> int:
        """Micro batches that the engine runs in a step by itself."""
        return self.choices.get("micro", 1)

    def __post_init__(self) -> None:
        if self.choices:
            self.engine("cuda").chosen(self.choices)

    def out_of_place(self, launch: RunContext) -> str | None:
        alone = "one_process" in launch.engine.traits
        together = "replicas" in launch.engine.traits and "cut_samples" in launch.traits
        draws = launch.workload == SAMPLE and (alone or together)
        return None if draws else super().out_of_place(launch)

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return launch.engine.needs

    def refuses(self, launch: RunContext) -> str | None:
        return launch.engine.refuses(launch)

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        return launch.engine.accelerator_kwargs(launch)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        launch, accelerator = trained.launch, trained.accelerator
        kind, processes = accelerator.distributed_type.value, accelerator.num_processes
        wanted = launch.engine.file.kind
        demand(kind == wanted, f"accelerate runs {kind}, the launch file says {wanted}")
        demand(
            processes == launch.processes,
            f"{processes} processes share the work, {launch.processes} were asked for",
        )
        facts = {"distributed_type": kind, "processes": processes}
        if trained.observed is not None and trained.observed.sent:
            sent = {phase: trained.observed.sent_in(phase) for phase in STEP_PHASES}
            facts["sent_bytes"] = {phase: found for phase, found in sent.items() if found}
        return label({**facts, **launch.engine.evidence(trained)}, "distributed_type")


def sharding_kinds(folder: Path = FOLDER) -> dict[str, type[Sharding]]:
    """One strategy a launch file, named after it."""
    return {name: sharding_kind(name, folder) for name in names(folder)}


def sharding_kind(name: str, folder: Path = FOLDER) -> type[Sharding]:
    """The strategy of the launch file ``NAME.yaml``."""
    engine = engines.of_file(folder / f"{name}.yaml")
    members = {"name": name, "folder": folder, "__doc__": engine.file.title}
    members |= {"source": engine.file.source, "needs": engine.needs, "__module__": __name__}
    if "rounded_gathers" in engine.traits:
        members |= {"parity": Parity.BY_DESIGN, "alters": ("rounding",), "unit": EIGHT_BITS}
    given = [(n, type(value), field(default=value)) for n, value in engine.choices.items()]
    return make_dataclass(
        name, given, bases=(Sharding,), namespace=members, frozen=True, kw_only=True
    )
