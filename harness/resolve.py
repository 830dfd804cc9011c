"""From a spec to everything that follows from it, checked, before any process starts.

The parent process and the worker both come through here, so that what is checked is what runs.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness import data, presets
from harness.spec import Spec, SpecError
from strategies import parse, sharding
from strategies.base import Conflict, Launch, Settings
from strategies.recipe import Recipe

__all__ = ["Resolved", "project_root", "resolve", "run_name"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A spec with its recipe, launch facts and sizes. ``refusal`` is why it will not be started."""

    spec: Spec
    recipe: Recipe
    launch: Launch
    file: sharding.LaunchFile
    shape: presets.Shape
    facts: data.DataFacts
    settings: Settings
    micro_batch: int
    refusal: str | None

    @property
    def needs(self) -> tuple[str, ...]:
        """What the machine must have: ops and types, named as ``harness.doctor`` probes them."""
        parts = self.recipe.strategies
        return tuple(dict.fromkeys(n for part in parts for n in part.requires(self.launch)))

    @property
    def learn_sigma(self) -> bool:
        """Whether the model predicts the variance too: the epsilon objective's second half."""
        return self.spec.objective == "epsilon"

    @property
    def parameters(self) -> int:
        """Parameters of the model, the frozen position table included."""
        return presets.parameter_count(
            self.shape,
            input_size=self.facts.input_size,
            channels=self.facts.channels,
            classes=self.facts.classes,
            learn_sigma=self.learn_sigma,
        )

    @property
    def flops_per_step(self) -> int:
        """FLOPs of one training step of the whole job, for FLOP/s and MFU; 0: not counted.

        The closed form is of the whole model with every weight trained. A part that freezes,
        adds or removes weights does other products, for which a wrong number is worse than none.
        """
        if "other_products" in self.launch.traits:
            return 0
        return presets.train_flops(
            self.shape,
            input_size=self.facts.input_size,
            channels=self.facts.channels,
            batch=self.spec.global_batch,
            learn_sigma=self.learn_sigma,
        )


def resolve(spec: Spec) -> Resolved:
    """Check ``spec`` and derive the rest.

    Raises:
        BadInput: (SpecError, RecipeError, Conflict, LaunchFileError) one line that names the
            thing and the way out.
    """
    spec.check()
    recipe = parse(spec.recipe, ema=spec.ema > 0)
    _check_average(spec, recipe)
    shape, facts = presets.shape_of(spec.model), data.check_data(spec.data)
    if facts.input_size % shape.patch_size:
        raise SpecError(
            f"model {spec.model} has patches of {shape.patch_size}, which do not tile "
            f"{facts.input_size}x{facts.input_size} latents of {spec.data}"
        )
    launch = recipe.launch(
        spec.device, spec.ranks, clips=spec.grad_clip > 0, simulated=spec.world > 0
    )
    return Resolved(
        spec=spec,
        recipe=recipe,
        launch=launch,
        file=sharding.read(recipe.sharding.path(spec.device)),
        shape=shape,
        facts=facts,
        settings=Settings(
            learning_rate=spec.learning_rate,
            betas=(0.9, spec.beta2),
            weight_decay=spec.weight_decay,
            grad_clip=spec.grad_clip,
            ema_decay=spec.ema,
        ),
        micro_batch=spec.micro_batch(recipe.accumulation),
        refusal=recipe.refusal(launch),
    )


def _check_average(spec: Spec, recipe: Recipe) -> None:
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
    return f"{words[:60]}{world}{repeat}-{spec.key}"


def project_root() -> Path:
    """The repository's root: the folder that commands are started from."""
    return Path(__file__).resolve().parent.parent
