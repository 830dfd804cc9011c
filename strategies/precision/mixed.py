"""Precision: the types in which a step computes and keeps its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Slot, demand
from strategies.engine import Launch, Trained
from strategies.evidence import forward
from strategies.strategy import Strategy
from strategies.subject import Subject

__all__ = ["Bf16", "Fp32"]


def dtypes(trained: Trained) -> dict[str, str]:
    """Types of computation, stored parameters and the optimizer's weights and moments."""
    state = trained.inner_optimizer.state
    moments = {
        str(v.dtype) for s in state.values() for k, v in s.items() if k.startswith("exp_avg")
    }
    weights = {str(w.dtype) for w in trained.optimized()}
    # Packed codes are no type to compute in; whoever packed them shows what they are.
    stored = {str(p.dtype) for p in trained.module.parameters() if p.is_floating_point()}
    kinds = {"parameters": stored, "master": weights, "moments": moments}
    return {
        "compute_dtype": forward.compute_dtype(trained),
        **{k: "+".join(sorted(w.removeprefix("torch.") for w in v)) for k, v in kinds.items()},
    }


@dataclass(frozen=True, kw_only=True)
class Fp32(Strategy):
    """Everything in float32, matrix products included."""

    name: ClassVar[str] = "fp32"
    slot: ClassVar[Slot] = Slot.PRECISION
    source: ClassVar[str] = "IEEE 754 single precision; torch.backends.cuda.matmul.allow_tf32 off"

    rounds: ClassVar[bool] = False

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        return {"mixed_precision": "no"}

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = self.rounds
        torch.backends.cudnn.allow_tf32 = self.rounds

    def evidence(self, trained: Trained) -> dict[str, Any]:
        import torch

        types = dtypes(trained)
        demand(types["compute_dtype"] == "float32", f"computes in {types['compute_dtype']}")
        demand(types["parameters"] == "float32", f"keeps parameters in {types['parameters']}")
        tf32 = torch.backends.cuda.matmul.allow_tf32
        demand(tf32 == self.rounds, f"TF32 is {'on' if tf32 else 'off'}")
        if trained.launch.device == "cuda":
            types["tf32_rounds"] = _tf32_rounds()
            demand(types["tf32_rounds"] == self.rounds, "the GPU's products round otherwise")
        return {**types, "tf32": tf32}


@dataclass(frozen=True, kw_only=True)
class Tf32(Fp32):
    """float32, with the operands of matrix products rounded to TF32 (10 bits of mantissa) by GPUs.

    The reference trains so.
    """

    name: ClassVar[str] = "tf32"
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("rounding",)
    unit: ClassVar[float] = 2**-11
    source: ClassVar[str] = "NVIDIA A100 white paper 2020 (TF32); facebookresearch/DiT train.py"
    needs: ClassVar[tuple[str, ...]] = ("tf32",)

    rounds: ClassVar[bool] = True


def _tf32_rounds() -> bool:
    """Whether a float32 product on this GPU loses bits that TF32 has not: 1 + 2^-12 squared."""
    import torch

    a = torch.full((128, 128), 1 + 2**-12, device="cuda")
    eye = torch.eye(128, device="cuda")
    return bool(((a @ eye) != a).any())


@dataclass(frozen=True, kw_only=True)
class Bf16(Strategy):
    """Mixed precision in bfloat16: autocast over float32 weights under ddp and single; bfloat16
    weights with a float32 master under DeepSpeed. The evidence says which of the two a row was.
    """

    name: ClassVar[str] = "bf16"
    slot: ClassVar[Slot] = Slot.PRECISION
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("rounding",)
    unit: ClassVar[float] = 2**-8
    source: ClassVar[str] = "Micikevicius et al. 2018 (arXiv:1710.03740); Kalamkar et al. 2019"
    needs: ClassVar[tuple[str, ...]] = ("bf16",)

    half: ClassVar[str] = "bfloat16"

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute"})

    def accelerator_kwargs(self, launch: Launch) -> dict[str, Any]:
        return {"mixed_precision": "bf16"}

    def evidence(self, trained: Trained) -> dict[str, Any]:
        types = dtypes(trained)
        kept = self.half if "float_master" in trained.launch.traits else "float32"
        demand(types["compute_dtype"] == self.half, f"computes in {types['compute_dtype']}")
        demand(types["parameters"] == kept, f"keeps parameters in {types['parameters']}")
        demand(types["master"] == "float32", f"the optimizer updates {types['master']} weights")
        return types
