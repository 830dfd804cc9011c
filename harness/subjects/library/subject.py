"""A class of the diffusers library with a configuration as a subject. No torch above."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.data.caches.named import is_cache, open_cache
from harness.subjects.library import cached, presets
from harness.subjects.library.cached import Sized
from harness.subjects.library.families import FAMILIES, Family, Space
from harness.subjects.library.space import larger, space_of
from strategies.base import BadInput
from strategies.sizes import Sizes
from strategies.subject import DataFacts, Shaping, Subject
from strategies.survey import Survey

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from strategies.initial import Draw

__all__ = ["ADAPTED", "Library"]

SAMPLES = 8
"""Synthetic samples: what is measured does not depend on values, and one text is megabytes."""
TWICE = "dual_attention_layers"
ADAPTED = ("to_q", "to_k", "to_v", "to_out.0")
"""The endings of the layers that the library's LoRA scripts adapt."""


@dataclass(frozen=True, kw_only=True)
class Library(Subject):
    """A preset, or a class with a configuration; made of the facts in the tree, without weights.

    ``kind`` is the class, ``settings`` what differs from its defaults, as JSON; ``space`` the size
    of a sample, ``factor`` the pixels a side for one element of a latent. ``cache``: the data that
    its samples are read from; empty: they are made up. ``stands_for``: depths of the model that
    this one stands for in a prediction; empty: for itself.
    """

    objectives: ClassVar[tuple[str, ...]] = ("flow", "epsilon", "velocity")
    brings_samples: ClassVar[bool] = True
    of_library: ClassVar[bool] = True

    kind: str
    settings: str
    space: Space
    factor: int
    cache: str = ""
    stands_for: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, shaping: Shaping, **fields: Any) -> Library:
        known = presets.find(fields["model"], shaping.config, shaping.set)
        family, down = known.family, known.usual.get("down", known.family.down)
        cache = shaping.data if is_cache(shaping.data) else ""
        if not cache and shaping.data != "synthetic":
            raise BadInput(
                f"data is {shaping.data}, and model {fields['model']} takes samples of its own "
                "layout; give --data synthetic (and --resolution, --frames, --text), or "
                "musubi:FOLDER, finetrainers:FOLDER"
            )
        if cache:
            sized = Sized(family, known.config, down)
            found = cached.buckets_of(cache, sized, fields["model"])
            space, held = cached.chosen(found, sized, shaping)
        else:
            space, held = space_of(shaping, family, known.usual, down), range(SAMPLES)
        sample = family.sample(known.config, space)
        channels = family.value(known.config, "in_channels")
        facts = DataFacts(len(held), channels, space.width, 1, sample)
        settings = json.dumps(dict(known.config), sort_keys=True)
        given = fields | {"data": facts, "kind": family.name, "settings": settings}
        return cls(**given, space=space, factor=down, cache=cache)

    @classmethod
    def buckets(cls, shaping: Shaping, model: str) -> list[Mapping[str, Any]]:
        known = presets.find(model, shaping.config, shaping.set)
        sized = Sized(known.family, known.config, known.usual.get("down", known.family.down))
        found = cached.buckets_of(shaping.data, sized, model)
        first = cached.chosen(found, sized, shaping)
        some = [first] if shaping.resolution or shaping.frames else found
        return [{**bucket.asked(sized), "samples": len(bucket.samples)} for bucket in some]

    @classmethod
    def usual_objective(cls, shaping: Shaping, model: str) -> str:
        return presets.find(model, shaping.config).family.objectives[0]

    # ---- what it is ----

    @property
    def family(self) -> Family:
        """What its class is given."""
        return FAMILIES[self.kind]

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, without the class's defaults."""
        return json.loads(self.settings)

    @property
    def parts(self) -> frozenset[str]:
        shared = self.family.shares(self.config)
        stripes = ("stripes",) if shared else ()
        sized = ("sized",) if len(self.depths) == 1 else ()
        head = ("head",) if self.family.head else ()
        stages = ("stages",) if self.family.stages else ()
        return frozenset((*stages, *stripes, *sized, *head))

    @property
    def random_blocks(self) -> bool:
        """Dropout is off in every one, unless its configuration says otherwise."""
        return bool(self.config.get("dropout", 0))

    @property
    def name(self) -> str:
        return self.model

    @property
    def identity(self) -> str:
        facts = (self.kind, self.settings, self.space, _version())
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @property
    def size_in_words(self) -> str:
        """How a table's head tells the size of a sample."""
        space, down = self.space, self.factor
        sides = f"{space.height * down}x{space.width * down}"
        frames = (space.frames - 1) * self.family.every + 1
        video = f" of {frames} frames" if self.family.every else ""
        return f"{sides}{video}" + (f", {space.text} tokens of text" if self.family.text else "")

    @property
    def depths(self) -> dict[str, int]:
        """Key of the configuration -> how many blocks it asks for, in the order of the groups. The
        blocks of SD3.5 that attend twice are the first ones, and blocks of their own; where they
        are others, no shallow model has its blocks in their order."""
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
            (count - self.depths[key]) * _trained(self.block_of(module, key))
            for key, count in meant.items()
        )
        return found._replace(total=found.total + more, here=found.total) if more else found

    def block_of(self, module: nn.Module, key: str) -> nn.Module:
        """A block of those that ``key`` counts, the first but one where there are as many."""
        if TWICE in self.depths:
            first = 0 if key == TWICE else self.depths[TWICE]
            return module.transformer_blocks[first]
        names = [name for name, counted in self.family.depths.items() if counted == key]
        return getattr(module, names[0])[0]

    def check(self) -> None:
        if importlib.util.find_spec("diffusers") is None:
            raise BadInput(
                f"model {self.model} is built by diffusers, which is missing; pip install diffusers"
            )
        if self.objective.partition(":")[0] not in self.family.objectives:
            raise BadInput(
                f"model {self.model} cannot be trained to {self.objective!r}; give --objective "
                f"{' or '.join(self.family.objectives)}"
            )

    def make(self) -> nn.Module:
        from strategies.engines.pipeline import cut

        try:
            module = _class(self.kind)(**self.config)
        except (TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"model {self.model}: {self.kind} cannot be built: {error}") from error
        for part in module.modules():
            if hasattr(part, "dropout_prob"):
                # Labels are withheld by the batch, the same on every engine.
                part.dropout_prob = 0.0
        module.passage = functools.partial(cut.passage_between, self)
        return module

    def shell(self) -> nn.Module:
        from harness.subjects.library import start

        return start.shell(self.make)

    def draws(self, seed: int, init: str) -> Draw:
        from harness.subjects.library import start

        return start.draws(seed)

    def small(self) -> Library:
        """One block of each kind, of the smallest sample."""
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
        return _survey(self)

    @property
    def parameters(self) -> int:
        """Of a preset as its file has them, which needs no torch."""
        counted = self._counted
        return counted["built"] if counted else super().parameters

    @property
    def block_parameters(self) -> tuple[int, ...]:
        each = self._counted.get("blocks")
        if not each:
            return super().block_parameters
        counts = zip(each, self.depths.values(), strict=True)
        return tuple(size for size, count in counts for _ in range(count))

    @property
    def _counted(self) -> Mapping[str, Any]:
        """The elements that a preset's file says; empty where the configuration is another."""
        known = presets.table().get(self.model)
        return known.parameters if known and known.config == self.config else {}

    @property
    def attention_linears(self) -> tuple[str, ...]:
        return tuple(name for name in self.linears if name.endswith(ADAPTED))

    # ---- its modules ----

    def groups(self, module: nn.Module) -> list[Sequence[nn.Module]]:
        return [getattr(module, name) for name in self.family.depths]

    def head(self, module: nn.Module) -> nn.Module:
        return module.get_submodule(self.family.head)

    # ---- samples, and one prediction ----

    @property
    def rows(self) -> int:
        by_height = self.family.stripes == "height"
        rows = self.space.height // self.family.tile if by_height else self.data.sample_shape[0]
        return math.gcd(rows, self.space.text) if self.family.joint else rows

    def cut(self, samples: Tensor, part: int, parts: int) -> Tensor:
        axis = samples.ndim - 2 if self.family.stripes == "height" else 1
        return samples.chunk(parts, dim=axis)[part]

    def take_part(self, module: nn.Module, part: int, parts: int) -> None:
        from harness.subjects.library import stripes

        stripes.take_part(module, part, parts, self.family.stripes)

    def reader(self) -> Callable[[int], dict[str, Tensor]] | None:
        if not self.cache:
            return None
        sized = Sized(self.family, self.config, self.factor)
        found = cached.buckets_of(self.cache, sized, self.model)
        held = next(bucket.samples for bucket in found if bucket.space == self.space)
        cache = open_cache(self.cache)
        return lambda index: cached.row(cache, held[index], self.space, sized)

    def samples(self) -> dict[str, Tensor]:
        import torch

        chance = torch.Generator().manual_seed(0)

        def made(shape: tuple[int, ...], holds: str) -> Tensor:
            if holds == "true":
                return torch.ones((SAMPLES, *shape), dtype=torch.bool)
            if holds == "label":
                classes = self.family.value(self.config, "num_embeds_ada_norm")
                return torch.randint(classes, (SAMPLES, *shape), generator=chance)
            return torch.randn((SAMPLES, *shape), generator=chance)

        conditions = self.family.conditions(self.config, self.space)
        sample = {"x": made(self.data.sample_shape, "normal")}
        return sample | {name: made(*given) for name, given in conditions.items()}

    def example(self, device: torch.device | str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        import torch

        kinds = {"true": torch.bool, "label": torch.long, "normal": torch.float32}
        given = {
            name: torch.ones((1, *shape), dtype=kinds[holds], device=device)
            for name, (shape, holds) in self.family.conditions(self.config, self.space).items()
        }
        x = torch.zeros((1, *self.data.sample_shape), device=device)
        return x, torch.zeros(1, dtype=self._times, device=device), given

    @property
    def _times(self) -> torch.dtype:
        import torch

        return torch.long if self.family.time == "steps" else torch.float32

    def predict(self, model: Any, x: Tensor, t_B: Tensor, conditions: Mapping[str, Tensor]) -> Any:
        from harness.subjects.library.calls import CALLS, masks_are_whole
        from harness.subjects.library.stripes import mine

        family, kept = self.family, _kept_in(model)
        given = {n: c.to(kept) if c.is_floating_point() else c for n, c in conditions.items()}
        if family.joint:
            given["text"] = mine(model, given["text"], axis=1)
        words = family.time.split("_")
        falling = words[0] == "falling"
        told_B = (1 - t_B if falling else t_B) * (1000 if len(words) > 1 else 1)
        masks = masks_are_whole(x, self.space.text) if family.whole_masks else None
        with masks or contextlib.nullcontext():
            out = CALLS[family.call](model, x.to(kept), told_B, given, self.config, self.space)
        return -out if falling else out


def _class(name: str) -> Any:
    """A class of diffusers; its import warns of packages without which it does well."""
    silent = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import diffusers

        return getattr(diffusers, name)
    finally:
        logging.disable(silent)


def _trained(block: nn.Module) -> int:
    return sum(p.numel() for p in block.parameters() if p.requires_grad)


def _kept_in(model: Any) -> torch.dtype:
    """The type of what the model is given, outside of autocast: that in which its weights are when
    it runs, which an engine that gathers them says."""
    kept = (p.dtype for p in model.parameters() if p.is_floating_point())
    return getattr(model, "computes_in", None) or next(kept)


@functools.cache
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("diffusers")
    except PackageNotFoundError:
        return ""


@functools.lru_cache(maxsize=64)
def _survey(subject: Library) -> Survey:
    """On fake tensors, which behave as a CPU's do and have no memory: some of these classes read a
    device's name, or a mask, that "meta" has not."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from strategies import survey

    with FakeTensorMode(allow_non_fake_inputs=True):
        module, sample = subject.make(), subject.example("cpu")
        first = next(iter(subject.family.depths))
        last = f"{first}.{len(getattr(module, first)) - 1}."
        ends = tuple(f"{last}{name}" for name in subject.family.unread)
        unread = [n for n, _ in module.named_parameters() if ends and n.startswith(ends)]
        return survey.of(subject, module, lambda: subject.predict(module, *sample), unread)
