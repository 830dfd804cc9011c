"""Forward calls of the library's model families, shared samples, and initial weights.

Each call takes the model (wrapped by an engine or bare), a noisy sample, the time in the model's
units, the conditions of ``families``, the configuration and the size. It returns the output in the
layout of the sample. Positions are computed in each step, as the library's trainers do.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from harness.subjects.library.families import Space
from strategies import initial
from strategies.initial import Draw

# ---- parts of a sample ----
# Ranks that share a sample process one part each. If a class takes positions with its tokens, it
# gets those of the part. Positions that it computes from the size of its input are computed for the
# whole size, and then cut.


PART = "part_of_samples"
ROTARY = "rope"
"""Module that computes a video's positions, (cosines, sines): [1, F H W, 1, K] from the size of its
input, or [B, F H W, K] from given sizes."""
EMBED = "pos_embed"
"""Module that makes an image's tokens [B, T, D], with positions, from latents [B, C, H, W]."""


def mine(model: Any, tokens: Tensor, axis: int = 0) -> Tensor:
    """Return this rank's part of a tensor along its token axis, as set by ``take_part``."""
    part, parts = _part(model)
    return tokens if parts == 1 else tokens.chunk(parts, dim=axis)[part]


def rows_of(model: Any, table: Tensor, axis: int, frames: int, rows: int) -> Tensor:
    """Return this rank's stripe of rows of each frame; ``axis`` has the tokens of all frames, of
    ``rows`` rows each."""
    part, parts = _part(model)
    if parts == 1:
        return table
    of_rows = table.unflatten(axis, (frames, rows, -1)).chunk(parts, dim=axis + 1)[part]
    return of_rows.flatten(axis, axis + 2)


def take_part(module: nn.Module, part: int, parts: int, stripes: str) -> None:
    """Make the bare ``module`` process the ``part``-th of ``parts`` equal parts from now on.

    ``stripes`` is a value of ``Family.stripes``.
    """
    known = hasattr(module, PART)
    setattr(module, PART, (part, parts))
    if known:
        return
    if hasattr(module, ROTARY):
        _of_rows(module) if stripes == "height" else _of_tokens(module)
    elif stripes == "height" and hasattr(module, EMBED):
        _of_an_image(module)


def _part(model: Any) -> tuple[int, int]:
    return getattr(getattr(model, "module", model), PART, (0, 1))


def _of_rows(module: nn.Module) -> None:
    rotary = getattr(module, ROTARY)

    def whole(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Replace the part by a tensor of the whole's shape; the module reads only the shape."""
        x, parts = given[0], _part(module)[1]
        shape = list(x.shape)
        shape[3] *= parts
        return (x.new_empty(1).expand(shape), *given[1:])

    def cut(_: Any, given: tuple[Tensor, ...], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        frames = given[0].shape[2] // rotary.patch_size[0]
        rows = given[0].shape[3] // rotary.patch_size[1]
        return tuple(rows_of(module, table, 1, frames, rows) for table in made)

    rotary.register_forward_pre_hook(whole)
    rotary.register_forward_hook(cut)


def _of_tokens(module: nn.Module) -> None:
    def cut(_: Any, given: tuple[Any, ...], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(mine(module, table, 1) for table in made)

    getattr(module, ROTARY).register_forward_hook(cut)


def _of_an_image(module: nn.Module) -> None:
    """Add an image's positions for a part of it.

    The module adds positions where it makes tokens. So it gets the part at its position among
    zeros, and the other tokens are dropped. This costs one layer's work for the whole image.
    """

    def placed(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,), (part, parts) = given, _part(module)
        rows = x.shape[2]
        return (F.pad(x, (0, 0, part * rows, (parts - 1 - part) * rows)),)

    embed = getattr(module, EMBED)
    embed.register_forward_pre_hook(placed)
    embed.register_forward_hook(lambda _, given, made: mine(module, made, 1))


GUIDANCE = 1.0
"""Guidance scale for distilled models, the same for all samples, as trainers set it."""
RATE = 25
"""Frames per second of a video, for positions in seconds."""
Given = Mapping[str, Tensor]
Config = Mapping[str, Any]


def _grid(x: Tensor, height: int, width: int, axes: int) -> Tensor:
    """Return positions [height x width, axes] of packed tokens: row and column after a zero."""
    ids = torch.zeros(height, width, axes, device=x.device)
    ids[..., 1] += torch.arange(height, device=x.device)[:, None]
    ids[..., 2] += torch.arange(width, device=x.device)[None]
    return ids.flatten(0, 1)


def _guidance(x: Tensor, config: Config, usual: bool) -> Tensor | None:
    if not config.get("guidance_embeds", usual):
        return None
    return x.new_full((len(x),), GUIDANCE, dtype=torch.float32)


def flux(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"],
        pooled_projections=c["pooled"], guidance=_guidance(x, config, False),
        img_ids=mine(m, _grid(x, space.height // 2, space.width // 2, 3)),
        txt_ids=mine(m, torch.zeros(space.text, 3, device=x.device)), return_dict=False,
    )[0]  # fmt: skip


def chroma(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    whole = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"],
        img_ids=_grid(x, space.height // 2, space.width // 2, 3),
        txt_ids=torch.zeros(space.text, 3, device=x.device),
        attention_mask=torch.cat([c["mask"], whole], dim=1), return_dict=False,
    )[0]  # fmt: skip


def flux2(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    txt_ids = torch.zeros(space.text, 4, device=x.device)
    txt_ids[:, 3] = torch.arange(space.text, device=x.device)
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"], txt_ids=mine(m, txt_ids),
        img_ids=mine(m, _grid(x, space.height // 2, space.width // 2, 4)),
        guidance=_guidance(x, config, True), return_dict=False,
    )[0]  # fmt: skip


def sd3(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"],
        pooled_projections=c["pooled"], return_dict=False,
    )[0]  # fmt: skip


def pixart(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    added = {"resolution": None, "aspect_ratio": None}
    asked = config.get("use_additional_conditions")
    if config.get("sample_size", 128) == 128 if asked is None else asked:
        size = x.new_tensor([8.0 * space.height, 8.0 * space.width])
        added = {"resolution": size.expand(len(x), 2), "aspect_ratio": x.new_ones(len(x), 1)}
    return m(
        x, encoder_hidden_states=c["text"], timestep=t_B, added_cond_kwargs=added,
        encoder_attention_mask=c["mask"], return_dict=False,
    )[0]  # fmt: skip


def dit(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    labels = c["y"]
    if "drop" in c:
        labels = torch.where(c["drop"], config.get("num_embeds_ada_norm", 1000), labels)
    return m(x, timestep=t_B, class_labels=labels, return_dict=False)[0]


def wan(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"], return_dict=False
    )[0]  # fmt: skip


def hunyuanvideo(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    guidance = _guidance(x, config, True)
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"],
        encoder_attention_mask=c["mask"], pooled_projections=c["pooled"],
        guidance=None if guidance is None else 1000 * guidance, return_dict=False,
    )[0]  # fmt: skip


def qwen(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"],
        encoder_hidden_states_mask=c["mask"],
        img_shapes=[(1, space.height // 2, space.width // 2)] * len(x), return_dict=False,
    )[0]  # fmt: skip


def zimage(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    images = [image[:, None] for image in x.unbind(0)]
    return torch.stack(m(images, t_B, list(c["text"].unbind(0)), return_dict=False)[0])[:, :, 0]


def ltx(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"],
        encoder_attention_mask=c["mask"], num_frames=space.frames, height=space.height,
        width=space.width, rope_interpolation_scale=(8 / RATE, 32, 32), return_dict=False,
    )[0]  # fmt: skip


def cogvideox(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    rotary = None
    if config.get("use_rotary_positional_embeddings", False):
        from diffusers.models.embeddings import get_3d_rotary_pos_embed

        height, width = space.height // 2, space.width // 2
        rotary = get_3d_rotary_pos_embed(
            config.get("attention_head_dim", 64), ((0, 0), (height, width)), (height, width),
            space.frames, device=x.device,
        )  # fmt: skip
        rotary = tuple(rows_of(m, table, 0, space.frames, height) for table in rotary)
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"], image_rotary_emb=rotary,
        return_dict=False,
    )[0]  # fmt: skip


def cogview4(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    size = x.new_tensor([8.0 * space.height, 8.0 * space.width]).expand(len(x), 2)
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"], original_size=size,
        target_size=size, crop_coords=torch.zeros_like(size), return_dict=False,
    )[0]  # fmt: skip


def mochi(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(
        hidden_states=x, timestep=t_B, encoder_hidden_states=c["text"],
        encoder_attention_mask=c["mask"], return_dict=False,
    )[0]  # fmt: skip


def sana(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(
        x, encoder_hidden_states=c["text"], timestep=t_B, encoder_attention_mask=c["mask"],
        return_dict=False,
    )[0]  # fmt: skip


def lumina2(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(x, t_B, c["text"], c["mask"], return_dict=False)[0]


def aura(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return m(x, encoder_hidden_states=c["text"], timestep=t_B, return_dict=False)[0]


CALLS: dict[str, Callable[..., Tensor]] = {
    call.__name__: call
    for call in (
        *(flux, chroma, flux2, sd3, pixart, dit, wan, hunyuanvideo, qwen, zimage, ltx, cogvideox),
        *(cogview4, mochi, sana, lumina2, aura),
    )
}
"""``Family.call`` -> function."""


class _Whole(TorchFunctionMode):
    """Torch-function mode that returns values of an all-true mask for tensors without values."""

    def __init__(self, text: int) -> None:
        super().__init__()
        self.text = text

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.item):  # lengths, summed from the mask
            return [self.text] * len(args[0]) if args[0].ndim else self.text
        if func is torch.nonzero:
            return torch.arange(args[0].numel(), device=args[0].device)[:, None]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def masks_are_whole(x: Tensor, text: int) -> Iterator[None]:
    """Within this context, a class can read the values of its mask even if tensors have none.

    In a prediction the mask covers all ``text`` tokens. Otherwise nothing changes.
    """
    valueless = type(x) is not Tensor or x.device.type == "meta"
    with _Whole(text) if valueless else contextlib.nullcontext():
        yield


# ---- initial weights ----
# The library's classes sample their weights during construction, in float32, and compute positions
# too, some of which are not buffers. So a model is built with memory only for these, and each
# weight is sampled on its final device (``strategies.initial``). Weights are normal with a standard
# deviation of 0.02, gains are one. No weight starts at zero, so that the first steps move every
# weight. Only memory, speed and parity of these models are measured, not their training quality.


SPREAD = 0.02


class _Hollow(TorchFunctionMode):
    """Torch-function mode: layers allocate their weights on meta, and everything else as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def shell(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that ``make`` makes, with its parameters on meta."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _Hollow():
        module = make()
    initial.replace(module, lambda p: nn.Parameter(p.detach().to("meta"), p.requires_grad))
    return module


def draws(seed: int) -> Draw:
    """Return each initial weight from ``seed`` and its name: see ``Subject.draws``."""

    def draw(name: str, like: Tensor) -> Tensor:
        if like.ndim == 1 and name.endswith("weight"):
            return torch.ones(like.shape)
        chance = initial.keyed(seed, name)
        return SPREAD * torch.randn(like.shape, generator=chance)

    return draw
