"""From a spec to everything that follows from it, checked, before any process starts.

The parent process and the worker both come through here, so that what is checked is what runs.
Nothing here imports torch (but a user's own model file may).
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass

from harness.data.caches.named import is_cache
from harness.data.feed import check_data
from harness.spec import Spec, SpecError
from harness.subjects import subject_of
from strategies import parse
from strategies.base import BadInput, Conflict, Settings
from strategies.engine import RunContext
from strategies.recipe import Recipe
from strategies.subject import DataFacts, Shaping, Subject


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A spec with its recipe, launch facts and sizes. ``refusal`` is why it will not be started."""

    spec: Spec
    recipe: Recipe
    launch: RunContext
    subject: Subject
    settings: Settings
    micro_batch: int
    refusal: str | None
    weights: str = ""
    """The file of its weights; empty where they are drawn."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What the machine must have: ops and types, as ``harness.system.probe`` looks for them."""
        parts = self.recipe.strategies
        return tuple(dict.fromkeys(n for part in parts for n in part.requires(self.launch)))

    @property
    def flops_per_step(self) -> int:
        """FLOPs of one training step of the whole job, or of a batch of drawn samples, for FLOP/s
        and MFU; 0: not counted.

        They are of the whole model with every weight trained. A part that freezes, adds or
        removes weights does other products, for which a wrong number is worse than none.
        """
        if "other_products" in self.launch.traits:
            return 0
        if self.spec.sampling:  # forward is a third of a training step
            calls = self.evaluations * (1 if self.spec.scale == 1 else 2)
            return self.subject.train_flops(self.spec.global_batch) * calls // 3
        return self.subject.train_flops(self.spec.global_batch)

    @property
    def evaluations(self) -> int:
        """Evaluations of the guided model that the sampler takes from noise to samples."""
        heun = self.spec.objective.partition(":")[0] == "flow"  # two calls a step
        return self.spec.drawn_steps * (2 if heun else 1)


def resolve(spec: Spec, facts: DataFacts | None = None) -> Resolved:
    """Check ``spec`` and derive the rest. ``facts`` are of its data, where they are known already:
    else all of it is checked.

    Raises:
        BadInput: (SpecError, RecipeError, Conflict) one line that names the
            thing and the way out.
    """
    spec.check()
    recipe = parse(spec.recipe, ema=spec.ema > 0, workload=spec.workload)
    if not spec.sampling:
        _check_average(spec)
    subject = subject_of(
        spec.model,
        facts or check_data(spec.data),
        objective=spec.objective,
        class_dropout=spec.class_dropout,
        shaping=shaping(spec),
    )
    subject, weights = _in_place(subject, spec, recipe)
    launch = recipe.launch(
        spec.device,
        spec.ranks,
        subject,
        clips=spec.grad_clip > 0,
        simulated=spec.world > 0,
        workload=spec.workload,
    )
    if spec.sampling:
        _check_sampling(spec, recipe, subject)
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
        micro_batch=spec.micro_batch(launch.layout.data, recipe.accumulation),
        refusal=recipe.refusal(launch),
        weights=weights,
    )


def _in_place(subject: Subject, spec: Spec, recipe: Recipe) -> tuple[Subject, str]:
    """The subject that runs, and the file of its weights: the spec's, unless a part of the recipe
    puts another in its place. One that cannot is refused by that part, with the reason."""
    for part in recipe.strategies:
        with contextlib.suppress(BadInput):
            found = part.stands_in(subject) if "sized" in subject.parts else None
            if found:
                return found
    return subject, spec.weights


def _check_sampling(spec: Spec, recipe: Recipe, subject: Subject) -> None:
    if subject.undrawn:
        raise SpecError(f"{subject.name} {subject.undrawn}; take a DiT, or a model of your own")
    if recipe.guides_apart and spec.scale == 1:
        raise Conflict(
            "cfg_scale is 1, which predicts once, but the recipe names 'guidance:how=sequential'; "
            "drop one of them"
        )


def shaping(spec: Spec) -> Shaping:
    """What a spec says of its model and samples beside their names."""
    given = {f.name: getattr(spec, f.name) for f in dataclasses.fields(Shaping)}
    kind = spec.data if is_cache(spec.data) else spec.data.partition(":")[0]
    return Shaping(**given | {"data": kind})


def _check_average(spec: Spec) -> None:
    named = [w for w in spec.recipe.split("+") if w.partition(":")[0] == "ema"]
    if spec.ema == 0 and named and named != ["ema:place=none"]:
        raise Conflict(
            f"ema is 0 (no average), but the recipe names {named[0]!r}; drop one of them"
        )


def run_name(spec: Spec) -> str:
    """The folder name of a run: readable first, unique by the spec's key."""
    words = spec.recipe.replace(":", "_").replace("=", "-").replace(",", "_").replace("/", "-")
    repeat = f"-r{spec.repeat}" if spec.repeat else ""
    world = f"-of{spec.world}" if spec.world else ""
    nodes = f"-on{spec.nodes}" if spec.nodes > 1 else ""
    return f"{words[:60]}{world}{nodes}{repeat}-{spec.key}"
