"""Caches as other trainers write them, in their real formats, of miniature models."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

MUSUBI = {
    # model -> (short, full name, latent of a bucket, keys of the text)
    "wan2.1-1.3b": ("wan", "wan", lambda f, h, w: (4, f, h, w), {"varlen_t5": (None, 16)}),
    "hunyuanvideo": (
        *("hv", "hunyuan_video", lambda f, h, w: (4, f, h, w)),
        {"llm": (6, 16), "llm_mask": (6,), "clipL": (8,)},
    ),
    "flux2-dev": (
        *("f2d", "flux_2_dev", lambda f, h, w: (16, h // 2, w // 2)),
        {"ctx_vec": (8, 32)},
    ),
    "qwen-image": (
        *("qi", "qwen_image", lambda f, h, w: (4, 1, h, w)),
        {"varlen_vl_embed": (None, 16)},
    ),
    "z-image": ("zi", "z_image", lambda f, h, w: (4, h, w), {"varlen_llm_embed": (None, 16)}),
}
"""What musubi-tuner keeps of a model, at the sizes of its miniature."""
FINETRAINERS = {
    # model -> (latents, their further keys, conditions)
    "ltx-video-2b": (
        lambda f, h, w: (1, 16, f, h, w),
        {"latents_mean": (8,), "latents_std": (8,)},
        {"encoder_hidden_states": (1, 8, 16), "encoder_attention_mask": (1, 8)},
    ),
    "cogvideox-5b": (
        lambda f, h, w: (1, f, 8, h, w),
        {},
        {"encoder_hidden_states": (1, 8, 16)},
    ),
    "flux-dev": (
        lambda f, h, w: (1, 8, h, w),
        {},
        {"encoder_hidden_states": (1, 8, 32), "pooled_projections": (1, 16)},
    ),
}
"""The same of finetrainers."""
Size = tuple[int, int, int]


def musubi(folder: Path, model: str, sizes: dict[Size, int], tokens: tuple[int, ...] = (5,)) -> str:
    """A cache of so many samples of each (frames, height, width) of latents; texts of ``tokens``
    by turns. The data's name."""
    folder.mkdir(exist_ok=True)
    names = [size for size, count in sizes.items() for _ in range(count)]
    for number, size in enumerate(names):
        musubi_sample(folder, model, number, size, tokens[number % len(tokens)])
    return f"musubi:{folder}"


def musubi_sample(folder: Path, model: str, number: int, size: Size, tokens: int) -> None:
    """Both files of one sample, named as its trainer names them."""
    short, full, shape, texts = MUSUBI[model]
    latents, chance = shape(*size), torch.Generator().manual_seed(number)
    frames, height, width = size
    sides = f"{latents[-2]}x{latents[-1]}" if "flux_2" in full else f"{frames}x{height}x{width}"
    video = f"_00000-{4 * (frames - 1) + 1:03d}" if full in ("wan", "hunyuan_video") else ""
    fields = {"architecture": full, "format_version": "1.0.1"}
    save_file(
        {f"latents_{sides}_bfloat16": torch.randn(latents, generator=chance).bfloat16()},
        folder / f"cat{number}{video}_{8 * width:04d}x{8 * height:04d}_{short}.safetensors",
        metadata=fields | {"width": str(8 * width), "height": str(8 * height)},
    )
    held = {}
    for key, axes in texts.items():
        of = tuple(tokens if n is None else n for n in axes)
        if key.endswith("_mask"):
            held[key] = torch.arange(of[0]) < of[0] - 1
        else:
            held[f"{key}_bfloat16"] = torch.randn(of, generator=chance).bfloat16()
    path = folder / f"cat{number}_{short}_te.safetensors"
    save_file(held, path, metadata=fields | {"caption1": "a cat"})


def finetrainers(folder: Path, model: str, sizes: dict[Size, int]) -> str:
    """The same as finetrainers' precomputed files."""
    root = folder / "finetrainers-precomputed-data"
    root.mkdir(parents=True)
    shape, more, conditions = FINETRAINERS[model]
    names = [size for size, count in sizes.items() for _ in range(count)]
    for number, size in enumerate(names):
        chance = torch.Generator().manual_seed(number)

        def made(axes: tuple[int, ...], chance: torch.Generator = chance) -> torch.Tensor:
            return torch.randn(axes, generator=chance)

        latent = {"latents": made(shape(*size)), "num_frames": size[0]}
        latent |= {key: made(axes).abs() + 1 for key, axes in more.items()}
        torch.save(latent, root / f"latent-{number}.pt")
        texts = {
            key: torch.ones(axes, dtype=torch.bool) if "mask" in key else made(axes)
            for key, axes in conditions.items()
        }
        torch.save(texts, root / f"condition-{number}.pt")
    return f"finetrainers:{folder}"
