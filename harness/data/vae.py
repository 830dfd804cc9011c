"""Images turned into latents by a VAE in every step, as trainers do that extract nothing first.

The VAE is diffusers' AutoencoderKL in the shape of the one that DiT trains with (stabilityai's
sd-vae-ft: 8x downsampling, 4 channels), or a small one for machines without a GPU. Its weights
are random: memory and speed are those of a trained one, the latents mean nothing. The decoder lies
in memory too, unused, as it does for those trainers. Its work is not in the FLOPs of a row.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.data.latents import Indices
from strategies.subject import DataFacts

DOWNSAMPLING = 8
WIDTHS = {"vae": (128, 256, 512, 512), "vae_small": (32, 32, 64, 64)}
"""Channels of the four stages."""
SCALE = 0.18215
"""What the public trainers multiply latents by, to unit variance."""
SEED = 0


class Images:
    """Random images on the device; fetching encodes them, without gradients."""

    def __init__(self, kind: str, facts: DataFacts, device: torch.device | str):
        from diffusers import AutoencoderKL

        # The library is loaded now, and its model built later: only the model is memory of a run.
        self._make, self.kind = AutoencoderKL, kind
        self.facts, self.device = facts, torch.device(device)
        rng, side = np.random.default_rng(SEED), facts.input_size * DOWNSAMPLING
        pixels = rng.integers(256, size=(facts.size, 3, side, side), dtype=np.uint8)
        self.pixels = torch.from_numpy(pixels).to(self.device)
        self.labels = torch.from_numpy(rng.integers(facts.classes, size=facts.size)).to(self.device)
        self._step = Indices(self.device)

    @functools.cached_property
    def vae(self) -> Any:
        """Built at the first fetch, so that a meter that began before it counts its bytes."""
        widths = WIDTHS[self.kind]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            vae = self._make(
                latent_channels=self.facts.channels,
                down_block_types=("DownEncoderBlock2D",) * len(widths),
                up_block_types=("UpDecoderBlock2D",) * len(widths),
                block_out_channels=widths,
                layers_per_block=2,
            )
        return vae.requires_grad_(False).eval().to(self.device)

    @torch.no_grad()
    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Latents float32 [n, C, H, W] and labels; the mean of the posterior, not a sample of it,
        so that equal samples give equal latents."""
        chosen = self._step.take(indices)
        images = self.pixels[chosen].float() / 127.5 - 1
        latents = self.vae.encode(images).latent_dist.mode()
        return latents * SCALE, self.labels[chosen]

    def begin(self, indices: np.ndarray) -> None:
        """See ``Dataset.begin``."""
        self._step.begin(indices)

    def expect(self, indices: np.ndarray) -> None:
        """Nothing to read."""
