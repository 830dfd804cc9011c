"""Subject for a class of the diffusers library with a configuration. No torch at import."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from harness.json_files import read_json
from harness.subjects.library import families
from harness.subjects.library.families import FAMILIES, Family, Space
from strategies.base import BadInput, Sizes
from strategies.subject import DataFacts, Shaping, Stripes, Subject, surveyed
from strategies.survey import Survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from strategies.initial import Draw


PLANNED = ("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel")
"""Classes with a plan of diffusers 0.42 (``_tp_plan``) that were trained by it in miniature."""


# ---- sample size ----
# A spec gives the size in pixels, frames and tokens.


LARGEST_SIDE, MOST_LATENTS = 8192, 1024
"""Limits of a search: pixels of the shorter side, and latents of a video."""


def space_of(shaping: Shaping, family: Family, usual: Mapping[str, Any], down: int) -> Space:
    """Return the size of a sample's latent.

    Raises:
        BadInput: sides or frames that the model does not take; names the nearest.
    """
    height, width = _sides(shaping.resolution or usual.get("resolution", family.resolution))
    step = down * family.tile
    for side in (height, width):
        if side < step or side % step:
            near = max(step, round(side / step) * step)
            raise BadInput(
                f"resolution is {shaping.resolution}; the model takes sides that are multiples of "
                f"{step} pixels, as {near}"
            )
    frames = shaping.frames or usual.get("frames", family.frames)
    latents = family.latents_of(frames)
    if not latents:
        first, more = (counts[0] for counts in family.lengths)
        near = first + more * max(1, round((frames - first) / max(1, more)))
        what = f"{first} + a multiple of {more}, as {near}" if more else "images: 1"
        raise BadInput(f"frames is {frames}; the model takes {what}")
    if shaping.text and not family.text:
        raise BadInput(f"text is {shaping.text}; the model reads no text: leave --text out")
    text = shaping.text or usual.get("text", family.text_tokens)
    return Space(latents, height // down, width // down, text)


def larger(
    axis: str, space: Space, family: Family, down: int
) -> list[tuple[Mapping[str, Any], float]]:
    """Return samples that grow from the smallest one, in the proportions of ``space``.

    Each is (fields of a spec that request it, elements in multiples of ``space``).
    """
    if axis == "frames":
        (frames, shortest), (more, each) = family.lengths
        steps = range(MOST_LATENTS // each if more else 0)
        return [
            ({"frames": frames + more * n}, (shortest + each * n) / space.frames) for n in steps
        ]
    if axis != "resolution":
        return []
    short, long = sorted((space.height, space.width))
    found: list[tuple[Mapping[str, Any], float]] = []
    for tiles in range(1, LARGEST_SIDE // (down * family.tile) + 1):
        pair = (tiles * family.tile, round(tiles * long / short) * family.tile)
        height, width = pair if space.height <= space.width else pair[::-1]
        pixels = f"{height * down}x{width * down}"
        found.append(({"resolution": pixels}, height * width / (space.height * space.width)))
    return found


def _sides(text: str) -> tuple[int, int]:
    """Parse ``1024`` or ``480x832`` into height and width in pixels."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip())
    if not match:
        raise BadInput(f"resolution is {text!r}; write pixels, as 1024, or HEIGHTxWIDTH")
    return int(match[1]), int(match[2] or match[1])


SAMPLES = 8
"""Synthetic samples. Their values do not affect a measurement, and one text takes megabytes."""
TWICE = "dual_attention_layers"
LAYERS = "llama_layers"
"""Key of the configuration with the layer of the text encoder that each block takes."""
LINEARS = Path(__file__).with_name("linears.json")
"""Names of the presets' linear layers, as their surveys find them (tests/subjects)."""


@dataclass(frozen=True, kw_only=True)
class Library(Subject):
    """A preset, or a class with a configuration; built from known facts, without weights.

    ``kind`` is the class; ``settings`` are the differences from its defaults, as JSON. ``space`` is
    the size of a sample; ``factor`` is the pixels per side of one element of a latent.
    ``stands_for`` has the depths of the model
    that this one represents in a prediction; empty: itself.
    """

    needs: ClassVar[tuple[str, ...]] = ("diffusers",)
    brings_samples: ClassVar[bool] = True

    kind: str
    settings: str
    space: Space
    factor: int
    stands_for: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Library:
        known = families.find(fields["model"], shaping.config, shaping.set)
        family, down = known.family, known.usual.get("down", known.family.down)
        if shaping.data != "synthetic":
            raise BadInput(
                f"data is {shaping.data}, and model {fields['model']} takes samples of its own "
                "layout; give --data synthetic (and --resolution, --frames, --text)"
            )
        space = space_of(shaping, family, known.usual, down)
        sample = family.sample(known.config, space)
        channels = family.value(known.config, family.channels)
        facts = DataFacts(SAMPLES, channels, space.width, 1, sample)
        settings = json.dumps(dict(known.config), sort_keys=True)
        given = fields | {"data": facts, "kind": family.name, "settings": settings}
        return cls(**given, space=space, factor=down)

    # ---- identity ----

    @property
    def family(self) -> Family:
        """Return the family of its class."""
        return FAMILIES[self.kind]

    @property
    def config(self) -> dict[str, Any]:
        """Return its configuration, without the class's defaults."""
        return json.loads(self.settings)

    @property
    def parts(self) -> dict[str, str]:  # type: ignore[override]  # of each configuration
        has = {
            "tp_plan": self.kind in PLANNED,
            "stripes": self.family.shares(self.config),
            "sized": len(self.depths) == 1,
            "layers": all(self.depths.values()),
            "head": self.family.head,
        }
        return {part: path if isinstance(path, str) else "" for part, path in has.items() if path}

    @property
    def objectives(self) -> tuple[str, ...]:  # type: ignore[override]  # of each class
        return self.family.objectives

    @property
    def random_blocks(self) -> bool:  # type: ignore[override]  # of each configuration
        """Return whether its blocks use dropout, which is off unless its configuration sets it."""
        return bool(self.config.get("dropout", 0))

    @property
    def one_at_a_time(self) -> bool:  # type: ignore[override]  # of each class
        return self.family.one_time

    @property
    def name(self) -> str:
        return self.model

    @property
    def identity(self) -> str:
        facts = (self.kind, self.settings, tuple(self.space))
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @property
    def size_in_words(self) -> str:
        """Return the size of a sample for a table's header."""
        space, down = self.space, self.factor
        sides = f"{space.height * down}x{space.width * down}"
        video = f" of {self.family.frames_of(space.frames)} frames" if self.family.every else ""
        return f"{sides}{video}" + (f", {space.text} tokens of text" if self.family.text else "")

    @property
    def depths(self) -> dict[str, int]:
        """Return key of the configuration -> number of its blocks, in the order of the groups.

        The blocks of SD3.5 with two attentions are the first ones, and a group of their own. If
        they are others, return nothing: no shallow model has the same order of blocks.
        """
        keys = filter(None, self.family.depths.values())
        counts = {key: self.family.value(self.config, key) for key in keys}
        twice = self.config.get(TWICE, ())
        if not twice:
            return counts
        if list(twice) != list(range(len(twice))):
            return {}
        return {TWICE: len(twice), "num_layers": counts["num_layers"] - len(twice)}

    @property
    def depth(self) -> int:
        keys = [key or self.family.refiners for key in self.family.depths.values()]
        return sum(self.family.value(self.config, key) for key in keys)

    def deep(self, depths: Mapping[str, int]) -> Library:
        config = {**self.config, **depths}
        if TWICE in depths:
            config[TWICE] = list(range(depths[TWICE]))
            config["num_layers"] = depths[TWICE] + depths["num_layers"]
        if LAYERS in config:
            config[LAYERS] = _of_blocks(config[LAYERS], self.depths, depths)
        for_depths = self.stands_for or tuple(self.depths.items())
        settings = json.dumps(config, sort_keys=True)
        return dataclasses.replace(self, settings=settings, stands_for=for_depths)

    def sized(self, depth: int, width: int, heads: int) -> Library:
        if width or heads:
            raise BadInput(
                f"the width and the heads of {self.model} are its configuration's; give depth alone"
            )
        (key,) = self.depths
        found = self.deep({key: depth or self.depths[key]})
        return dataclasses.replace(found, stands_for=self.stands_for)

    def sizes_of(self, module: nn.Module) -> Sizes:
        found, meant = super().sizes_of(module), dict(self.stands_for)
        more = sum(
            (count - self.depths[key]) * self._of_a_block(module, key)
            for key, count in meant.items()
        )
        return found._replace(total=found.total + more, here=found.total) if more else found

    def _of_a_block(self, module: nn.Module, key: str) -> int:
        """Return the trained elements of a block that ``key`` counts, and of what it has beside."""
        beside = getattr(module, self.family.beside)[:1] if self.family.beside else ()
        parts = (self.block_of(module, key), *beside)
        return sum(p.numel() for part in parts for p in part.parameters() if p.requires_grad)

    def block_of(self, module: nn.Module, key: str) -> nn.Module:
        """Return the first of the blocks that ``key`` counts."""
        if TWICE in self.depths:
            first = 0 if key == TWICE else self.depths[TWICE]
            return module.transformer_blocks[first]
        names = [name for name, counted in self.family.depths.items() if counted == key]
        return getattr(module, names[0])[0]

    def check(self) -> None:
        # Without rotary embeddings CogVideoX adds one table for all tokens, text and video.
        if self.kind == "CogVideoXTransformer3DModel" and not self.config.get(
            "use_rotary_positional_embeddings", False
        ):
            fixed = self.config.get("max_text_seq_length", 226)
            if self.space.text != fixed:
                raise BadInput(
                    f"text is {self.space.text}; model {self.model} takes {fixed} tokens of text"
                )

    def make(self) -> nn.Module:
        from harness.subjects.library import calls
        from strategies import initial

        try:
            taken = {k: v for k, v in self.config.items() if k not in self.family.own}
            whole = functools.partial(_class(self.kind), **taken)
            module = calls.shell(whole) if initial.is_valueless() else whole()
        except (TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"model {self.model}: {self.kind} cannot be built: {error}") from error
        for part in module.modules():
            if hasattr(part, "dropout_prob"):
                # The batch withholds labels, the same on every engine.
                part.dropout_prob = 0.0
        if self.family.routed:
            calls.route_evenly(module)
        return module

    def draws(self, seed: int, init: str) -> Draw:
        from harness.subjects.library import calls

        return calls.draws(seed)

    def small(self) -> Library:
        """Return a model with one block of each kind and the smallest sample."""
        tile, text = max(self.family.tile, 2), min(self.space.text, 8)
        space = Space(1, tile, tile, text)
        shallow = dataclasses.replace(self.deep(dict.fromkeys(self.depths, 1)), stands_for=())
        sample = self.family.sample(self.config, space)
        data = dataclasses.replace(self.data, input_size=tile, shape=sample)
        return dataclasses.replace(shallow, space=space, data=data)

    def samples_up(self, axis: str) -> list[tuple[Mapping[str, Any], float]]:
        return larger(axis, self.space, self.family, self.factor)

    # ---- facts ----

    @property
    def survey(self) -> Survey:
        group, key = next(iter(self.family.depths.items()))
        last = self.family.value(self.config, key) - 1 if self.family.unread else 0
        return surveyed(self, tuple(f"{group}.{last}.{name}" for name in self.family.unread))

    @property
    def lent(self) -> tuple[str, ...]:
        return self.family.lends  # without torch: every launch of FSDP2 asks for it

    @property
    def _counted(self) -> Mapping[str, Any]:
        """Return what files tell of a preset, without torch; empty if the configuration differs."""
        known = families.table().get(self.model)
        if not known or known.config != self.config:
            return {}
        return {**known.parameters, "linears": _linears().get(self.model)}

    @property
    def parameters(self) -> int:
        return self._counted.get("built") or super().parameters

    @property
    def block_parameters(self) -> tuple[int, ...]:
        each = self._counted.get("blocks")
        if not each:
            return super().block_parameters
        counts = zip(each, self.depths.values(), strict=True)
        return tuple(size for size, count in counts for _ in range(count))

    @property
    def linears(self) -> tuple[str, ...]:
        runs = self._counted.get("linears")
        if not runs:
            return super().linears
        return tuple(
            f"{group}.{index}.{end}"
            for group, first, last, ends in runs
            for index in range(first, last + 1)
            for end in ends
        )

    # ---- modules ----

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        return [getattr(module, name) for name in self.family.depths]

    # ---- samples and output ----

    @property
    def stripes(self) -> Stripes:
        if self.family.stripes == "height":
            axis, rows = -2, self.space.height // self.family.tile
        else:
            axis, rows = 1, self.data.sample_shape[0]
        return Stripes(axis, math.gcd(rows, self.space.text) if self.family.joint else rows)

    def take_part(self, module: nn.Module, part: int, parts: int) -> None:
        from harness.subjects.library import calls

        calls.take_part(module, part, parts, self.family.stripes)

    def samples(self) -> dict[str, Tensor]:
        import torch

        chance = torch.Generator().manual_seed(0)

        def made(name: str, shape: tuple[int, ...]) -> Tensor:
            if _kind(name) is torch.bool:
                return torch.ones((SAMPLES, *shape), dtype=torch.bool)
            if name == "y":
                classes = self.family.value(self.config, "num_embeds_ada_norm")
                return torch.randint(classes, (SAMPLES, *shape), generator=chance)
            return torch.randn((SAMPLES, *shape), generator=chance)

        shapes = self.family.conditions(self.config, self.space)
        return {n: made(n, s) for n, s in {"x": self.data.sample_shape, **shapes}.items()}

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        import torch

        given = {
            name: torch.ones((1, *shape), dtype=_kind(name), device=device)
            for name, shape in self.family.conditions(self.config, self.space).items()
        }
        x = torch.zeros((1, *self.data.sample_shape), device=device)
        times = torch.long if self.family.time == "steps" else torch.float32
        return x, torch.zeros(1, dtype=times, device=device), given

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        from harness.subjects.library import calls

        family, kept = self.family, _kept_in(model)
        given = {n: c.to(kept) if c.is_floating_point() else c for n, c in conditions.items()}
        if family.joint:
            of_text = ("text", "mask")[: 1 + family.masked]
            given |= {name: calls.mine(model, given[name], axis=1) for name in of_text}
        words = family.time.split("_")
        falling = words[0] == "falling"
        told_B = (1 - t_B if falling else t_B) * (1000 if len(words) > 1 else 1)
        call = getattr(calls, family.call)
        masks = calls.masks_are_whole(x, self.space.text) if family.whole_masks else None
        with masks or contextlib.nullcontext():
            out = call(model, x.to(kept), told_B, given, self.config, self.space)
        return -out if falling else out


def _kind(condition: str) -> torch.dtype:
    """Return the type of a condition: masks, labels, and floats."""
    import torch

    return torch.bool if "mask" in condition else torch.long if condition == "y" else torch.float32


def _class(name: str) -> Any:
    """Return a class of diffusers, without the import's warnings about optional packages."""
    silent = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import diffusers

        return getattr(diffusers, name)
    finally:
        logging.disable(silent)


def _of_blocks(each: Sequence[int], was: Mapping[str, int], now: Mapping[str, int]) -> list[int]:
    """Return one entry per block of groups of other depths; a deeper group repeats its last."""
    found: list[int] = []
    begin = 0
    for key, count in was.items():
        own, begin = list(each[begin : begin + count]), begin + count
        wanted = now.get(key, count)
        found += (own + own[-1:] * wanted)[:wanted]
    return found


def _kept_in(model: Any) -> torch.dtype:
    """Return the type of the model's inputs outside of autocast.

    It is the type in which the weights are at run time; an engine that gathers them defines it.
    """
    kept = (p.dtype for p in model.parameters() if p.is_floating_point())
    return getattr(model, "computes_in", None) or next(kept)


@functools.cache
def _linears() -> Mapping[str, Any]:
    """Return preset -> runs of blocks with equal linear layers: (group, first, last, names)."""
    return read_json(LINEARS)
