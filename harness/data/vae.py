"""Images that a VAE encodes in every step, as trainers without precomputed latents do.

The VAE is diffusers' AutoencoderKL with the sizes of DiT's (stabilityai's sd-vae-ft: 8x
downsampling, 4 channels), or a small one for machines without a GPU. Its weights are random: memory
and speed are those of a trained VAE, but the latents mean nothing. The decoder occupies memory
unused, as in those trainers. A row's FLOPs exclude the VAE.
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
"""Factor that public trainers apply to latents, for unit variance."""
SEED = 0


class Images:
    """Random images on the device; fetching encodes them, without gradients."""

    def __init__(self, kind: str, facts: DataFacts, device: torch.device | str) -> None:
        from diffusers import AutoencoderKL

        # Load the library now and build its model later: only the model counts as memory of a run.
        self._make, self.kind = AutoencoderKL, kind
        self.facts, self.device = facts, torch.device(device)
        rng, side = np.random.default_rng(SEED), facts.input_size * DOWNSAMPLING
        pixels = rng.integers(256, size=(facts.size, 3, side, side), dtype=np.uint8)
        self.pixels = torch.from_numpy(pixels).to(self.device)
        self.labels = torch.from_numpy(rng.integers(facts.classes, size=facts.size)).to(self.device)
        self._step = Indices(self.device)

    @functools.cached_property
    def vae(self) -> Any:
        """Build the VAE at the first fetch, so that a meter that started before counts its
        bytes."""
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
        """Return latents float32 [n, C, H, W] and labels.

        The latents are the posterior's mean, not a sample, so that equal samples give equal
        latents.
        """
        chosen = self._step.take(indices)
        images = self.pixels[chosen].float() / 127.5 - 1
        latents = self.vae.encode(images).latent_dist.mode()
        return latents * SCALE, self.labels[chosen]

    def begin(self, indices: np.ndarray) -> None:
        """See ``Dataset.begin``."""
        self._step.begin(indices)

    def expect(self, indices: np.ndarray) -> None:
        """Do nothing: there are no files to read."""
