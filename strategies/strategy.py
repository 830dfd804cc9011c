"""The contract of a strategy: one technique, the place it fills, and how it proves itself.

A strategy imports torch only inside the methods that touch tensors, so that a recipe can be
parsed, refused and listed in milliseconds and on a machine without torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Attachment, Parity, Settings, Slot
from strategies.engine import RunContext, TrainingRun
from strategies.subject import Subject
from strategies.workloads import TRAIN, out_of_place

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One technique. Fields are its parameters; the text form is ``name:field=value,...``."""

    name: ClassVar[str]
    slot: ClassVar[Slot]
    parity: ClassVar[Parity] = Parity.EXACT
    alters: ClassVar[tuple[str, ...]] = ()
    """What of a step it changes by design, in words of ALTERS; nothing where it is exact."""
    unit: ClassVar[float] = 0.0
    """Unit roundoff of the type that it rounds to, where it alters "rounding"."""
    source: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    reads_weights: ClassVar[bool] = False
    """Whether ``edit_model`` reads or writes values of weights: the whole model is then drawn, in
    host memory, before it is called. Else it may be called when they are not there yet."""

    scaffold: ClassVar[tuple[str, ...]] = ()
    """How the names of parameters begin that it puts into the model for the training alone: they
    are not saved with the model's weights."""

    workloads: ClassVar[tuple[str, ...]] = (TRAIN,)
    """Where it has an effect (``strategies.workloads``); elsewhere it is refused."""
    idle: ClassVar[str] = ""
    """Why it has none in the other workload, and the way out, where its slot does not say it."""

    plainest: ClassVar[str] = ""
    """Its text with the least of parameters, where its name alone is refused."""

    def out_of_place(self, launch: RunContext) -> str | None:
        """Why it makes no sense in this workload, with the way out; None where it does."""
        if launch.workload in self.workloads:
            return None
        return self.idle or out_of_place(self.slot, launch.workload)

    def traits(self) -> frozenset[str]:
        """What other parts may have to know of this one; the words are listed in TRAITS."""
        return frozenset()

    def promise(self) -> Parity:
        """The parity of this strategy with these parameters."""
        return self.parity

    def reads(self) -> tuple[str, ...]:
        """Files, from the repository's root, whose contents decide what it does."""
        return ()

    def stands_in(self, subject: Subject) -> tuple[Subject, str] | None:
        """The subject that takes the place of the one that a spec names, and the file of its
        weights, empty where they are drawn; None where nothing does.

        Raises:
            BadInput: there is no such subject; ``refuses`` says so too.
        """
        return None

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        """What the machine must have: words of ``harness.system.requirements``."""
        return self.needs

    def refuses(self, launch: RunContext) -> str | None:
        """Why this strategy cannot run under ``launch``, with the way out; None if it can."""
        return None

    def by_block(self, depth: int) -> Sequence[Hashable]:
        """How it treats each of the model's ``depth`` blocks, in the order in which they run: those
        of equal values are treated alike. By default all are.

        A deep model is predicted from shallow ones only where all blocks of all of them are treated
        alike (``harness.planner.tracing.extend``), so override this where some blocks are not.
        """
        return [None] * depth

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        """Keyword arguments for ``Accelerator``; a key that two strategies set is a Conflict."""
        return {}

    def configure(self, accelerator: Any, module: nn.Module, launch: RunContext) -> None:
        """Settle what the engine's config left open, once every part has edited the model."""

    def edit_model(self, module: nn.Module, subject: Subject) -> None:
        """Change the bare model of ``subject`` in place, before prepare. Unless ``reads_weights``
        its parameters may still be on meta, waiting for their values (``strategies.initial``):
        freeze them, give them a type, move them to other modules, but do not copy or read them."""

    def make_optimizer(
        self, params: list[nn.Parameter], settings: Settings, launch: RunContext
    ) -> torch.optim.Optimizer | None:
        """The optimizer, from the one strategy whose place it is."""
        return None

    def attach(self, trained: TrainingRun) -> Attachment | None:
        """State to keep beside the model, made after prepare."""
        return None

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        """A context for one untimed step behind the measured ones: what it yields is kept as
        ``trained.observed.notes[name]``, for ``evidence`` to read. Training runs have no such step.
        """
        return nullcontext()

    def note(self, trained: TrainingRun) -> Any | None:
        """What this part's ``observe`` noted; None where no step was observed."""
        return None if trained.observed is None else trained.observed.notes.get(self.name)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        """Facts read back that show the effect; raise NotInForce where it is missing. A fact that
        is only a setting is labelled so (``strategies.evidence.rules``)."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Text form, defaults left out, so that equal strategies have equal text."""
        given = [
            f"{f.name}={spelled(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return self.name + (":" + ",".join(given) if given else "")


def spelled(value: Any) -> str:
    """A parameter's value as a recipe spells it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
