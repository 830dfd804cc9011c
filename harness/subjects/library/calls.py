"""One prediction of each family of the library's classes: tensors as its ``forward`` wants them.

Each function takes the model (wrapped by an engine or bare), a noisy sample, the time as the model
is told it, the conditions of ``families``, the configuration and the size; it returns the output in
the layout of the sample. Positions are made anew in each step, as the library's trainers do.

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

# ---- stripes ----
# A rank's part of a sample in the library's classes: which one, and the positions of its tokens.
#
# Where a class is given positions with its tokens, those of the part are given. What it makes
# inside from the size of what came in is made of the whole size, and cut.


PART = "part_of_samples"
ROTARY = "rope"
"""The module that makes a video's positions, (cosines, sines): [1, F H W, 1, K] from the size of
what came in, or [B, F H W, K] from sizes that it is told."""
EMBED = "pos_embed"
"""The module that makes an image's tokens [B, T, D], with positions, of latents [B, C, H, W]."""


def mine(model: Any, tokens: Tensor, axis: int = 0) -> Tensor:
    """This rank's part of something along the axis of its tokens, as ``take_part`` said."""
    part, parts = _part(model)
    return tokens if parts == 1 else tokens.chunk(parts, dim=axis)[part]


def rows_of(model: Any, table: Tensor, axis: int, frames: int, rows: int) -> Tensor:
    """The same of a stripe of rows of each frame, where ``axis`` has the tokens of all frames, of
    so many rows each."""
    part, parts = _part(model)
    if parts == 1:
        return table
    of_rows = table.unflatten(axis, (frames, rows, -1)).chunk(parts, dim=axis + 1)[part]
    return of_rows.flatten(axis, axis + 2)


def take_part(module: nn.Module, part: int, parts: int, stripes: str) -> None:
    """Have the bare ``module`` take the ``part``-th of so many equal parts from now on, which are
    ``stripes`` of what ``Family.stripes`` says."""
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
        """In the place of the part, something of the whole's shape: no more is asked of it."""
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
    """Its positions are added where its tokens are made, so tokens are made of the part in its
    place among zeros, and the others are left out: what one layer costs once more for each."""

    def placed(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,), (part, parts) = given, _part(module)
        rows = x.shape[2]
        return (F.pad(x, (0, 0, part * rows, (parts - 1 - part) * rows)),)

    embed = getattr(module, EMBED)
    embed.register_forward_pre_hook(placed)
    embed.register_forward_hook(lambda _, given, made: mine(module, made, 1))


GUIDANCE = 1.0
"""The scale that a distilled model is told, of all samples: as trainers give it."""
RATE = 25
"""Frames a second of a video, for positions that are in seconds."""
Given = Mapping[str, Tensor]
Config = Mapping[str, Any]


def _grid(x: Tensor, height: int, width: int, axes: int) -> Tensor:
    """Positions [height x width, axes] of packed tokens: row and column behind a zero."""
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
"""``Family.call`` -> the function."""


class _Whole(TorchFunctionMode):
    """Answers what a class asks of the values of a mask, where tensors have none: all are true."""

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
    """For a class that reads the values of its mask: where tensors have none (a prediction), they
    are answered; ``text`` tokens, all of them. Elsewhere nothing is changed."""
    valueless = type(x) is not Tensor or x.device.type == "meta"
    with _Whole(text) if valueless else contextlib.nullcontext():
        yield


# ---- start ----
# First weights of the library's models: drawn by their names, with all that is computed in place.
#
# The library's classes draw their weights while they are made, in float32, and compute positions
# by the way, some of which are no buffers. So a model is made with memory for these alone, and
# each weight is drawn where it will live (``strategies.initial``). Weights are normal with a
# standard deviation of 0.02, gains one: nothing starts at zero, so that the first steps move every
# weight. What these models learn from there is of no interest; memory, speed and parity are.


SPREAD = 0.02


class _Hollow(TorchFunctionMode):
    """What layers allocate for their weights is made on meta, everything else where it would be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def shell(make: Callable[[], nn.Module]) -> nn.Module:
    """The model that ``make`` makes, its parameters on meta."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), _Hollow():
        module = make()
    initial.replace(module, lambda p: nn.Parameter(p.detach().to("meta"), p.requires_grad))
    return module


def draws(seed: int) -> Draw:
    """Each first weight from ``seed`` and its name: see ``Subject.draws``."""

    def draw(name: str, like: Tensor) -> Tensor:
        if like.ndim == 1 and name.endswith("weight"):
            return torch.ones(like.shape)
        chance = initial.keyed(seed, name)
        return SPREAD * torch.randn(like.shape, generator=chance)

    return draw
