"""Plain training: checkpoints on the way, samples from the averaged weights at the end."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.launch.checkpoints import terms
from harness.resolve import Resolved
from harness.subjects.guidance import guided
from harness.worker import checkpoint, grid, setup
from harness.worker.loop import Log, Run
from strategies.adapters import files
from strategies.base import BadInput, Slot
from strategies.step.ema import Average

__all__ = ["Training", "add_arguments", "from_options"]

COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a training run does beside training.

    ``folder`` None keeps no checkpoint; ``trust`` resumes also what somebody else saved, whose load
    may run their code. ``averaged`` is where the averaged weights go, for a run that draws samples
    (``--weights``).
    """

    folder: Path | None
    save_every: int = 500
    resume: bool = False
    trust: bool = False
    samples: Path | None = None
    trained: Path | None = None
    averaged: Path | None = None
    sample_steps: int = 25
    guidance: float = 2.0

    def begin(self, run: Run, resolved: Resolved, log: Log) -> None:
        """Go on from the newest checkpoint, if asked to and there is one."""
        newest = checkpoint.latest(self.folder) if self.folder and self.resume else None
        if newest is not None:
            facts = checkpoint.restore(run.trained, newest, terms(resolved), trust=self.trust)
            log.earlier, log.earlier_norms = facts["losses"], facts["grad_norms"]
            if facts["step"] >= resolved.spec.warmup + resolved.spec.steps:
                raise BadInput(
                    f"{newest} has taken all {facts['step']} steps; ask for more with --steps"
                )

    def after_step(self, run: Run, resolved: Resolved, log: Log, last: bool) -> None:
        """Save every ``save_every`` steps and after the last."""
        due = run.trained.optimizer_steps % self.save_every == 0
        if self.folder and (due or last):
            curves = {"losses": log.all_losses(run), "grad_norms": log.all_norms()}
            checkpoint.save(run.trained, self.folder, {**terms(resolved), **curves})

    def finish(self, run: Run, resolved: Resolved) -> None:
        """Save what was trained, and draw samples of every class from the averaged weights; all
        ranks take part."""
        scaffold = tuple(s for part in resolved.recipe.strategies for s in part.scaffold)
        if self.trained is not None:
            files.save(run.trained, self.trained, leave_out=scaffold)
        if self.samples is None and self.averaged is None:
            return
        average = run.trained.attached.get("ema")
        if not isinstance(average, Average):
            raise BadInput("samples are drawn from the averaged weights; train with --ema 0.999")
        state = average.full_state()
        state = {name: value for name, value in state.items() if not name.startswith(scaffold)}
        if not run.trained.accelerator.is_main_process:
            return
        if self.averaged is not None:
            resolved.subject.save(state, self.averaged)
        if self.samples is not None:
            self._draw(run, resolved, state)

    def _draw(self, run: Run, resolved: Resolved, state: dict[str, torch.Tensor]) -> None:
        device, subject = run.trained.accelerator.device, resolved.subject
        classes = subject.data.classes
        module = setup.build_model(resolved)
        for part in resolved.recipe.strategies:
            if part.slot in (Slot.ADAPT, Slot.SPARSIFY):  # those change what the model is
                part.edit_model(module, subject)
        # Frozen weights are not averaged: they keep the values that they were just built with.
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name in state:
                    p.copy_(state[name])
        module.to(device).eval()
        generator = torch.Generator(device).manual_seed(resolved.spec.seed)
        labels_B = torch.arange(COLUMNS * min(classes, COLUMNS), device=device) // COLUMNS
        if classes >= 10 and resolved.spec.data == "digits":
            labels_B = torch.arange(10 * COLUMNS, device=device) // COLUMNS
        columns, video = COLUMNS, len(subject.data.sample_shape) == 4
        if video:  # one of each class, a line each
            columns, labels_B = subject.data.sample_shape[1], labels_B[::COLUMNS]
        shape = (len(labels_B), *subject.data.sample_shape)
        noise = torch.randn(shape, generator=generator, device=device)
        # Trained without withheld labels there is no "no class" to guide away from.
        scale = self.guidance if resolved.spec.class_dropout else 1.0
        predict = guided(subject, module, {"y": labels_B}, scale)
        drawn = run.objective.sample(predict, noise, steps=self.sample_steps, generator=generator)
        if video:
            drawn = drawn.transpose(1, 2).flatten(0, 1)
        grid.write_grid(drawn, self.samples, columns, grey=resolved.spec.data == "digits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a training run."""
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="FOLDER", help="save the training state here")
    add("--save-every", type=int, default=500, metavar="STEPS", help="between two checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--trust", action="store_true", help="resume also what another user saved")
    add("--samples", type=Path, metavar="PNG", help="draw a grid of samples when done")
    add("--trained", type=Path, metavar="FILE", help="save what was trained (adapters) by itself")
    add("--averaged", type=Path, metavar="FILE", help="save the averaged weights by themselves")
    add("--sample-steps", type=int, default=25, metavar="N", help="steps of the sampler")
    add("--guidance", type=float, default=2.0, metavar="SCALE", help="classifier-free guidance")


def from_options(options: argparse.Namespace) -> Training | None:
    """What was asked for, or None for a run that only measures."""
    if not any((options.checkpoint, options.samples, options.trained, options.averaged)):
        return None
    return Training(
        folder=options.checkpoint,
        save_every=options.save_every,
        resume=options.resume,
        trust=options.trust,
        samples=options.samples,
        trained=options.trained,
        averaged=options.averaged,
        sample_steps=options.sample_steps,
        guidance=options.guidance,
    )
