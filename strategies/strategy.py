"""Strategy contract: one technique, its slot, and the evidence of its effect.

A strategy imports torch only inside methods that touch tensors. A recipe is thus parsed, refused
and listed in milliseconds, and on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from strategies import conflicts
from strategies.base import Attachment, Settings, Slot
from strategies.engine import RunContext, TrainingRun
from strategies.subject import Subject
from strategies.workloads import TRAIN

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One technique. Fields are its parameters; the text form is ``name:field=value,...``."""

    name: ClassVar[str]
    slot: ClassVar[Slot]
    alters: ClassVar[tuple[str, ...]] = ()
    """Effects on a step by design, as names in ALTERS; empty if it is exact."""
    unit: ClassVar[float] = 0.0
    """Unit roundoff of the type that it rounds to, if it alters "rounding"."""
    source: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    reads_weights: ClassVar[bool] = False
    """``edit_model`` reads or writes weight values: the whole model is drawn on the host first."""

    workloads: ClassVar[tuple[str, ...]] = (TRAIN,)
    """Workloads in which it has an effect (``strategies.workloads``); it is refused in others."""
    idle: ClassVar[str] = ""
    """Reason and remedy for the other workload, if the slot's own reason does not apply."""

    values: ClassVar[Mapping[str, Iterable[str]]] = {}
    """Parameter -> its possible values."""
    least: ClassVar[Mapping[str, int]] = {}
    """Parameter -> the least of its whole numbers; its default may be another."""
    ranges: ClassVar[Mapping[str, tuple[Callable[[Any], bool], str]]] = {}
    """Parameter -> test of a value, and words for those that pass."""

    def __post_init__(self) -> None:
        for name, allowed in self.values.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {value!r}; one of {', '.join(allowed)}")
        for name, least in self.least.items():
            value, usual = getattr(self, name), getattr(type(self), name)
            if value != usual and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name} is {value!r}; a whole number from {least}")
        for name, (fits, words) in self.ranges.items():
            if not fits(value := getattr(self, name)):
                raise ValueError(f"{name} is {value!r}; {words}")

    def out_of_place(self, launch: RunContext) -> str | None:
        """Return why it makes no sense in this workload, with the remedy; None if it does."""
        if launch.workload in self.workloads:
            return None
        return self.idle or conflicts.out_of_place(self.slot, launch.workload)

    def traits(self) -> frozenset[str]:
        """Return its traits, which other parts may refuse (``conflicts.yaml``)."""
        return frozenset()

    def reads(self) -> tuple[str, ...]:
        """Return files, relative to the repository's root, whose contents decide what it does."""
        return ()

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        """Return requirements of the machine, as names in ``harness.system.requirements``."""
        return self.needs

    def refuses(self, launch: RunContext) -> str | None:
        """Return why it cannot run under ``launch``, with the remedy; None if it can.

        The default reads ``conflicts.yaml``. A strategy adds what its own parameters or the model
        leave impossible.
        """
        return conflicts.refusal(self, launch)

    def by_block(self, depth: int) -> Sequence[Hashable]:
        """Return a key for each of the model's ``depth`` blocks, in execution order: those with
        equal keys are treated alike."""
        return [None] * depth

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        """Return keyword arguments for ``Accelerator``; a key that two strategies set is a
        Conflict."""
        return {}

    def configure(self, accelerator: Any, module: nn.Module, launch: RunContext) -> None:
        """Set what the engine's config leaves open, after every part has edited the model."""

    def edit_model(self, module: nn.Module, subject: Subject) -> None:
        """Change the bare model of ``subject`` in place, before prepare.

        Unless ``reads_weights``, its parameters may have no values yet (``strategies.initial``):
        freeze, cast or move them, but do not copy or read them.
        """

    def make_optimizer(
        self, params: list[nn.Parameter], settings: Settings, launch: RunContext
    ) -> torch.optim.Optimizer | None:
        """Return the optimizer; only the strategy in the optimizer slot does."""
        return None

    def attach(self, run: TrainingRun) -> Attachment | None:
        """Return state to keep with the model, made after prepare."""
        return None

    def observe(self, run: TrainingRun) -> AbstractContextManager[Any]:
        """Return a context for the observed step, whose value ``note`` returns to ``evidence``.
        Training runs have no such step."""
        return nullcontext()

    def note(self, run: TrainingRun) -> Any | None:
        """Return the value of this part's ``observe``; None if no step was observed."""
        return run.observed.notes.get(self.name)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return facts read back that show the effect; raise NotInForce if it is missing.

        A fact that is only a setting is labelled so (``strategies.evidence.rules``).
        """
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text form without defaults, so that equal strategies have equal text."""
        given = [
            f"{f.name}={spelled(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(given) if given else "")


def spelled(value: Any) -> str:
    """Return a parameter's value as a recipe spells it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
