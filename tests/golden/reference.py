"""Weights and inputs of which reference_dit.json holds what the public reference makes: the code of
github.com/facebookresearch/DiT and github.com/willisma/SiT, called with these (this file's history
has the calls). They are sines of an index, not random numbers: the same under every version of
torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SMALL = dict(
    input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=4, num_classes=10
)
TIMES = [0, 0, 1, 250, 998, 999]


def wave(shape: tuple[int, ...], phase: float, scale: float = 1.0) -> Tensor:
    """A float32 tensor of sines at an irrational stride: looks random, is not."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    return torch.from_numpy(scale * np.sin(index * 2.399963 + phase)).float().reshape(shape)


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Set every trainable parameter to a wave; its phase is its place in the model."""
    for place, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        scale = 1.5 / np.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.8
        parameter.copy_(wave(tuple(parameter.shape), float(place), scale))
    return model


def inputs(count: int) -> dict[str, Tensor]:
    """Data x, noise, labels y and masks of withheld labels for ``count`` samples."""
    shape = (count, 4, 8, 8)
    labels = torch.arange(count) % 10
    return dict(
        x=wave(shape, 0.5), noise=wave(shape, 1.5, 1.4), y=labels, drop=torch.arange(count) % 3 == 1
    )


def thin(values: Tensor) -> list[float]:
    """Every 7th value: enough to tell two tensors apart."""
    return [round(float(v), 7) for v in values.detach().float().flatten()[::7]]


def withheld(batch: dict[str, Tensor]) -> Tensor:
    """Labels with the null class where ``drop`` says so."""
    return torch.where(batch["drop"], SMALL["num_classes"], batch["y"])


def outputs(model: nn.Module) -> dict[str, list[float]]:
    """The model's own functions on fixed inputs; any DiT with the reference's signatures."""
    batch = inputs(4)
    t = torch.tensor([0, 17, 500, 999])
    both = torch.cat([batch["y"][:2], torch.full((2,), 10)])
    with torch.no_grad():
        return {
            "forward": thin(model(batch["noise"], t, batch["y"])),
            "forward_fractional": thin(model(batch["noise"], t / 1000, withheld(batch))),
            "forward_with_cfg": thin(model.forward_with_cfg(batch["noise"], t, both, 4.0)),
        }


def step_noise(step: int) -> Tensor:
    """Noise of a sampling step, counted from the first one taken: [2, 4, 8, 8]."""
    return wave((2, 4, 8, 8), 2.0 + step, 1.4)


def positions(table: Any) -> list[float]:
    """Some of the position table of DiT-S/2 at 512 pixels, latents of 64 x 64: [1024, 384]."""
    return [round(float(v), 7) for v in np.asarray(table, np.float32).flatten()[::997]]
