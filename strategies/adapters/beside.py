"""Adapters of peft on frozen linear layers: the choice of layers, first values and evidence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from strategies.base import BadInput, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.states import Frozen, split_facts
from strategies.strategy import Strategy
from strategies.subject import LAYERS, Subject, weights_dtype

# ---- injection ----

RESETS = {
    "reset_lora_parameters": (True,),
    "reset_adapter_parameters": (),
    "reset_oft_parameters": (True,),
}
"""Method of a peft layer that initializes its adapter -> its arguments after the adapter's name."""


ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "to_out", "attn.qkv", "attn.proj")
"""Endings of layers that compute queries, keys, values and the output of attention: those of
diffusers, which its LoRA scripts adapt, and of this project's DiT."""


class _Below:
    """Dropout of 0 in a prediction, where peft's random number has no value to compare."""

    def __lt__(self, drawn: Any) -> bool:
        return True


def add_adapters(
    module: Any, subject: Subject, config: Any, names: Sequence[str], dtype: Any = None
) -> None:
    """Add the adapters of peft's ``config`` to the linear layers ``names``.

    The layers may have no values yet. First weights are equal in every process. ``dtype``: the
    adapters' type; None: the model's.
    """
    import peft
    import torch

    from strategies import initial

    # A pattern, because peft takes names in a list as endings of names.
    config.target_modules = "|".join(map(re.escape, names))
    waits = initial.waits(module)
    with torch.random.fork_rng(devices=[]):
        # peft puts adapters on the device of their weights, which may be meta.
        with initial.valueless() if waits else contextlib.nullcontext():
            peft.inject_adapter_in_model(config, module)
        for name, layer in adapted(module).items():
            begin(layer, name)
    for p in own(module).values():  # with packed weights peft would take float32
        p.data = p.data.to(dtype or weights_dtype(module))


def begin(layer: Any, name: str) -> None:
    """Initialize an adapter by peft's rule, from its name only."""
    import torch

    from strategies import initial

    for part in _parts(layer):
        if not any(p.device.type == "meta" for p in part.parameters()):
            continue
        part.to_empty(device="cpu")
        for rotation in part.modules():
            if hasattr(rotation, "rows"):  # OFT's buffers, whose values meta does not keep
                size = rotation.block_size
                rotation.rows, rotation.cols = torch.triu_indices(size, size, 1, device="cpu")
    torch.manual_seed(initial.keyed(0, name).initial_seed())
    for method, more in RESETS.items():
        if hasattr(layer, method):
            getattr(layer, method)("default", *more)
    if initial.storageless() and hasattr(layer, "module_dropout"):
        layer.module_dropout["default"] = _Below()


def _parts(layer: Any) -> list[Any]:
    """Return the containers of a peft layer that hold an adapter's parameters."""
    named = (getattr(layer, name, None) for name in getattr(layer, "adapter_layer_names", ()))
    return [part for part in named if part is not None and len(part)]


def adapted(module: Any) -> dict[str, Any]:
    """Return name -> layer of those that have an adapter."""
    return {name: layer for name, layer in module.named_modules() if _parts(layer)}


def own(module: Any) -> dict[str, Any]:
    """Return name -> parameter of all adapters."""
    return {
        f"{path}.{name}": p
        for path, layer in adapted(module).items()
        for name, p in layer.named_parameters()
        if not name.startswith("base_layer.")
    }


# ---- chosen blocks ----

WORD = re.compile(r"(?P<end>first|last)?(?P<low>\d+)(?:-(?P<high>\d+))?")


def block_slices(text: str) -> list[slice]:
    """Return the slices of a model's blocks that ``text`` names, such as ``0-3/8/last2`` or
    ``all``. Both ends of a range belong to it.

    Raises:
        ValueError: a word of the text is no range; names it.
    """
    if text == "all":
        return [slice(0, None)]
    found = []
    for word in text.split("/"):
        match = WORD.fullmatch(word)
        low = int(match["low"]) if match else 0
        high = int(match["high"]) if match and match["high"] else low
        if not match or high < low or (match["end"] and (match["high"] or not low)):
            raise ValueError(
                f"blocks is {text!r}, and {word!r} is no range of blocks; give all, numbers and "
                "ranges from 0 joined by /, as 0-9/12, or first4, last4"
            )
        ends = {"first": slice(0, low), "last": slice(-low, None)}
        found.append(ends.get(match["end"], slice(low, high + 1)))
    return found


def chosen_blocks(text: str, depth: int) -> list[int]:
    """Return the indices that ``text`` selects of ``depth`` blocks; those beyond are left out."""
    return sorted({index for some in block_slices(text) for index in range(depth)[some]})


def most_blocks(text: str) -> int:
    """Return the number of blocks that a model needs for ``text``; 0 for ``all``."""
    return max(some.stop or -some.start for some in block_slices(text))


# ---- strategy ----


class Beside(Strategy):
    """Base of strategies that train adapters of peft beside frozen linear layers.

    A subclass declares the fields ``targets``, ``dtype``, ``blocks`` and ``reach``, since their
    order is that of a recipe's text. ``silent``: part of the name of the one matrix of each adapter
    that begins at zero, so that an adapter acts once it has changed.
    """

    slot: ClassVar[Slot] = Slot.ADAPT
    alters: ClassVar[tuple[str, ...]] = ("gradients", "update")
    needs: ClassVar[tuple[str, ...]] = ("peft",)
    silent: ClassVar[str]
    values: ClassVar[dict[str, Any]] = {"dtype": ("model", "fp32"), "reach": ("blocks", "model")}
    least: ClassVar[dict[str, int]] = {"rank": 1}

    targets: str
    dtype: str
    blocks: str
    reach: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w.]+(/[\w.]+)*", self.targets):
            raise ValueError(
                f"targets is {self.targets!r}; all, attention, ffn, or names of layers joined by "
                "/, as to_q/to_v"
            )
        block_slices(self.blocks)  # refuses what is none
        if self.reach == "model" and self.blocks != "all":
            raise ValueError(f"reach=model adapts all blocks; leave blocks={self.blocks} out")

    def config(self) -> Any:
        """Return peft's configuration, without its target modules."""
        raise NotImplementedError

    @property
    def ends(self) -> list[str]:
        """Endings of layers' names, if ``targets`` names layers; else empty."""
        return [] if self.targets in ("all", "attention", "ffn") else self.targets.split("/")

    def named(self, subject: Subject) -> tuple[str, ...]:
        """Return the names of the layers that ``targets`` names, in all blocks."""
        if self.targets == "all":
            return subject.linears
        if self.targets == "attention":
            return tuple(name for name in subject.linears if name.endswith(ATTENTION))
        return tuple(name for name in subject.linears if self._is_named(name, self.ends))

    def _is_named(self, name: str, ends: Sequence[str]) -> bool:
        if self.targets == "ffn":
            return any(map(LAYERS["ffn"].fullmatch, name.split(".")))
        return any(f".{name}".endswith(f".{end}") for end in ends)

    def chosen(self, subject: Subject, module: Any) -> tuple[str, ...]:
        """Return the names of the layers of ``module`` that get an adapter.

        Outside of the blocks ``targets=attention`` goes by the endings of the names of the blocks'
        layers, as peft does. Layers that get no gradient are left out there.
        """
        from torch import nn

        blocks = subject.blocks(module)
        some = [blocks[index] for index in chosen_blocks(self.blocks, len(blocks))]
        inside = {id(part) for block in some for part in block.modules()}
        named = self.named(subject)
        within = tuple(name for name in named if id(module.get_submodule(name)) in inside)
        if self.reach == "blocks":
            return within
        words = sorted({_ending(name) for name in named})
        ends = words if self.targets == "attention" else self.ends
        linears = [
            name.removesuffix(".base_layer")  # of an adapter
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear) and "lora_" not in name and id(part) not in inside
        ]
        free = [name for name in linears if f"{name}.weight" not in subject.survey.idle]
        every = self.targets == "all"
        return within + tuple(name for name in free if every or self._is_named(name, ends))

    def by_block(self, depth: int) -> Sequence[bool]:
        """Return whether each block may have adapters."""
        chosen = chosen_blocks(self.blocks, depth)
        return [index in chosen for index in range(depth)]

    def refuses(self, launch: RunContext) -> str | None:
        subject, targets = launch.subject, self.targets
        if fault := super().refuses(launch):
            return fault
        if most_blocks(self.blocks) > subject.depth:
            return (
                f"blocks={self.blocks}, and {subject.name} has {subject.depth} blocks; give "
                f"numbers from 0 to {subject.depth - 1}, first{subject.depth} or "
                f"last{subject.depth}"
            )
        if targets in ("attention", "ffn") and not self.named(subject):
            return f"{subject.name}'s {targets} is not known by names; leave targets out"
        for end in self.ends if self.reach == "blocks" else ():
            if not any(self._is_named(name, [end]) for name in subject.linears):
                ends = sorted({_ending(name) for name in subject.linears})
                return (
                    f"targets={targets}, and no linear layer in the blocks of {subject.name} "
                    f"has a name that ends in {end}; give all, attention or ffn alone, or some "
                    f"of {', '.join(ends)} joined by /"
                )
        return None

    def traits(self) -> frozenset[str]:
        floats = {"float_adapters"} if self.dtype == "fp32" else set()
        some = {"some_blocks"} if self.blocks != "all" else set()
        return frozenset({"frozen_weights", "other_products"} | floats | some)

    def edit_model(self, module: Any, subject: Subject) -> None:
        """Add this recipe's adapters to ``module``.

        Raises:
            BadInput: none of the chosen blocks has one of the target layers, or an ending of
                ``targets`` names no layer of the whole model.
        """
        import torch

        names = self.chosen(subject, module)
        for end in self.ends if self.reach == "model" else ():
            if not any(self._is_named(name, [end]) for name in names):
                raise BadInput(
                    f"{self.name}: no linear layer of {subject.name} that gets a gradient has a "
                    f"name that ends in {end}; leave it out of targets={self.targets}"
                )
        if not names:
            raise BadInput(
                f"{self.name}: none of the blocks {self.blocks} of {subject.name} has a layer of "
                f"targets={self.targets}; give other blocks"
            )
        dtype = torch.float32 if self.dtype == "fp32" else None
        add_adapters(module, subject, self.config(), names, dtype)

    def attach(self, run: TrainingRun) -> Frozen:
        return Frozen(run)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        layers, mine = adapted(run.module), own(run.module)
        wanted = set(self.chosen(run.subject, run.module))
        met = len(layers.keys() & wanted)
        text = f"{met} of {len(wanted)} chosen layers have an adapter"
        demand(layers.keys() == wanted, f"{text}, and {len(layers) - met} others")
        found = sum(run.engine.part(p).shape.numel() for p in mine.values())
        elements = self._elements([*layers.values()])
        demand(found == elements, f"the adapters have {found} elements, expected {elements}")
        kinds = {p.dtype.itemsize for p in mine.values()}
        demand(self.dtype != "fp32" or kinds == {4}, f"adapters are stored in {kinds} bytes, not 4")
        free = {n for n, p in run.module.named_parameters() if p.requires_grad}
        text = f"{len(free - mine.keys())} weights outside the adapters take a gradient"
        demand(free == mine.keys(), f"{text}, and {len(mine.keys() - free)} of them do not")
        facts = split_facts(run, self.name)
        changed = run.attached[self.name].changed()
        moved = sum(self.silent in name for name in changed)
        demand(moved == len(layers), f"{moved} of {len(layers)} adapters have changed")
        return {"adapters": len(layers), **facts}

    def _elements(self, layers: Sequence[Any]) -> int:
        """Return the elements of peft's adapters on layers of these sizes."""
        import peft
        import torch

        config = self.config()
        config.target_modules = r"\d+"
        with torch.device("meta"):
            plain = (torch.nn.Linear(m.in_features, m.out_features) for m in layers)
            alone = peft.inject_adapter_in_model(config, torch.nn.Sequential(*plain))
        return sum(p.numel() for p in own(alone).values())


def _ending(name: str) -> str:
    """Return the last word of a layer's name, with the numbers behind it."""
    match = re.search(r"[^.\d][^.]*(\.\d+)*$", name)
    return match[0] if match else name
