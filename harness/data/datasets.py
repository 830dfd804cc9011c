"""Datasets: samples by index, as tensors on a device.

The VAE of ``vae``, which encodes images in every step, is diffusers' AutoencoderKL with the sizes
of DiT's (stabilityai's sd-vae-ft), or a small one for CPUs. Its weights are random: memory and
speed are those of a trained VAE. The decoder occupies memory unused, as in trainers. A row's FLOPs
exclude the VAE.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.data.feed import Dataset, check_data
from harness.data.latents import Folder
from strategies.subject import DataFacts

DOWNSAMPLING = 8
WIDTHS = {"vae": (128, 256, 512, 512), "vae_small": (32, 32, 64, 64)}
"""Channels of the four stages."""
SCALE = 0.18215
"""Factor that public trainers apply to latents, for unit variance."""
SEED = 0


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to ``device``; to a GPU from pinned memory, because only that overlaps with its work."""
    if device.type == "cuda":
        pinned = tensor.pin_memory()  # in a line of its own: a traceback tells which of both failed
        return pinned.to(device, non_blocking=True)
    return tensor.to(device)


class Indices:
    """Indices on the device, copied once per step, so that its micro-batches wait for no copy.

    In an object of its own: a tracer leaves out tensors that are a dataset's own attributes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._left, self._there = np.empty(0, np.int64), None

    def begin(self, indices: np.ndarray) -> None:
        """Copy the indices that the next calls of ``take`` will request, in order."""
        self._left, self._there = np.array(indices), self._copied(indices)

    def take(self, indices: np.ndarray) -> Tensor:
        """Return these indices on the device, int64 [n]; unannounced ones are copied now."""
        count = len(indices)
        if self._there is None or not np.array_equal(self._left[:count], indices):
            return self._copied(indices)
        chosen = self._there[:count]
        self._left, self._there = self._left[count:], self._there[count:]
        return chosen

    def _copied(self, indices: np.ndarray) -> Tensor:
        return on_device(torch.from_numpy(np.array(indices)), self.device)


class Resident(Dataset):
    """A small dataset that is entirely on the device."""

    def __init__(
        self, facts: DataFacts, x: np.ndarray, y: np.ndarray, device: torch.device | str
    ) -> None:
        self.facts = facts
        self.x_all, self.y_all = (torch.from_numpy(a).to(device) for a in (x, y))
        self._step = Indices(self.x_all.device)

    def begin(self, indices: np.ndarray) -> None:
        self._step.begin(indices)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        chosen = self._step.take(indices)
        return self.x_all[chosen], self.y_all[chosen]


class Latents(Dataset):
    """A folder of latents, read file by file, one fetch ahead of the training step."""

    def __init__(self, folder: Folder, device: torch.device | str) -> None:
        self.facts, self.folder, self.device = folder.facts, folder, torch.device(device)
        self._reader = ThreadPoolExecutor(1)
        self._coming: tuple[bytes, Future[Any]] | None = None

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == indices.tobytes():
            arrays = coming[1].result()  # raises what a faulty file raised
        else:
            arrays = self.folder.read(indices)
        x, y = (on_device(torch.from_numpy(a), self.device) for a in arrays)
        return x, y

    def expect(self, indices: np.ndarray) -> None:
        reading = self._reader.submit(self.folder.read, indices)
        self._coming = (indices.tobytes(), reading)


class Brought(Dataset):
    """Samples that a model brings, in host memory; those of a step are copied to ``device``.

    ``held`` has "x" and its conditions by rows. The text of some models takes megabytes a sample.
    """

    def __init__(
        self, facts: DataFacts, held: Mapping[str, Tensor], device: torch.device | str
    ) -> None:
        self.facts, self.device, self.names = facts, torch.device(device), tuple(held)
        # Attributes, because a CPU's meter excludes a dataset's attributes.
        vars(self).update({f"held_{name}": tensor for name, tensor in held.items()})

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = torch.from_numpy(np.array(indices))
        held = {name: getattr(self, f"held_{name}")[chosen] for name in self.names}
        rows = {name: on_device(tensor, self.device) for name, tensor in held.items()}
        return rows.pop("x"), rows


class Images(Dataset):
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
        """Build the VAE at the first fetch, so that a meter counts its bytes."""
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
        chosen = self._step.take(indices)
        images = self.pixels[chosen].float() / 127.5 - 1
        # The posterior's mean, not a sample, so that equal samples give equal latents.
        latents = self.vae.encode(images).latent_dist.mode()
        return latents * SCALE, self.labels[chosen]

    def begin(self, indices: np.ndarray) -> None:
        self._step.begin(indices)


def open_data(name: str, device: torch.device | str) -> Dataset:
    """Return the dataset called ``name`` on ``device``; a BadInput is as of ``check_data``.

    A folder's files are checked when they are fetched, so opening reads only the listing.
    """
    kind, _, detail = name.partition(":")
    if kind == "latents" and detail:
        return Latents(Folder(detail, thorough=False), device)
    facts = check_data(name)
    if kind in ("vae", "vae_small"):
        return Images(kind, facts, device)
    return Resident(facts, *(_digits() if kind == "digits" else _synthetic(facts)), device)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits (8 x 8, 17 grey levels) as latents in [-1, 1].

    Each pixel is enlarged to 4 x 4, so that patch 4 sees one pixel per token, in 4 channels.
    """
    # Read only its file: importing scikit-learn loads all of scipy, a second for each rank.
    found: Any = importlib.util.find_spec("sklearn")
    library = Path(found.origin).parent
    table = np.loadtxt(library / "datasets/data/digits.csv.gz", np.float32, delimiter=",")
    pixels = table[:, :-1].reshape(-1, 1, 8, 8) / 8 - 1
    latents = pixels.repeat(4, axis=1).repeat(4, axis=2).repeat(4, axis=3)
    return latents, table[:, -1].astype(np.int64)


def _synthetic(facts: DataFacts) -> tuple[np.ndarray, np.ndarray]:
    """Return standard normal latents and uniform labels, the same on every machine."""
    rng = np.random.default_rng(0)
    latents = rng.standard_normal((facts.size, *facts.sample_shape), dtype=np.float32)
    return latents, rng.integers(facts.classes, size=facts.size)
