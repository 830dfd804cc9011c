"""Low-rank adapters on frozen weights (lora, dora, qlora), and files of trained parameters."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.states import Frozen, split_facts
from strategies.strategy import Strategy
from strategies.subject import Subject

if TYPE_CHECKING:
    import torch


# ---- adapter injection ----


def inject(
    module: Any,
    subject: Subject,
    rank: int,
    names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> None:
    """Add peft's adapters to the linear layers ``names`` (None: all of the subject's).

    The layers may have no values yet. First weights are equal in every process. ``dtype``: the
    adapters' type; None: the model's.
    """
    import peft
    import torch

    from strategies import initial

    # A pattern, because peft takes names in a list as endings of names.
    targets = "|".join(re.escape(name) for name in (subject.linears if names is None else names))
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, **more)
    waits = initial.waits(module)
    with torch.random.fork_rng(devices=[]):
        # peft puts adapters on the device of their weights, which may be meta.
        with initial.valueless() if waits else contextlib.nullcontext():
            peft.inject_adapter_in_model(config, module)
        for name, layer in module.named_modules():
            if is_adapted(layer):
                begin(layer, name)
    for name, p in module.named_parameters():
        if "lora_" in name:  # with packed weights peft would take float32
            p.data = p.data.to(dtype or subject.dtype(module))


def begin(layer: Any, name: str) -> None:
    """Initialize an adapter by peft's rule, from its name only."""
    import torch

    from strategies import initial

    for part in (layer.lora_A, layer.lora_B):
        if any(p.device.type == "meta" for p in part.parameters()):
            part.to_empty(device="cpu")
    torch.manual_seed(initial.keyed(0, name).initial_seed())
    layer.reset_lora_parameters("default", True)


def is_adapted(layer: Any) -> bool:
    """Return whether a module has an adapter."""
    return hasattr(layer, "lora_A") and len(layer.lora_A) > 0


def adapted(module: Any) -> list[Any]:
    """Return the layers that have an adapter."""
    return [m for m in module.modules() if is_adapted(m)]


def adapter_facts(trained: TrainingRun, part: Lora) -> dict[str, Any]:
    """Check that every target has an adapter of the requested rank, and that only adapters
    changed."""
    name, rank, magnitudes = part.name, part.rank, part.magnitudes
    layers, wanted = adapted(trained.module), len(part.chosen(trained.subject))
    demand(len(layers) == wanted, f"{len(layers)} layers have an adapter, expected {wanted}")
    ranks = {trained.engine.part(layer.lora_A["default"].weight).shape[0] for layer in layers}
    demand(ranks == {rank}, f"the adapters' ranks are {sorted(ranks)}, expected {rank}")
    dora = [layer for layer in layers if len(layer.lora_magnitude_vector)]
    demand(
        len(dora) == len(layers) * magnitudes,
        f"{len(dora)} of {len(layers)} layers have a DoRA magnitude",
    )
    facts = split_facts(trained, name)
    free = [n for n, p in trained.module.named_parameters() if p.requires_grad]
    strange = [n for n in free if "lora_" not in n]
    demand(not strange, f"{len(strange)} weights outside the adapters take a gradient")
    # The second matrix starts at zero: if it changed, the adapter acts.
    changed = trained.attached[name].changed()
    moved = [n for n in changed if "lora_B" in n]
    demand(len(moved) == len(layers), f"{len(moved)} of {len(layers)} adapters have changed")
    scaled = [n for n in changed if "magnitude" in n]
    demand(len(scaled) == len(dora), f"{len(scaled)} of {len(dora)} DoRA magnitudes have changed")
    return {"adapters": len(layers), "rank": rank, **facts, **dtype_facts(trained, part, layers)}


def dtype_facts(trained: TrainingRun, part: Lora, layers: Sequence[Any]) -> dict[str, Any]:
    """Return the type in which the engine stores adapters.

    Adapters with ``dtype=fp32`` must hold values that bfloat16 cannot: neither storage nor a step
    rounded them to 16 bits.
    """
    named = trained.module.named_parameters()
    kinds = {str(p.dtype).removeprefix("torch.") for n, p in named if "lora_" in n}
    if part.dtype == "fp32":
        demand(kinds == {"float32"}, f"adapters are stored as {sorted(kinds)}, expected float32")
        parts = [
            trained.engine.part(layer.lora_B["default"].weight).tensor.detach() for layer in layers
        ]
        finer = sum(bool((p != p.bfloat16()).any()) for p in parts)
        there = sum(p.numel() > 0 for p in parts)
        demand(
            finer == there,
            f"{there - finer} of {there} float32 adapters hold only values of 16 bits",
        )
    return {"adapter_dtype": "+".join(sorted(kinds))}


@dataclass(frozen=True, kw_only=True)
class Lora(Strategy):
    """Trains low-rank matrices beside frozen linear layers.

    Each linear layer of the blocks gets a product of two matrices of ``rank``.
    ``targets=attention`` adapts only queries, keys, values and attention's output. ``dtype=fp32``
    keeps the matrices, their gradients and moments in float32 over 16-bit weights. ``dtype=model``
    gives them the type of the model's other weights.
    """

    name: ClassVar[str] = "lora"
    slot: ClassVar[Slot] = Slot.ADAPT
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("gradients", "update")
    source: ClassVar[str] = "Hu et al. 2021, LoRA (arXiv:2106.09685); peft"
    needs: ClassVar[tuple[str, ...]] = ("peft",)
    magnitudes: ClassVar[bool] = False

    rank: int = 8
    targets: str = "all"
    dtype: str = "model"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}; a whole number from 1")
        if self.targets not in ("all", "attention"):
            raise ValueError(f"targets is {self.targets!r}; all, or attention")
        if self.dtype not in ("model", "fp32"):
            raise ValueError(f"dtype is {self.dtype!r}; model, or fp32")

    def chosen(self, subject: Subject) -> tuple[str, ...]:
        """Return the names of the layers that get an adapter."""
        return subject.linears if self.targets == "all" else subject.attention_linears

    def refuses(self, launch: RunContext) -> str | None:
        if self.targets == "attention" and not launch.subject.attention_linears:
            return f"{launch.subject.name}'s attention is not known by names; leave targets out"
        casts = {"float_master", "half_compute"} <= launch.traits
        if self.dtype == "fp32" and casts and "pure_bf16" not in launch.traits:
            return (
                "the engine casts adapters to 16 bits with the model, and updates a float32 master "
                "of them; leave dtype out, or take bf16_pure"
            )
        return None

    def traits(self) -> frozenset[str]:
        floats = {"float_adapters"} if self.dtype == "fp32" else set()
        return frozenset({"frozen_weights", "other_products"} | floats)

    def edit_model(self, module: Any, subject: Subject) -> None:
        self.put(module, subject, use_dora=self.magnitudes)

    def put(self, module: Any, subject: Subject, **more: Any) -> None:
        """Add this recipe's adapters to ``module``; ``more`` are keywords of peft's config."""
        import torch

        dtype = torch.float32 if self.dtype == "fp32" else None
        inject(module, subject, self.rank, self.chosen(subject), dtype, **more)

    def attach(self, trained: TrainingRun) -> Frozen:
        return Frozen(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        return adapter_facts(trained, self)


@dataclass(frozen=True, kw_only=True)
class Dora(Lora):
    """LoRA on weights' directions, magnitudes trained too. Each row of a weight has a magnitude."""

    name: ClassVar[str] = "dora"
    source: ClassVar[str] = "Liu et al. 2024, DoRA (arXiv:2402.09353); peft"
    reads_weights: ClassVar[bool] = True  # their norms
    magnitudes: ClassVar[bool] = True

    def traits(self) -> frozenset[str]:
        return super().traits() | {"weight_norms"}


@dataclass(frozen=True, kw_only=True)
class Qlora(Lora):
    """LoRA over frozen weights stored in 4 bits (nf4).

    Two weights share a byte, and each product unpacks them. All linear layers are packed, except
    those that the model's class keeps in float32. ``layers=blocks`` packs only those of the blocks
    that can have an adapter.
    """

    name: ClassVar[str] = "qlora"
    alters: ClassVar[tuple[str, ...]] = ("forward", *Lora.alters)
    source: ClassVar[str] = (
        "Dettmers et al. 2023, QLoRA (arXiv:2305.14314); bitsandbytes, peft; diffusers, "
        "quantizers/bitsandbytes/utils.py (which layers)"
    )
    needs: ClassVar[tuple[str, ...]] = ("peft", "bitsandbytes")

    layers: str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers not in ("all", "blocks"):
            raise ValueError(f"layers is {self.layers!r}; all, or blocks")

    def traits(self) -> frozenset[str]:
        return super().traits() | {"quantized_weights", "packed_weights"}

    def refuses(self, launch: RunContext) -> str | None:
        if "split_parameters" in launch.traits and "dtensor_weights" not in launch.traits:
            return (
                "the engine shards elements, and two of these share a byte; use fsdp2 or zero2, "
                "or lora"
            )
        return super().refuses(launch)

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.adapters.quantised_base import quantize

        quantize(module, self._packed(module, subject))
        module.is_loaded_in_4bit = True  # peft reads this to choose its layer class
        self.put(module, subject)
        del module.is_loaded_in_4bit

    def _packed(self, module: Any, subject: Subject) -> tuple[str, ...]:
        """Return the names of the layers of ``module`` to pack."""
        from strategies.adapters.quantised_base import unpacked

        every = unpacked(module) if self.layers == "all" else ()
        return tuple(dict.fromkeys((*subject.linears, *every)))

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.adapters.quantised_base import packed_facts, unpacked

        whole = unpacked(trained.module) if self.layers == "all" else ()
        demand(not whole, f"{len(whole)} linear layers are not packed: {', '.join(whole[:3])}")
        facts = packed_facts(trained.module)
        least = len(trained.subject.linears)
        demand(facts["packed_layers"] >= least, f"not all of {least} linear layers are packed")
        return {**super().evidence(trained), **facts}


# ---- files of trained parameters ----


def save(trained: TrainingRun, path: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Write every parameter that takes a gradient to one file; all ranks call it.

    Names that begin with one of ``leave_out`` are skipped.
    """
    state = {}
    all_parameters = trained.engine.global_parameters(trained)
    free = {n: p for n, p in all_parameters.items() if p.requires_grad}
    named = {n: p for n, p in free.items() if not n.startswith(leave_out)}
    whole = trained.engine.whole(trained, list(named.values()))
    for name, p in zip(named, whole, strict=True):
        if trained.accelerator.is_main_process:
            state[name] = p.detach().cpu().contiguous().clone()
    if trained.accelerator.is_main_process:
        trained.subject.save(state, path)
    trained.accelerator.wait_for_everyone()


def load(module: Any, subject: Subject, path: Path) -> list[str]:
    """Load a file of ``save`` into a bare model that the same recipe has edited; return the names.

    Raises:
        ValueError: the model lacks one of the parameters, or trains one that the file lacks.
    """
    import torch

    state = subject.load(path)
    mine = {n: p for n, p in module.named_parameters() if p.requires_grad}
    odd = sorted(mine.keys() ^ state.keys())
    if odd:
        raise ValueError(f"{path} is of another recipe or model: {odd[0]} is on one side only")
    with torch.no_grad():
        for name, saved in state.items():
            mine[name].copy_(saved)
    return sorted(state)
