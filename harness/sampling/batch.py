"""A batch of samples, drawn by the sampler of the objective: the loop of a sampling run.

Nothing of it knows a strategy but how the two halves of guidance are asked for. The noise and the
labels depend on the spec alone, so that rows draw the same samples. Shape suffixes: B samples,
C channels, H height, W width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from harness.resolve import Resolved
from harness.subjects.objectives import guided_by, objective_of
from harness.worker.setup import Building
from strategies.engine import NoOptimizer, Sampling, TrainingRun
from strategies.initial import keyed
from strategies.parallel.sequence.attention import Indices, join

NOISE = "noise of a batch of samples"


def labels_of(resolved: Resolved) -> Tensor:
    """int64 [B] on the CPU: every class in turn."""
    return torch.arange(resolved.spec.global_batch) % resolved.subject.data.classes


def noise_of(resolved: Resolved) -> Tensor:
    """float32 [B, C, H, W] on the CPU, the same on every machine."""
    shape = (resolved.spec.global_batch, *resolved.subject.data.sample_shape)
    return torch.randn(shape, generator=keyed(resolved.spec.seed, NOISE))


@dataclass(kw_only=True)
class Drawing:
    """One rank's sampler; ranks that share samples have each all of their noise, and draw the same.
    ``calls`` are the samples of each call of the model in the last
    batch, ``drawn`` what it gave, and ``began`` a hash of what its first call was given;
    ``indices`` are where ranks' parts of a prediction lie in it."""

    resolved: Resolved
    trained: TrainingRun
    labels_B: Tensor
    noise_BCHW: Tensor
    calls: list[int] = field(default_factory=list)
    drawn: Tensor | None = None
    began: str = ""
    indices: Indices = field(default_factory=dict)

    @classmethod
    def of(cls, resolved: Resolved, trained: TrainingRun) -> Drawing:
        """Labels and noise on the run's device."""
        device = trained.accelerator.device
        labels, noise = labels_of(resolved).to(device), noise_of(resolved).to(device)
        return cls(resolved=resolved, trained=trained, labels_B=labels, noise_BCHW=noise)

    def batch(self, noise_BCHW: Tensor | None = None, *, first: int | None = None) -> Tensor:
        """Samples [B, C, H, W] float32: of all labels, or of the ``first`` alone.

        Args:
            noise_BCHW: what they are drawn from; the spec's where it is None.
        """
        spec, trained = self.resolved.spec, self.trained
        noise = (self.noise_BCHW if noise_BCHW is None else noise_BCHW)[:first]
        self.calls.clear()
        # Not in inference mode: there a trace sees whole layers, and not what these allocate.
        with torch.no_grad():
            predict = guided_by(
                self._ask,
                {"y": self.labels_B[:first]},
                spec.scale,
                self.resolved.subject.data.channels,
                apart=self.resolved.recipe.guides_apart,
            )
            generator = torch.Generator(noise.device).manual_seed(spec.seed)
            drawn = objective_of(spec.objective).sample(
                predict, noise, steps=spec.drawn_steps, generator=generator
            )
        trained.optimizer_steps += 1
        for attachment in trained.attached.values():
            attachment.after_step()
        return drawn

    def _ask(self, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        self.trained.micro_steps += 1
        self.calls.append(len(x))
        if self.began == "unseen":
            self.began = digest(x[: len(self.labels_B)])
        trained = self.trained
        out = trained.subject.predict(trained.model, trained.cut(x), t_B, conditions)
        if trained.launch.layout.sequence > 1:
            out = join(trained, out, x, self.indices)
        return out.float()  # the two halves are far larger than their difference

    def step(self) -> None:
        """A whole batch, kept until the next begins."""
        self.drawn = None
        self.drawn = self.batch()

    def watched_step(self) -> None:
        """The same, with a look at what it is drawn from: in no timed step."""
        self.began = "unseen"
        self.step()

    def moved(self) -> Tensor:
        """The noise with the last bit of each number moved, up or down by chance."""
        noise = self.noise_BCHW.cpu()
        up = torch.rand(noise.shape, generator=keyed(self.resolved.spec.seed, "up")) < 0.5
        ends = torch.where(up, torch.inf, -torch.inf)
        return torch.nextafter(noise, ends).to(self.noise_BCHW.device)


def digest(tensor: Tensor) -> str:
    """A short hash of float32 values."""
    values = tensor.detach().float().cpu().contiguous().numpy().astype("<f4")
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


# ---- prepare ----
# From a resolved spec to a model that draws samples: the only place where one is made.


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
    trained = TrainingRun(
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
