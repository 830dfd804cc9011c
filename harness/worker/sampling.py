"""The loop of a sampling run: the objective's sampler draws a batch of samples.

The loop depends on no strategy. Noise and
labels depend on the spec alone, so all rows draw the same samples. Shape suffixes: B samples, C
channels, H height, W width.
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
from harness.subjects.objectives import guided, objective_of
from harness.worker.setup import Building, attach
from strategies.engine import NoOptimizer, TrainingRun
from strategies.initial import keyed
from strategies.parallel.sequence.attention import Indices, join

NOISE = "noise of a batch of samples"


def labels_of(resolved: Resolved) -> Tensor:
    """Return int64 [B] on the CPU: every class in turn."""
    return torch.arange(resolved.spec.global_batch) % resolved.subject.data.classes


def noise_of(resolved: Resolved) -> Tensor:
    """Return float32 [B, C, H, W] on the CPU, equal on every machine."""
    shape = (resolved.spec.global_batch, *resolved.subject.data.sample_shape)
    return torch.randn(shape, generator=keyed(resolved.spec.seed, NOISE))


@dataclass(kw_only=True)
class Drawing:
    """One rank's sampler. Ranks that share samples each have all of the noise, and draw the same.

    ``calls``: samples of each call of the model in the last batch. ``drawn``: its output.
    ``began``: a hash of the first call's input. ``indices``: positions of the ranks' parts in
    an output.
    """

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
        """Create labels and noise on the run's device."""
        device = trained.accelerator.device
        labels, noise = labels_of(resolved).to(device), noise_of(resolved).to(device)
        return cls(resolved=resolved, trained=trained, labels_B=labels, noise_BCHW=noise)

    def batch(self, noise_BCHW: Tensor | None = None) -> Tensor:
        """Return samples [B, C, H, W] in float32, for all labels.

        Args:
            noise_BCHW: the initial noise; the spec's if None.
        """
        spec, trained = self.resolved.spec, self.trained
        noise = self.noise_BCHW if noise_BCHW is None else noise_BCHW
        self.calls.clear()
        # No inference mode: a trace would see whole layers, without their allocations.
        with torch.no_grad():
            predict = guided(
                self._ask,
                {"y": self.labels_B},
                spec.scale,
                self.resolved.subject.data.channels,
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
        """Draw a whole batch, and keep it until the next one starts."""
        self.drawn = None
        self.drawn = self.batch()

    def watched_step(self) -> None:
        """Draw a batch and record a hash of its input; never in a timed step."""
        self.began = "unseen"
        self.step()


def digest(tensor: Tensor) -> str:
    """Return a short hash of float32 values."""
    values = tensor.detach().float().cpu().contiguous().numpy().astype("<f4")
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


# ---- preparation ----


def prepare(
    resolved: Resolved, accelerator: Accelerator, enter: Callable[[str], None]
) -> tuple[Drawing, Building]:
    """Build, edit, fill, prepare and attach the model, in slot order, without training parts.

    Args:
        enter: called when the phases load and prepare start.
    """
    recipe, launch = resolved.recipe, resolved.launch
    enter("load")
    building = Building(resolved)
    building.edit()
    module = building.finish(accelerator).requires_grad_(False).eval()
    enter("prepare")
    for part in recipe.strategies:
        part.configure(accelerator, module, launch)
    trained = TrainingRun(
        accelerator=accelerator,
        model=accelerator.prepare_model(module, evaluation_mode=True),
        module=module,
        optimizer=NoOptimizer(),
        launch=launch,
        settings=resolved.settings,
        attached={},
        sampling=True,
    )
    attach(trained, recipe.strategies)
    return Drawing.of(resolved, trained), building
