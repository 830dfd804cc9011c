"""Precomputed files of finetrainers: a ``latent-*.pt`` and a ``condition-*.pt`` for each sample.

They are written with ``--enable_precomputation`` by versions 0.1 and 0.2 and by the main branch
(commit f476c37). Source: data/precomputation.py and models/*/base_specification.py. Each file is
torch.save's output for a dict of tensors and numbers: one sample with a leading axis of 1. Latents
are moments (mean and log variance, along channels), not yet scaled. The file is a pickle; torch
reads tensors from it and refuses everything else (``weights_only``).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.data.caches.entries import Part, Sample
from strategies.base import BadInput

if TYPE_CHECKING:
    from torch import Tensor


FOLDER = "finetrainers-precomputed-data"
hint = f"it should hold latent-0.pt and condition-0.pt, or {FOLDER}/"
CLASSES = (
    "LTXVideoTransformer3DModel",
    "WanTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "CogView4Transformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "FluxTransformer2DModel",
)
"""Classes that it trains; its files do not name them."""
NAMES = {
    "latent": {"latents": "latents", "latents_mean": "mean", "latents_std": "scale"},
    "condition": {
        "encoder_hidden_states": "text",
        "encoder_attention_mask": "mask",
        "pooled_projections": "pooled",
    },
}
"""Kind of file -> key -> part."""
BESIDE = ("latent_condition", "encoder_hidden_states_image", "control_latents")
DUE = {"latent": "latents", "condition": "encoder_hidden_states"}


def find(folder: Path) -> list[Sample]:
    """Return the samples of a folder, by number.

    Raises:
        BadInput: one line that names the file, its error and a remedy.
    """
    root = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    names = {path.stem.removeprefix("latent-") for path in root.glob("latent-*.pt")}
    texts = {path.stem.removeprefix("condition-") for path in root.glob("condition-*.pt")}
    for kind, missing in (("condition", names - texts), ("latent", texts - names)):
        if missing:
            what = root / f"{kind}-{min(missing, key=_number)}.pt"
            raise BadInput(f"{what} is missing; precompute again, or delete its partner")
    return [_sample(root, name) for name in sorted(names, key=_number)]


def _number(name: str) -> tuple[int, ...]:
    return tuple(int(word) if word.isdecimal() else 0 for word in name.split("-"))


def _sample(root: Path, name: str) -> Sample:
    parts: dict[str, Part] = {}
    for kind, known in NAMES.items():
        path = root / f"{kind}-{name}.pt"
        held = _load(path, "meta")
        beside = [key for key in held if key in BESIDE]
        if beside:
            raise BadInput(
                f"{path} has {beside[0]}, but models are trained here on text alone; "
                "precompute without it"
            )
        if DUE[kind] not in held:
            raise BadInput(f"{path} has no {DUE[kind]}, but {', '.join(held)}; precompute again")
        found = {known[key]: key for key in held if key in known}
        parts |= {here: _part(path, key, held[key]) for here, key in found.items()}
    return Sample(f"latent-{name}.pt", "", CLASSES, parts, moments=True)


def _part(path: Path, key: str, found: Any) -> Part:
    import torch

    if not torch.is_tensor(found):
        raise BadInput(f"{path}: {key} is a {type(found).__name__}, not a tensor; precompute again")
    shape = tuple(found.shape)
    if found.ndim > 1 and shape[0] == 1:
        shape = shape[1:]
    return Part(path, key, shape, str(found.dtype).removeprefix("torch."))


def _load(path: Path, place: str) -> Mapping[str, Any]:
    import torch

    try:
        found = torch.load(path, map_location=place, weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as fault:
        reason = str(fault).split(". ")[0].splitlines()[0][:120]
        raise BadInput(
            f"{path} has more than tensors, and other pickled objects are not loaded "
            f"({reason}); precompute again"
        ) from fault
    if not isinstance(found, Mapping):
        raise BadInput(
            f"{path} holds a {type(found).__name__}, not a dict of tensors; precompute again"
        )
    return found


def tensor(part: Part) -> Tensor:
    """Return the tensor, in its own type, on the CPU, without its leading axis of 1."""
    return _load(part.path, "cpu")[part.key].reshape(part.shape)
