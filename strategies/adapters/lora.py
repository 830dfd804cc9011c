"""Low-rank adapters on frozen weights (lora, dora, qlora), and a file of trained parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from strategies.adapters.beside import Beside, add_adapters
from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.subject import Subject

if TYPE_CHECKING:
    import torch


def inject(
    module: Any,
    subject: Subject,
    rank: int,
    names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> None:
    """Add LoRA's matrices to the linear layers ``names`` (None: all of the subject's).

    ``dtype``: the matrices' type; None: the model's. ``more``: keywords of peft's config.
    """
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=rank, **more)
    add_adapters(module, subject, config, subject.linears if names is None else names, dtype)


@dataclass(frozen=True, kw_only=True)
class Lora(Beside):
    """Trains low-rank matrices beside frozen linear layers.

    Each linear layer of the blocks gets a product of two matrices of ``rank``.

    ``targets=attention`` adapts only queries, keys, values and attention's output, ``targets=ffn``
    only the feed-forward layers. ``targets=to_q/to_v`` adapts the layers whose names end so.
    ``blocks=0-9/12``, ``blocks=first4`` and ``blocks=last4`` adapt only these blocks, which are
    counted from 0 in execution order over all groups. Backward ends at the first of them.

    ``dtype=fp32`` keeps the matrices, their gradients and moments in float32 over 16-bit weights.
    ``dtype=model`` gives them the type of the model's other weights.

    ``reach=model`` adapts layers of these names outside of the blocks too: peft does so if it gets
    the endings of names. Such layers are not checkpointed, so backward keeps their activations.
    """

    name: ClassVar[str] = "lora"
    source: ClassVar[str] = "Hu et al. 2021, LoRA (arXiv:2106.09685); peft"
    magnitudes: ClassVar[bool] = False
    silent: ClassVar[str] = "lora_B"

    rank: int = 8
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank is {self.rank!r}; a whole number from 1")
        super().__post_init__()

    def inject(self, module: Any, subject: Subject, names: Any, dtype: Any) -> None:
        more = {"use_dora": True} if self.magnitudes else {}
        inject(module, subject, self.rank, names, dtype, **more)

    def shapes(self, trained: TrainingRun, layers: Collection[Any]) -> dict[str, Any]:
        engine = trained.engine
        ranks = {engine.part(layer.lora_A["default"].weight).shape[0] for layer in layers}
        demand(ranks == {self.rank}, f"the adapters' ranks are {sorted(ranks)}, not {self.rank}")
        wanted = len(layers) * self.magnitudes
        dora = sum(len(layer.lora_magnitude_vector) for layer in layers)
        demand(dora == wanted, f"{dora} of {len(layers)} layers have a DoRA magnitude")
        kept: Any = trained.attached.get(self.name)
        changed = kept.changed() if wanted and kept else ()
        scaled = sum("magnitude" in name for name in changed)
        demand(scaled == wanted, f"{scaled} of {wanted} DoRA magnitudes have changed")
        return {"rank": self.rank}


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

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.adapters.quantised_base import quantize

        quantize(module, self._packed(module, subject))
        module.is_loaded_in_4bit = True  # peft reads this to choose its layer class
        self.put(module, subject)
        del module.is_loaded_in_4bit

    def _packed(self, module: Any, subject: Subject) -> tuple[str, ...]:
        """Return the names of the layers of ``module`` to pack."""
        from strategies.adapters.coded import unpacked

        every = unpacked(module) if self.layers == "all" else ()
        return tuple(dict.fromkeys((*subject.linears, *every)))

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.adapters.coded import unpacked
        from strategies.adapters.quantised_base import packed_facts

        whole = unpacked(trained.module) if self.layers == "all" else ()
        demand(not whole, f"{len(whole)} linear layers are not packed: {', '.join(whole[:3])}")
        facts = packed_facts(trained.module)
        least = len(trained.subject.linears)
        demand(facts["packed_layers"] >= least, f"not all of {least} linear layers are packed")
        return {**super().evidence(trained), **facts}


def save(trained: TrainingRun, path: Path) -> None:
    """Write every parameter that takes a gradient to one file; all ranks call it."""
    every = trained.engine.global_parameters(trained)
    named = {n: p for n, p in every.items() if p.requires_grad}
    whole = trained.engine.whole(trained, list(named.values()))
    main, state = trained.accelerator.is_main_process, {}
    for name, p in zip(named, whole, strict=True):
        if main:
            state[name] = p.detach().cpu().contiguous().clone()
    if main:
        trained.subject.save(state, path)
    trained.accelerator.wait_for_everyone()
