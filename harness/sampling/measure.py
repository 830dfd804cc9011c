"""A sampling run: noise and labels, batches of samples, their audit, and the result.

The loop depends on no strategy. Noise and labels depend on the spec alone, so all rows draw the
same samples. Phases and steps are those of a training run (``harness.worker.passes``), with a batch
of samples as the step. Shape suffixes: B samples, C channels, H height, W width.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.resolve import Resolved
from harness.result import Check, Drawn, Result
from harness.subjects.objectives import guided
from harness.worker import audit as grid
from harness.worker import passes
from harness.worker.audit import collect_evidence
from harness.worker.loop import Run
from harness.worker.measure import altered, begin, measured_rank, result_of, traced_steps
from harness.worker.status import Reporter
from strategies.evidence.watching import observing
from strategies.initial import keyed

NOISE = "noise of a batch of samples"


def noise_of(resolved: Resolved) -> Tensor:
    """Return float32 [B, C, H, W] on the CPU, equal on every machine."""
    shape = (resolved.spec.global_batch, *resolved.subject.data.sample_shape)
    return torch.randn(shape, generator=keyed(resolved.spec.seed, NOISE))


@dataclass(kw_only=True)
class Drawing(Run):
    """Run whose step is a batch of samples.

    ``calls``: samples of each call of the model in the last batch. ``drawn``: its output.
    ``began``: a hash of the first call's input. ``kept``: the samples of the last timed batch.
    """

    labels_B: Tensor = field(init=False)
    noise_BCHW: Tensor = field(init=False)
    calls: list[int] = field(default_factory=list)
    drawn: Tensor | None = None
    began: str = ""
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        device, batch = self.accelerator.device, self.resolved.spec.global_batch
        labels_B = torch.arange(batch) % self.resolved.subject.data.classes  # every class in turn
        self.labels_B, self.noise_BCHW = labels_B.to(device), noise_of(self.resolved).to(device)

    @property
    def baseline(self) -> tuple[Any, ...]:
        """The samples kept for the result, which count as held before the step."""
        return () if self.kept is None else (self.kept,)

    def step(self) -> None:
        """Draw samples [B, C, H, W] in float32 for all labels; keep them until the next batch."""
        spec, noise, self.drawn = self.resolved.spec, self.noise_BCHW, None
        self.calls.clear()
        # No inference mode: a trace would see whole layers, without their allocations.
        with torch.no_grad():
            channels = self.subject.data.channels
            predict = guided(self._ask, {"y": self.labels_B}, spec.scale, channels)
            generator = torch.Generator(noise.device).manual_seed(spec.seed)
            self.drawn = self.objective.sample(
                predict, noise, steps=spec.drawn_steps, generator=generator
            )
        self.optimizer_steps += 1
        for attachment in self.attached.values():
            attachment.after_step()

    def _ask(self, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        self.micro_steps += 1
        self.calls.append(len(x))
        if self.began == "unseen":
            self.began = digest(x[: len(self.labels_B)])
        out = self.subject.predict(self.model, x, t_B, conditions)
        return out.float()  # the two halves are far larger than their difference

    def watched_step(self) -> None:
        """Draw a batch and record a hash of its input; never in a timed step."""
        self.began = "unseen"
        self.step()


def digest(tensor: Tensor) -> str:
    """Return a short hash of float32 values."""
    values = tensor.detach().float().cpu().contiguous().numpy().astype("<f4")
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


# ---- audit ----
# The checks read the model's calls and the samples. A row with one failed check is void, and never
# ranked.


AGAIN = 1e-3
"""Relative distance allowed between a batch and its repetition; a larger one means the model
changed.
"""


def audit(run: Drawing, kept: Tensor) -> list[Check]:
    """Return the checks that hold for every recipe.

    Args:
        run: after a watched batch.
        kept: the samples of the last timed batch.
    """
    resolved, spec, accelerator = run.resolved, run.resolved.spec, run.accelerator
    wanted = kept.double()
    apart = float((run.drawn.double() - wanted).norm() / wanted.norm().clamp_min(1e-30))
    gradients = [p for p in run.module.parameters() if p.requires_grad or p.grad is not None]
    halves = 1 if spec.scale == 1 else 2  # guidance: with conditions, and without
    asked_calls = {str(halves * spec.global_batch): resolved.evaluations}
    found_calls = {str(size): count for size, count in Counter(run.calls).items()}
    rows = [
        ("processes", 1, accelerator.num_processes),
        ("device", spec.device, accelerator.device.type),
        ("engine", resolved.launch.engine.file.kind, accelerator.distributed_type.value),
        ("samples", [spec.global_batch, *run.subject.data.sample_shape], list(kept.shape)),
        ("calls of the model", asked_calls, found_calls),
        ("noise", digest(noise_of(resolved)), run.began),
        ("samples finite", True, bool(torch.isfinite(kept).all())),
        ("eval mode", True, not run.module.training),
        ("parameters with a gradient", 0, len(gradients)),
        ("samples drawn again are equal", True, apart <= AGAIN),
    ]
    return [Check(name=n, asked=a, found=f, ok=a == f) for n, a, f in rows]


PICTURE = "samples.png"
KEPT = 4
"""Samples whose latents the result stores."""
COLUMNS = 8


def measure(resolved: Resolved, folder: Path, reporter: Reporter) -> Result | None:
    """Draw samples from noise on one process, and measure them."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    run: Any = begin(resolved, folder, reporter, kind=Drawing)
    touched = altered(run)
    passes.take(run, passes.measured_steps(run))
    kept = run.kept = run.drawn
    reporter.enter("anatomy")
    categories = traced_steps(run)
    with observing(run, resolved.recipe.strategies):
        run.watched_step()
    reporter.enter("evidence")
    evidence, checks = collect_evidence(run)
    checks = touched + checks + audit(run, kept)
    reporter.enter("save")
    ranks = [measured_rank(run, categories)]
    grid.write_grid(kept, folder / PICTURE, COLUMNS, grey=resolved.spec.data == "digits")
    result = result_of(run, ranks, [], checks, {"started": started, "evidence": evidence})
    result.parameters = resolved.subject.parameters  # packed codes are fewer than the weights
    some = kept[:KEPT].detach().float().cpu().contiguous()
    result.drawn = Drawn(
        samples=len(kept),
        evaluations=resolved.evaluations,
        products=len(resolved.subject.linears),
        shape=list(some.shape),
        latents=base64.b64encode(some.numpy().astype("<f4").tobytes()).decode("ascii"),
        labels=run.labels_B.tolist(),
        noise=digest(noise_of(resolved)),
    )
    return result
