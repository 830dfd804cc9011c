"""From a resolved spec to a model that draws samples: the only place where one is made."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator

from harness.resolve import Resolved
from harness.worker.building import Building
from harness.worker.drawing.batch import Drawing
from strategies.engine import NoOptimizer, Sampling, Trained

__all__ = ["prepare"]


def prepare(
    resolved: Resolved, accelerator: Accelerator, enter: Callable[[str], None]
) -> tuple[Drawing, Building]:
    """Build, edit, fill, prepare and attach, in slot order, with nothing that trains.

    Args:
        enter: told when the phases load and prepare begin.
    """
    recipe, launch, spec = resolved.recipe, resolved.launch, resolved.spec
    enter("load")
    building = Building(resolved)
    building.edit()
    module = building.finish(accelerator).requires_grad_(False).eval()
    enter("prepare")
    for part in recipe.strategies:
        part.configure(accelerator, module, launch)
    trained = Trained(
        accelerator=accelerator,
        model=launch.engine.prepare_to_sample(accelerator, module),
        module=module,
        optimizer=NoOptimizer(),
        launch=launch,
        settings=resolved.settings,
        attached={},
        sampling=Sampling(
            samples=spec.global_batch, evaluations=resolved.evaluations, guidance=spec.scale
        ),
    )
    for part in recipe.strategies:
        attachment = part.attach(trained)
        if attachment is not None:
            trained.attached[part.name] = attachment
    launch.engine.ready(trained)
    return Drawing.of(resolved, trained), building
