"""Adapters of peft on frozen weights (lora, dora, qlora, lokr, loha, oft), and a file of trained
parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from strategies.adapters.beside import Beside
from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.subject import Subject


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
    silent: ClassVar[str] = "lora_B"
    magnitudes: ClassVar[bool] = False

    rank: int = 8
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def config(self) -> Any:
        import peft

        return peft.LoraConfig(r=self.rank, lora_alpha=self.rank, use_dora=self.magnitudes)


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
    values: ClassVar[dict[str, Any]] = {**Lora.values, "layers": ("all", "blocks")}

    layers: str = "all"

    def traits(self) -> frozenset[str]:
        return super().traits() | {"quantized_weights", "packed_weights"}

    def edit_model(self, module: Any, subject: Subject) -> None:
        from strategies.adapters.quantised_base import quantize

        quantize(module, self._packed(module, subject))
        module.is_loaded_in_4bit = True  # peft reads this to choose its layer class
        super().edit_model(module, subject)
        del module.is_loaded_in_4bit

    def _packed(self, module: Any, subject: Subject) -> tuple[str, ...]:
        """Return the names of the layers of ``module`` to pack."""
        from strategies.adapters.coded import unpacked

        every = unpacked(module) if self.layers == "all" else ()
        return tuple(dict.fromkeys((*subject.linears, *every)))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.adapters.coded import unpacked
        from strategies.adapters.quantised_base import packed_facts

        full = unpacked(run.module) if self.layers == "all" else ()
        demand(not full, f"{len(full)} linear layers are not packed: {', '.join(full[:3])}")
        facts = packed_facts(run.module)
        least = len(run.subject.linears)
        demand(facts["packed_layers"] >= least, f"not all of {least} linear layers are packed")
        return {**super().evidence(run), **facts}


@dataclass(frozen=True, kw_only=True)
class Lokr(Beside):
    """Trains Kronecker products beside frozen linear layers.

    The change of a weight is the Kronecker product of a small matrix and a large one. The large one
    is a product of two matrices of ``rank``; it is whole if ``rank`` is at least half of its longer
    side. ``factor`` divides each side of the weight; the small matrix has that size. ``factor=-1``
    divides each side near its root.

    In each forward pass peft computes the whole change of a weight. It is kept for backward, and is
    as large as the weight. ``targets``, ``blocks``, ``dtype`` and ``reach`` are ``lora``'s.
    """

    name: ClassVar[str] = "lokr"
    source: ClassVar[str] = "Yeh et al. 2023, LyCORIS (arXiv:2309.14859); peft"
    silent: ClassVar[str] = "lokr_w1"
    least: ClassVar[dict[str, int]] = {"rank": 1, "factor": 1}

    rank: int = 8
    factor: int = -1
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def config(self) -> Any:
        import peft

        return peft.LoKrConfig(r=self.rank, alpha=self.rank, decompose_factor=self.factor)


@dataclass(frozen=True, kw_only=True)
class Loha(Beside):
    """Trains Hadamard products beside frozen linear layers.

    The change of a weight is the elementwise product of two products of matrices of ``rank``. Its
    rank is up to the square of ``rank``.

    In each forward pass peft computes the whole change of a weight. It is kept for backward, and is
    as large as the weight. ``targets``, ``blocks``, ``dtype`` and ``reach`` are ``lora``'s.
    """

    name: ClassVar[str] = "loha"
    source: ClassVar[str] = "Hyeon-Woo et al. 2021, FedPara (arXiv:2108.06098); peft"
    silent: ClassVar[str] = "hada_w2_b"

    rank: int = 8
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def config(self) -> Any:
        import peft

        return peft.LoHaConfig(r=self.rank, alpha=self.rank)


@dataclass(frozen=True, kw_only=True)
class Oft(Beside):
    """Trains rotations of the inputs of frozen linear layers.

    The features of an input are cut into groups of ``size``, and each group is multiplied by an
    orthogonal matrix. If ``size`` does not divide a layer's features, peft takes the nearest number
    that does. ``targets``, ``blocks``, ``dtype`` and ``reach`` are ``lora``'s.
    """

    name: ClassVar[str] = "oft"
    source: ClassVar[str] = (
        "Qiu et al. 2023, OFT (arXiv:2306.07280); Qiu et al. 2025, OFTv2 (arXiv:2506.19847); peft"
    )
    silent: ClassVar[str] = "oft_R"
    least: ClassVar[dict[str, int]] = {"size": 2}

    size: int = 32
    targets: str = "all"
    dtype: str = "model"
    blocks: str = "all"
    reach: str = "blocks"

    def config(self) -> Any:
        import peft

        return peft.OFTConfig(oft_block_size=self.size)


def save(run: TrainingRun, path: Path) -> None:
    """Write every parameter that takes a gradient to one file; all ranks call it."""
    from safetensors.torch import save_file

    every = run.engine.global_parameters(run)
    named = {n: p for n, p in every.items() if p.requires_grad}
    gathered = run.engine.whole(run, list(named.values()))
    main, state = run.accelerator.is_main_process, {}
    for name, p in zip(named, gathered, strict=True):
        if main:
            state[name] = p.detach().cpu().contiguous().clone()
    if main:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, str(path))
    run.accelerator.wait_for_everyone()
