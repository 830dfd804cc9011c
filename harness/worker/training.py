"""Plain training: periodic checkpoints, resumption, and samples from the averaged weights."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness.files import remove
from harness.json_files import write_json
from harness.launch.checkpoints import (
    DONE,
    check_own,
    check_same,
    fault,
    finished,
    newest_whole,
    proof,
    sizes,
    terms,
)
from harness.subjects.objectives import guided
from harness.worker import audit
from harness.worker.loop import Run
from strategies import initial
from strategies.adapters import lora
from strategies.base import BadInput, Slot
from strategies.engine import TrainingRun
from strategies.step.ema import Average

# ---- checkpoints ----
# accelerate saves the engine's part, including ZeRO's shards. accelerate would save the strategies'
# state (the weight average) from rank 0 only, so each rank writes its own.


def save(run: TrainingRun, folder: Path, facts: dict[str, Any], keep: int = 2) -> Path:
    """Write ``folder/step-N``; it is valid only once its ``headroom.json`` exists.

    The newest ``keep`` checkpoints stay; older ones are deleted after the new one is complete.
    """
    accelerator = run.accelerator
    path = folder / f"step-{run.optimizer_steps:08d}"
    if accelerator.is_main_process:
        remove(path)  # a damaged checkpoint is written again
    accelerator.wait_for_everyone()
    run.engine.save(run, path)
    state: dict[str, Any] = {name: a.state_dict() for name, a in run.attached.items()}
    torch.save(state, path / f"attached-{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        counts = {"step": run.optimizer_steps, "processes": accelerator.num_processes}
        write_json(path / DONE, facts | counts | {"files": sizes(path)} | proof(path))
        whole = [step for step in finished(folder) if not fault(step)]
        for old in whole[:-keep]:
            remove(old)
    accelerator.wait_for_everyone()
    return path


def restore(
    run: TrainingRun, path: Path, wanted: dict[str, Any], *, trust: bool = False
) -> dict[str, Any]:
    """Load ``path`` into the prepared objects; return the facts that were saved with it.

    Args:
        wanted: facts that must equal the saved ones.
        trust: load another user's checkpoint too, even if that may run its code.

    Raises:
        Mismatch: saved with other facts (recipe, processes, model, ...): names the first.
        Foreign: the engine's load may run code, and the checkpoint is not the user's own.
    """
    accelerator = run.accelerator
    facts = check_same(path, wanted | {"processes": accelerator.num_processes})
    if run.engine.unpickles and not trust and accelerator.is_local_main_process:
        check_own(path)
    accelerator.wait_for_everyone()
    run.engine.load(run, path)
    file = path / f"attached-{accelerator.process_index}.pt"
    state = torch.load(file, map_location="cpu", weights_only=True)
    for key, attachment in run.attached.items():
        attachment.load_state_dict(state[key])
    run.optimizer_steps = run.resumed_steps = int(facts["step"])
    return facts


COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class Training:
    """Checkpoints and samples of a training run.

    ``checkpoint`` is the folder; None writes none. ``trust`` resumes another user's checkpoint too,
    which may run its code. ``averaged`` is the file for the averaged weights, for a later sampling
    run (``--weights``).
    """

    checkpoint: Path | None = None
    save_every: int = 500
    resume: bool = False
    trust: bool = False
    samples: Path | None = None
    trained: Path | None = None
    averaged: Path | None = None
    sample_steps: int = 25
    guidance: float = 2.0

    def begin(self, run: Run) -> None:
        """Resume from the newest checkpoint if requested and present."""
        newest = newest_whole(self.checkpoint)[0] if self.checkpoint and self.resume else None
        if newest is not None:
            facts = restore(run, newest, terms(run.resolved), trust=self.trust)
            run.log.earlier, run.log.earlier_norms = facts["losses"], facts["grad_norms"]
            if facts["step"] >= run.resolved.spec.warmup + run.resolved.spec.steps:
                raise BadInput(
                    f"{newest} has taken all {facts['step']} steps; ask for more with --steps"
                )

    def after_step(self, run: Run, last: bool) -> None:
        """Save every ``save_every`` steps and after the last."""
        due = run.optimizer_steps % self.save_every == 0
        if self.checkpoint and (due or last):
            curves = {"losses": run.all_losses(), "grad_norms": run.all_norms()}
            save(run, self.checkpoint, {**terms(run.resolved), **curves})

    def finish(self, run: Run) -> None:
        """Save the trained weights, and sample every class from the averaged weights. All ranks
        must call it."""
        if self.trained is not None:
            lora.save(run, self.trained)
        if self.samples is None and self.averaged is None:
            return
        average: Any = run.attached.get("ema")
        if not isinstance(average, Average):
            raise BadInput("samples are drawn from the averaged weights; train with --ema 0.999")
        state = average.full_state()
        if not run.accelerator.is_main_process:
            return
        if self.averaged is not None:
            self.averaged.parent.mkdir(parents=True, exist_ok=True)
            save_file(state, str(self.averaged))
        if self.samples is not None:
            self._draw(run, state)

    def _draw(self, run: Run, state: dict[str, torch.Tensor]) -> None:
        resolved, device, subject = run.resolved, run.accelerator.device, run.subject
        classes = subject.data.classes
        module = initial.build(subject, resolved.spec.seed, resolved.spec.init)
        for part in resolved.recipe.strategies:
            if part.slot in (Slot.ADAPT, Slot.SPARSIFY):  # those change the model's structure
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
        shape = (len(labels_B), *subject.data.sample_shape)
        noise = torch.randn(shape, generator=generator, device=device)
        # A model trained without withheld labels has no "no class" to guide away from.
        scale = self.guidance if resolved.spec.class_dropout else 1.0

        def ask(x: torch.Tensor, t_B: torch.Tensor, given: Mapping[str, Any]) -> Any:
            return subject.predict(module, x, t_B, given)

        predict = guided(ask, {"y": labels_B}, scale, subject.data.channels)
        drawn = run.objective.sample(predict, noise, steps=self.sample_steps, generator=generator)
        assert self.samples is not None
        audit.write_grid(drawn, self.samples, COLUMNS, grey=resolved.spec.data == "digits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a training run."""
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
    """Return the requested training, or None for a run that only measures."""
    if not any((options.checkpoint, options.samples, options.trained, options.averaged)):
        return None
    return Training(**{f.name: getattr(options, f.name) for f in fields(Training)})
