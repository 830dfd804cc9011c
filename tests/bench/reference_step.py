"""Our training step against the public reference trainer's, timed in turns. By hand:

    HEADROOM_REFERENCE_DIT=checkout python tests/bench/reference_step.py --model DiT-S/4 --batch 8

A step is forward, loss, backward, AdamW (1e-4, no decay) and the weight average, in float32. Turns
alternate, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import copy
import os
import runpy
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from harness.subjects.dit.model import build  # noqa: E402
from harness.subjects.objectives import OBJECTIVES  # noqa: E402

DECAY = 0.9999


def draw(batch: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and labels, as a loader would give them."""
    x = torch.randn(batch, 4, 32, 32, device=device)
    return x, torch.randint(1000, (batch,), device=device)


def ours(preset: str, batch: int, device: str) -> Callable[[], None]:
    """One step with this repository's modules."""
    objective = OBJECTIVES["epsilon"]
    model = build(preset, input_size=32, channels=4, classes=1000, seed=0).to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0)
    generator = torch.Generator(device)

    def step() -> None:
        x, y = draw(batch, device)
        t, noise = objective.draw(generator, batch, (4, 32, 32), device)
        drop = torch.rand(batch, generator=generator, device=device) < 0.1
        loss = objective.loss(model, x, y, t, noise, drop).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(average, trained, 1 - DECAY)

    return step


def theirs(preset: str, batch: int, device: str) -> Callable[[], None]:
    """One step as the reference's train.py takes it."""
    load = runpy.run_path(str(ROOT / "tests" / "golden" / "make_reference.py"))["load"]
    models, diffusion = load(os.environ["HEADROOM_REFERENCE_DIT"], "models", "diffusion")
    model = models.DiT_models[preset](input_size=32, num_classes=1000).to(device).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    process = diffusion.create_diffusion("")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)

    def step() -> None:
        x, y = draw(batch, device)
        t = torch.randint(0, process.num_timesteps, (batch,), device=device)
        loss = process.training_losses(model, x, t, {"y": y})["loss"].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            targets = OrderedDict(average.named_parameters())
            for name, parameter in OrderedDict(model.named_parameters()).items():
                targets[name].mul_(DECAY).add_(parameter.data, alpha=1 - DECAY)

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    """Wall time of one step, the device idle at both ends."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def spread(samples: list[float]) -> str:
    """Median, p10 and p90 in milliseconds."""
    deciles = statistics.quantiles(samples, n=10)
    middle = statistics.median(samples)
    return f"median {middle * 1e3:.1f} ms, p10 {deciles[0] * 1e3:.1f}, p90 {deciles[-1] * 1e3:.1f}"


def main() -> None:
    """Print both times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=8, help="samples a step")
    parser.add_argument("--model", default="DiT-S/4", help="model preset")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    makers = {"ours": ours, "reference": theirs}
    steps = {n: make(asked.model, asked.batch, asked.device) for n, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(3 + asked.steps):
        for name, step in steps.items():
            taken = seconds(step, asked.device)
            if turn >= 3:
                times[name].append(taken)
    for name, samples in times.items():
        print(f"{name:>9}: {spread(samples)}")
    ratios = [a / b for a, b in zip(times["ours"], times["reference"], strict=True)]
    middle = statistics.median(times["ours"]) / statistics.median(times["reference"])
    deciles = statistics.quantiles(ratios, n=10)
    print(f"ours / reference: {middle:.3f} (p10 {deciles[0]:.3f}, p90 {deciles[-1]:.3f} by turn)")


if __name__ == "__main__":
    main()
