"""Miniature pipelines in diffusers' folder format, with random weights of a seed: Flux and SD3.

Each folder holds what a training script loads by ``from_pretrained(..., subfolder=...)``.
"""

from __future__ import annotations

import json
import string
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 32
"""Of the text encoders, and of what the transformers take from them."""
PIECES = 1000
"""Entries of each vocabulary."""


def tokens() -> list[str]:
    """Return the letters alone and at the end of a word, as CLIP's vocabulary has them."""
    letters = [*string.ascii_lowercase, *string.digits, *string.punctuation]
    return [*letters, *(f"{letter}</w>" for letter in letters)]


def clip_tokenizer() -> Any:
    """Return a tokenizer of single letters."""
    from transformers import CLIPTokenizer

    words = [*tokens(), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def t5_tokenizer() -> Any:
    """Return a tokenizer of single letters."""
    from transformers import T5TokenizerFast

    words = ["<pad>", "</s>", "<unk>", "\u2581", *string.ascii_lowercase, *string.digits]
    pieces = [(word, -float(number)) for number, word in enumerate(words)]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=77)


def clip(kind: str, **options: Any) -> Any:
    """Return a text encoder of that class of transformers."""
    import transformers

    config = transformers.CLIPTextConfig(
        hidden_size=WIDTH, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2,
        vocab_size=PIECES, projection_dim=WIDTH, bos_token_id=len(tokens()),
        eos_token_id=len(tokens()) + 1, pad_token_id=len(tokens()) + 1, **options,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def t5(kind: str) -> Any:
    """Return an encoder of that class of transformers."""
    import transformers

    config = getattr(transformers, kind.replace("EncoderModel", "Config"))(
        vocab_size=PIECES, d_model=WIDTH, d_kv=8, d_ff=37, num_layers=2, num_heads=4
    )
    return getattr(transformers, kind)(config)


def image_vae(channels: int, **options: Any) -> Any:
    """Return a VAE that halves each side of an image once."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(4, 4), layers_per_block=1,
        latent_channels=channels, norm_num_groups=1, sample_size=32, **options,
    )  # fmt: skip


FLOW = {"use_quant_conv": False, "use_post_quant_conv": False, "shift_factor": 0.06}
"""Of VAEs of Flux and SD3."""


def flux() -> dict[str, Any]:
    """Return the parts of a Flux pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    return {
        "transformer": FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH,
            axes_dims_rope=(4, 4, 8), guidance_embeds=True,
        ),
        "vae": image_vae(4, scaling_factor=1.5, **FLOW),
        "text_encoder": clip("CLIPTextModel"),
        "text_encoder_2": t5("T5EncoderModel"),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": t5_tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }  # fmt: skip


def sd3() -> dict[str, Any]:
    """Return the parts of a Stable Diffusion 3 pipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

    return {
        "transformer": SD3Transformer2DModel(
            sample_size=32, patch_size=2, in_channels=4, out_channels=4, num_layers=2,
            attention_head_dim=8, num_attention_heads=4, joint_attention_dim=WIDTH,
            caption_projection_dim=32, pooled_projection_dim=2 * WIDTH,
        ),
        "vae": image_vae(4, scaling_factor=1.5, **FLOW),
        "text_encoder": clip("CLIPTextModelWithProjection"),
        "text_encoder_2": clip("CLIPTextModelWithProjection", hidden_act="gelu"),
        "text_encoder_3": t5("T5EncoderModel"),
        "tokenizer": clip_tokenizer(),
        "tokenizer_2": clip_tokenizer(),
        "tokenizer_3": t5_tokenizer(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }  # fmt: skip


PIPELINES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "flux": ("FluxPipeline", flux),
    "sd3": ("StableDiffusion3Pipeline", sd3),
}
"""Name -> the class of diffusers, and what makes the parts."""


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """Write the pipeline ``name`` below ``folder`` and return its own folder."""
    import torch

    kind, make = PIPELINES[name]
    own = folder / name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = make()
    for part, saved in parts.items():
        _spread(saved)
        saved.save_pretrained(own / part)
    index = {part: [type(saved).__module__.split(".")[0], type(saved).__name__]
             for part, saved in parts.items()}  # fmt: skip
    (own / "model_index.json").write_text(json.dumps({"_class_name": kind, **index}, indent=1))
    return own


def _spread(part: Any) -> None:
    """Draw the parameters that a model starts at zero: their gradients would hide others."""
    import torch

    for name, parameter in getattr(part, "named_parameters", lambda: [])():
        if not parameter.any():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.data.normal_(0.0, 0.02, generator=drawn)


def pictures(folder: Path, count: int = 8, side: int = 32) -> Path:
    """Write ``count`` pictures of random colours, with captions as an image folder has them."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draw = numpy.random.default_rng(0)
    for number in range(count):
        small = draw.integers(0, 256, (4, 4, 3), dtype=numpy.uint8)
        Image.fromarray(small).resize((side, side)).save(folder / f"{number}.png")
    lines = [json.dumps({"file_name": f"{n}.png", "text": f"picture {n}"}) for n in range(count)]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder
