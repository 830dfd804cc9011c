"""Resolve a spec: check it and derive recipe, launch settings and sizes before any process starts.

The parent process and the worker both call it, so the checked run is the run that starts. It does
not import torch, although a user's own model file may.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from harness.spec import Spec, SpecError
from harness.subjects import subject_of
from harness.subjects.own_module import is_file
from strategies import parse
from strategies.base import Conflict, Reason, Settings
from strategies.engine import RunContext
from strategies.recipe import Recipe
from strategies.subject import DataFacts, Shaping, Subject


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A spec with its recipe, launch facts and sizes. ``refusal`` is the reason not to start it."""

    spec: Spec
    recipe: Recipe
    launch: RunContext
    subject: Subject
    settings: Settings
    micro_batch: int
    refusal: Reason | None
    weights: str = ""
    """File of the initial weights; empty if they are sampled."""
    offline: ClassVar[bool] = True
    """Whether the worker may not download from a model hub."""

    @property
    def runs_users_code(self) -> bool:
        """Return whether code of the user's decides the run (``opened.inputs``)."""
        return is_file(self.spec.model)

    def words(self, out: str) -> list[str]:
        """Return the words that start a worker by ``accelerate launch`` in the folder ``out``."""
        return ["-m", "harness.train", *self.spec.arguments(), "--out", out]

    @property
    def own_model(self) -> str:
        """Return the model's name if a user's file defines it; else empty."""
        return self.spec.model if is_file(self.spec.model) else ""

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the required ops and types, by the names of ``harness.system.probe``."""
        parts = self.recipe.strategies
        asked = [need for part in parts for need in part.requires(self.launch)]
        return tuple(dict.fromkeys([*asked, *self.subject.needs]))

    @property
    def flops_per_step(self) -> int:
        """FLOPs of one training step of the whole job, or of one sampled batch; 0 if not counted.

        A part that freezes, adds or removes weights has other products than the whole model's.
        """
        if "other_products" in self.launch.traits:
            return 0
        forward = self.subject.survey.flops * self.spec.global_batch
        if self.spec.sampling:
            calls = self.evaluations * (1 if self.spec.scale == 1 else 2)
            return forward * calls
        # Without what a strategy repeats: PaLM's MFU convention (arXiv:2204.02311, appendix B).
        return 3 * forward

    @property
    def evaluations(self) -> int:
        heun = self.spec.objective == "flow"  # two evaluations per step
        return self.spec.drawn_steps * (2 if heun else 1)


def resolve(spec: Spec, facts: DataFacts | None = None, *, whole: bool = True) -> Resolved:
    """Check ``spec`` and derive the rest. ``facts`` describe its data, if they are known already.

    Unless ``whole``, a batch that does not divide is the row's refusal and no error. A BadInput
    (SpecError, RecipeError, Conflict) names the error and a remedy.
    """
    from harness.data.feed import check_data

    spec.check()
    recipe = parse(spec.recipe, ema=spec.ema > 0, workload=spec.workload)
    named = [word for word in spec.recipe.split("+") if word.partition(":")[0] == "ema"]
    if not spec.sampling and spec.ema == 0 and named and named != ["ema:place=none"]:
        text = f"ema is 0 (no average), but the recipe names {named[0]!r}"
        raise Conflict(f"{text}; drop one of them")
    subject = subject_of(
        spec.model,
        facts or check_data(spec.data),
        objective=spec.objective,
        class_dropout=spec.class_dropout,
        shaping=shaping(spec),
    )
    launch = recipe.launch(
        spec.device,
        spec.processes,
        subject,
        clips=spec.grad_clip > 0,
        workload=spec.workload,
    )
    if spec.sampling and subject.brings_samples:
        raise SpecError(
            f"{subject.name} takes conditions of its own (texts), which sampling does not make; "
            "take a DiT, or a model of your own"
        )
    micro_batch, uneven = 1, None
    try:
        micro_batch = spec.micro_batch(launch.layout.data, recipe.accumulation)
    except SpecError as error:
        if whole:
            raise
        text, _, hint = str(error).partition("; ")
        uneven = Reason(text, hint)
    if micro_batch > 1 and subject.one_at_a_time:
        text = f"micro-batch is {micro_batch}, and a forward of {subject.name} takes one sample"
        way = f"add accumulate:steps={micro_batch * recipe.accumulation}"
        uneven = Reason(f"{text}, because it has one time", way)
    return Resolved(
        spec=spec,
        recipe=recipe,
        launch=launch,
        subject=subject,
        settings=Settings(
            learning_rate=spec.learning_rate,
            betas=(0.9, spec.beta2),
            weight_decay=spec.weight_decay,
            grad_clip=spec.grad_clip,
            ema_decay=spec.ema,
        ),
        micro_batch=micro_batch,
        refusal=recipe.refusal(launch) or uneven,
        weights=spec.weights,
    )


def shaping(spec: Spec) -> Shaping:
    given = {f.name: getattr(spec, f.name) for f in dataclasses.fields(Shaping)}
    return Shaping(**given | {"data": spec.data.partition(":")[0]})


def run_name(spec: Spec) -> str:
    """Return the folder name of a run: readable first, unique by the spec's key."""
    words = spec.recipe.replace(":", "_").replace("=", "-").replace(",", "_").replace("/", "-")
    repeat = f"-r{spec.repeat}" if spec.repeat else ""
    nodes = f"-on{spec.nodes}" if spec.nodes > 1 else ""
    return f"{words[:60]}{nodes}{repeat}-{spec.key}"
