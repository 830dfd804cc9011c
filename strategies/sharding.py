"""Sharding strategies: one class per launch file in ``launch_configs/``.

A new YAML file, with the files that it names, adds a strategy without Python code, whose parameters
are those that the engine lets a recipe set (``Engine.choices``).

``NAME.yaml`` serves every device. ``NAME.cpu.yaml``, if present, serves machines without a GPU:
accelerate's GPU launch types train unconnected models there, without an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

from strategies import engines, users_launch
from strategies.base import Slot, demand
from strategies.engine import Engine, RunContext, TrainingRun
from strategies.launch_file import FOLDER, LaunchFileError, names
from strategies.strategy import Strategy
from strategies.workloads import SAMPLE


@dataclass(frozen=True, kw_only=True)
class Sharding(Strategy):
    """Sharding by the launch file of this name."""

    slot: ClassVar[Slot] = Slot.SHARD
    folder: ClassVar[Path] = FOLDER

    @classmethod
    def alike(cls) -> str:
        """Return the name of the sharding that makes the same groups of processes."""
        return cls.name

    @classmethod
    def engine(cls, device: str) -> Engine:
        """Return the engine of the launch file for ``device``: the CPU's own file if there is
        one."""
        special = cls.folder / f"{cls.name}.{device}.yaml"
        return engines.of_file(special if special.exists() else cls.folder / f"{cls.name}.yaml")

    @property
    def choices(self) -> dict[str, Any]:
        """Values of ``Engine.choices`` in this recipe."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that the engine itself runs in a step."""
        return self.choices.get("micro", 1)

    def __post_init__(self) -> None:
        if self.choices:
            self.engine("cuda").chosen(self.choices)

    def out_of_place(self, launch: RunContext) -> str | None:
        draws = launch.workload == SAMPLE and "one_process" in launch.engine.traits
        return None if draws else super().out_of_place(launch)

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return launch.engine.needs

    def refuses(self, launch: RunContext) -> str | None:
        return launch.engine.refuses(launch)

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        return launch.engine.accelerator_kwargs(launch)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        launch, accelerator = run.launch, run.accelerator
        kind, processes = accelerator.distributed_type.value, accelerator.num_processes
        wanted = launch.engine.file.kind
        demand(kind == wanted, f"accelerate runs {kind}, expected {wanted} as in the launch file")
        text = f"{processes} processes take part, expected {launch.processes}"
        demand(processes == launch.processes, text)
        return launch.engine.evidence(run)


class UsersSharding(Sharding):
    """Sharding by a user's own launch file, named ``@PATH`` in a recipe."""

    of_engine: ClassVar[Engine]

    @classmethod
    def engine(cls, device: str) -> Engine:
        file = cls.of_engine.file
        if device != "cpu" or (other := users_launch.on_cpu(file)) is file:
            return cls.of_engine
        return engines.ENGINES[other.kind].of(other)

    @classmethod
    def alike(cls) -> str:
        return cls.of_engine.usual_name


def users_kind(name: str) -> type[Sharding]:
    """Return the strategy of a recipe's word ``@PATH``.

    Raises:
        LaunchFileError: the file cannot be read, or its library refuses it.
    """
    path = Path(name[1:]).absolute()
    if odd := set(str(path)) & set("+:,= "):
        raise LaunchFileError(f"{path}: a recipe cannot name a path with {odd.pop()!r}; rename it")
    engine = engines.of_users_file(path)
    members = {"name": f"@{path}", "of_engine": engine, "source": str(engine.file.path)}
    return _kind("Users", UsersSharding, engine, members)


def sharding_kinds(folder: Path = FOLDER) -> dict[str, type[Sharding]]:
    """Return one strategy for each launch file, by its name."""
    return {name: sharding_kind(name, folder) for name in names(folder)}


def sharding_kind(name: str, folder: Path = FOLDER) -> type[Sharding]:
    """Return the strategy of the launch file ``NAME.yaml``."""
    engine = engines.of_file(folder / f"{name}.yaml")
    members = {"name": name, "folder": folder, "source": engine.file.source}
    return _kind(name, Sharding, engine, members)


def _kind(
    name: str, base: type[Sharding], engine: Engine, members: dict[str, Any]
) -> type[Sharding]:
    """Return a class of these members, whose fields are the engine's choices."""
    members |= {"__doc__": engine.file.title, "needs": engine.needs, "__module__": __name__}
    given = [(n, type(value), field(default=value)) for n, value in engine.choices.items()]
    return make_dataclass(name, given, bases=(base,), namespace=members, frozen=True, kw_only=True)
