"""Forward calls of the library's model families, shared samples, and initial weights.

Each call takes the model (wrapped by an engine or bare), a noisy sample, the time in the model's
units, the conditions of ``families``, the configuration and the size. It returns the output in the
layout of the sample. Positions are computed in each step, as the library's trainers do.

Shape suffixes: B batch, T tokens.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from harness.subjects.library.families import FPS, REFERENCES, Space
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
"""Module that makes an image's tokens [B, T, D], with positions, from latents [B, C, H, W]. Of
Qwen-Image: that computes positions of an image and its text, whose length is ``LENGTH``."""
LENGTH = "max_txt_seq_len"


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
    rotary, embed = getattr(module, ROTARY, None), getattr(module, EMBED, None)
    if known:
        return
    if rotary is not None and stripes == "height":
        _of_rows(module, rotary)
    elif rotary is not None:
        _cut_outputs(module, rotary, 1)
    elif embed is not None and stripes == "height":
        _of_an_image(module, embed)
    elif embed is not None and LENGTH in inspect.signature(embed.forward).parameters:

        def whole(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return given, {**named, LENGTH: named[LENGTH] * _part(module)[1]}

        embed.register_forward_pre_hook(whole, with_kwargs=True)
        _cut_outputs(module, embed, 0)


def _part(model: Any) -> tuple[int, int]:
    return getattr(getattr(model, "module", model), PART, (0, 1))


def _cut_outputs(module: nn.Module, layer: nn.Module, axis: int) -> None:
    """Cut the positions that ``layer`` computes of whole samples."""

    def cut(_: Any, given: tuple[Any, ...], made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(mine(module, table, axis) for table in made)

    layer.register_forward_hook(cut)


def _of_rows(module: nn.Module, rotary: Any) -> None:
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


def _of_an_image(module: nn.Module, embed: nn.Module) -> None:
    """Add an image's positions for a part of it.

    The module adds positions where it makes tokens. So it gets the part at its position among
    zeros, and the other tokens are dropped. This costs one layer's work for the whole image.
    """

    def placed(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,), (part, parts) = given, _part(module)
        rows = x.shape[2]
        return (F.pad(x, (0, 0, part * rows, (parts - 1 - part) * rows)),)

    embed.register_forward_pre_hook(placed)
    embed.register_forward_hook(lambda _, given, made: mine(module, made, 1))


GUIDANCE = 1.0
"""Guidance scale for distilled models, the same for all samples, as trainers set it."""
RATE = 25
"""Frames per second of a video, for positions in seconds."""
IMAGE_AT, IMAGE_ROLE, TEXT_ROLE = 65536, 2, 3
"""Ideogram 4's first position of an image, and its marks of image and text
(diffusers, transformer_ideogram4.py)."""
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


NAMES = {
    "text": "encoder_hidden_states",
    "mask": "encoder_attention_mask",
    "pooled": "pooled_projections",
}
"""Condition -> name that most classes give it."""


def usual(m: Any, x: Tensor, t_B: Tensor, c: Given, *of_sample: Any, **more: Any) -> Any:
    """Return the output of a class that takes sample, time and conditions by the usual names, and
    ``more``. It is the whole call of a family that names no other."""
    given = {NAMES[name]: value for name, value in c.items() if name in NAMES}
    return m(hidden_states=x, timestep=t_B, **given, **more, return_dict=False)[0]


def flux(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    return usual(
        m, x, t_B, c, guidance=_guidance(x, config, False),
        img_ids=mine(m, _grid(x, space.height // 2, space.width // 2, 3)),
        txt_ids=mine(m, torch.zeros(space.text, 3, device=x.device)),
    )  # fmt: skip


def chroma(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    whole = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return usual(
        m, x, t_B, {"text": c["text"]}, img_ids=_grid(x, space.height // 2, space.width // 2, 3),
        txt_ids=torch.zeros(space.text, 3, device=x.device),
        attention_mask=torch.cat([c["mask"], whole], dim=1),
    )  # fmt: skip


def flux2(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    txt_ids = torch.zeros(space.text, 4, device=x.device)
    txt_ids[:, 3] = torch.arange(space.text, device=x.device)
    return usual(
        m, x, t_B, c, txt_ids=mine(m, txt_ids),
        img_ids=mine(m, _grid(x, space.height // 2, space.width // 2, 4)),
        guidance=_guidance(x, config, True),
    )  # fmt: skip


def pixart(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    added = {"resolution": None, "aspect_ratio": None}
    asked = config.get("use_additional_conditions")
    if config.get("sample_size", 128) == 128 if asked is None else asked:
        size = x.new_tensor([8.0 * space.height, 8.0 * space.width])
        added = {"resolution": size.expand(len(x), 2), "aspect_ratio": x.new_ones(len(x), 1)}
    return usual(m, x, t_B, c, added_cond_kwargs=added)


def dit(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    labels = c["y"]
    if "drop" in c:
        labels = torch.where(c["drop"], config.get("num_embeds_ada_norm", 1000), labels)
    return m(x, timestep=t_B, class_labels=labels, return_dict=False)[0]


def hunyuanvideo(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    guidance = _guidance(x, config, True)
    return usual(m, x, t_B, c, guidance=None if guidance is None else 1000 * guidance)


def hunyuanvideo15(
    m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space
) -> Tensor:
    shape = list(x.shape)
    shape[1] = config.get("in_channels", 65) - shape[1]  # the latent of a first frame, and its mask
    return usual(
        m, torch.cat([x, x.new_zeros(shape)], 1), t_B, c, encoder_hidden_states_2=c["glyphs"],
        encoder_attention_mask_2=c["glyph_mask"], image_embeds=c["image"],
    )  # fmt: skip


def qwen(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    shape = (1, space.height // 2, space.width // 2)
    count = config.get(REFERENCES, 0)
    out = m(
        hidden_states=torch.cat([x, c["reference"]], 1) if count else x, timestep=t_B,
        encoder_hidden_states=c["text"], encoder_hidden_states_mask=c["mask"],
        img_shapes=[[shape] * (1 + count)] * len(x), return_dict=False,
    )[0]  # fmt: skip
    return out[:, : x.shape[1]] if count else out


def qwen21(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    """Return the output of the image's tokens, which follow those of the text. The encoder has one
    slot for each 2 x 2 of them."""
    slots = torch.zeros(len(x), space.text + x.shape[1] // 4, dtype=torch.bool, device=x.device)
    slots[:, space.text :] = True
    with _Follows(space.text, x.shape[1]) if _valueless(x) else contextlib.nullcontext():
        shapes = [[(1, space.height, space.width)]] * len(x)
        return usual(m, x, t_B, c, img_mask=slots, img_shapes=shapes)[:, space.text :]


def zimage(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    images = [image[:, None] for image in x.unbind(0)]
    return torch.stack(m(images, t_B, list(c["text"].unbind(0)), return_dict=False)[0])[:, :, 0]


def ltx(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    scale, frames = (8 / RATE, 32, 32), space.frames
    size = {"num_frames": frames, "height": space.height, "width": space.width}
    return usual(m, x, t_B, c, rope_interpolation_scale=scale, **size)


def cogvideox(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    per_patch = config.get("patch_size_t") or 1
    missing = -x.shape[1] % per_patch
    if missing:  # as its trainers fill a patch: with copies of the first frame
        x = torch.cat([x[:, :1].expand(-1, missing, -1, -1, -1), x], dim=1)
    rotary = None
    if config.get("use_rotary_positional_embeddings", False):
        frames, rows = x.shape[1] // per_patch, space.height // 2
        tables = _video_rotary(config, frames, rows, space.width // 2, x.device)
        rotary = tuple(rows_of(m, table, 0, frames, rows) for table in tables)
    return usual(m, x, t_B, c, image_rotary_emb=rotary)[:, missing:]


def _video_rotary(
    config: Config, frames: int, rows: int, columns: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return CogVideoX's (cosines, sines) [frames x rows x columns, K]; 1.5 counts its positions
    from a corner, and 1.0 relative to its usual size."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    width, size = config.get("attention_head_dim", 64), (rows, columns)
    if config.get("patch_size_t") is None:
        crop = ((0, 0), size)
        return get_3d_rotary_pos_embed(width, crop, size, frames, device=device)
    most = (config.get("sample_height", 60) // 2, config.get("sample_width", 90) // 2)
    return get_3d_rotary_pos_embed(
        width, None, size, frames, grid_type="slice", max_size=most, device=device
    )


def cogview4(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    size = x.new_tensor([8.0 * space.height, 8.0 * space.width]).expand(len(x), 2)
    corner = torch.zeros_like(size)
    return usual(m, x, t_B, c, original_size=size, target_size=size, crop_coords=corner)


def krea2(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    image = _grid(x, space.height // 2, space.width // 2, 3)
    places = torch.cat([image.new_zeros(space.text, 3), image])
    return usual(m, x, t_B, c, position_ids=places)


def ideogram4(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    image = _grid(x, space.height // 2, space.width // 2, 3) + IMAGE_AT
    text = torch.arange(space.text, device=x.device)[:, None].expand(-1, 3)
    places = torch.cat([text, image]).expand(len(x), -1, -1)
    roles = torch.full(places.shape[:2], IMAGE_ROLE, device=x.device)
    roles[:, : space.text] = TEXT_ROLE
    return m(
        F.pad(x, (0, 0, space.text, 0)), timestep=t_B.to(x.dtype), position_ids=places,
        encoder_hidden_states=F.pad(c["text"], (0, 0, 0, x.shape[1])),
        segment_ids=torch.ones_like(roles), indicator=roles, return_dict=False,
    )[0][:, space.text :]  # fmt: skip


def ltx2(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    seen = space.frames * space.height * space.width
    return torch.cat(m(
        x[:, :seen], audio_hidden_states=x[:, seen:], timestep=t_B, sigma=t_B,
        encoder_hidden_states=c["text"], encoder_attention_mask=c["mask"],
        audio_encoder_hidden_states=c["audio_text"], audio_encoder_attention_mask=c["mask"],
        num_frames=space.frames, height=space.height, width=space.width, fps=FPS,
        audio_num_frames=x.shape[1] - seen, return_dict=False,
    ), dim=1)  # fmt: skip


def hidream(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    out = m(
        x, timesteps=t_B, encoder_hidden_states_t5=c["text"], pooled_embeds=c["pooled"],
        encoder_hidden_states_llama3=c["llama"].transpose(0, 1), return_dict=False,
    )[0]  # fmt: skip
    # In training the class returns patches: [B, C, all rows and columns of patches, 4].
    rows, columns = space.height // 2, space.width // 2
    patches = out[:, :, : rows * columns].unflatten(2, (rows, columns)).unflatten(4, (2, 2))
    return -patches.transpose(3, 4).flatten(4).flatten(2, 3)


def minimax_h3(m: Any, x: Tensor, t_B: Tensor, c: Given, config: Config, space: Space) -> Tensor:
    rows = space.frames * space.height * space.width // 4
    wide = 4 * config.get("in_channels", 24)
    seen = rows * wide // x.shape[2]
    heard = x.shape[1] - seen
    text, sound, video = torch.arange(space.text + heard + rows, device=x.device).split(
        (space.text, heard, rows)
    )
    marks = [torch.full_like(part, mark) for part, mark in ((text, 1), (sound, 2), (video, 0))]
    out, heard_out = m(
        x[:, :seen].reshape(len(x), rows, wide), audio_hidden_states=x[:, seen:],
        encoder_hidden_states=c["text"], timestep=t_B[:1].repeat(2), token_tags=torch.cat(marks),
        timestep_indices=torch.cat(marks) // 2, position_ids=_packed(space, sound, x.device),
        video_indices=video, audio_indices=sound, text_indices=text, return_dict=False,
    )  # fmt: skip
    return torch.cat([out.reshape(len(x), seen, x.shape[2]), heard_out], dim=1)


def _packed(space: Space, sound: Tensor, device: torch.device) -> Tensor:
    """Return MiniMax-H3's positions [text, sound, video; 3]: time, row, column. Time is in latents
    of sound; of five frames of a latent, the first lasts a quarter of the others."""
    text = torch.arange(space.text, device=device)
    lasts = (5 / 3) * torch.tensor([1.0, 4, 4, 4, 4], device=device).repeat(-(-space.frames // 5))
    begins = space.text + lasts.cumsum(0)[: space.frames] - lasts[: space.frames]
    side = math.sqrt(space.height * space.width)
    rows, columns = (
        16 * (1 - n / side) + 64 / side * torch.arange(n // 2, device=device)
        for n in (space.height, space.width)
    )
    video = torch.stack(torch.meshgrid(begins, rows, columns, indexing="ij"), -1).flatten(0, 2)
    when = space.text + torch.arange(len(sound) // 2, device=device).repeat(2)
    where = columns[:1].repeat(len(sound))
    where[len(sound) // 2 :] = columns[-1]
    heard = torch.stack([when, torch.zeros_like(where), where], 1)
    return torch.cat([F.pad(text[:, None].float(), (0, 2)), heard, video])


class _Whole(TorchFunctionMode):
    """Torch-function mode that returns values of an all-true mask for tensors without values.

    A mask's inverse selects nothing. A condition read as a number is no zero.
    """

    def __init__(self, text: int) -> None:
        super().__init__()
        self.text = text
        self.empty: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.item):  # lengths, summed from the mask
            return [self.text] * len(args[0]) if args[0].ndim else self.text
        if func is torch.nonzero:
            return torch.arange(args[0].numel(), device=args[0].device)[:, None]
        if func is torch.Tensor.__bool__:  # whether all of an image are zeros
            return False
        if func is torch.Tensor.__getitem__ and _is_mask(args[1]):
            none = any(args[1] is mask for mask in self.empty)
            rows = torch.arange(0 if none else len(args[1]), device=args[1].device)
            return func(args[0], rows)
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__invert__:
            self.empty.append(out)
        return out


def _is_mask(index: Any) -> bool:
    return getattr(index, "dtype", None) is torch.bool


def _valueless(x: Tensor) -> bool:
    return type(x) is not Tensor or x.device.type == "meta"


def masks_are_whole(x: Tensor, text: int) -> Any:
    """Return a context within which a class can read the values of its mask even if tensors have
    none, as in a prediction: it covers all ``text`` tokens. Otherwise nothing changes."""
    return _Whole(text) if _valueless(x) else contextlib.nullcontext()


class _Follows(TorchFunctionMode):
    """Torch-function mode in which masks without values select an image's tokens, which follow
    those of the text in one sequence; Qwen-Image 2.1 reads them as positions and as lists."""

    def __init__(self, text: int, image: int) -> None:
        super().__init__()
        self.text, self.image = text, image

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, whole = kwargs or {}, self.text + self.image
        first: Any = args[0] if args else None
        if func in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
            kwargs = {**kwargs, "output_size": whole}
        if func is torch.Tensor.tolist:
            return self._listed(first)
        if func is torch.Tensor.unbind and first.ndim == 1:  # fake tensors' tolist
            return [
                SimpleNamespace(item=lambda value=value: value) for value in self._listed(first)
            ]
        if func is torch.Tensor.__int__:  # tokens before the image
            return self.text
        if func is torch.Tensor.nonzero:
            return (torch.arange(self.text, whole, device=first.device),)
        if func is torch.Tensor.__setitem__:
            args = (first, self._placed(args[1], first.device), args[2])
        return func(*args, **kwargs)

    def _listed(self, tokens: Tensor) -> list[Any]:
        """Return whether each token is the image's, or the number of its image; text has -1."""
        if tokens.dtype is torch.bool:
            return [False] * self.text + [True] * self.image
        return [-1] * len(tokens)

    def _placed(self, index: Any, device: torch.device) -> Any:
        """Return an index with positions in place of a mask."""
        if isinstance(index, tuple):
            return tuple(self._placed(one, device) for one in index)
        if not _is_mask(index):
            return index
        return torch.arange(self.text, self.text + self.image, device=device)


class _Even(TorchFunctionMode):
    """Torch-function mode in which a mask without values selects an equal share of the rows."""

    def __init__(self, shares: int) -> None:
        super().__init__()
        self.shares = shares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexes = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        if indexes and _is_mask(args[1]):
            mask = args[1]
            rows = torch.arange(-(-len(mask) // self.shares), device=mask.device)
            args = (args[0], rows, *args[2:])
        return func(*args, **(kwargs or {}))


def route_evenly(module: nn.Module) -> None:
    """Let experts take equal shares of the tokens where a router's values are unknown.

    All experts together take as many tokens in any case. So a prediction's memory and FLOPs depend
    on the shares only while one expert runs.
    """
    for part in module.modules():
        experts = getattr(part, "experts", None)
        if experts is not None and hasattr(part, "gate"):
            part.forward = functools.partial(_routed, part.forward, len(experts))


def _routed(forward: Callable[[Tensor], Tensor], experts: int, x: Tensor) -> Tensor:
    with _Even(experts) if _valueless(x) else contextlib.nullcontext():
        return forward(x)


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
