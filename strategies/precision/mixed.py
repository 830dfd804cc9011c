"""float32, TF32, and 16-bit computation: fp32, tf32, bf16, fp16; weights in 16 bits with a float32
master (bf16_master) or without (bf16_pure, fp16_pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.evidence.rules import label
from strategies.evidence.states import dtypes, products
from strategies.strategy import Strategy
from strategies.subject import Subject
from strategies.workloads import BOTH, SAMPLE, TRAIN


def typed(run: TrainingRun, compute: str, parameters: str, master: str = "") -> dict[str, str]:
    """Return the types of a run, and demand these; ``master``: of the weights that are updated."""
    types = dtypes(run)
    found, stored, updated = (types[key] for key in ("compute_dtype", "parameters", "master"))
    demand(found == compute, f"the model computes in {found}, expected {compute}")
    demand(stored == parameters, f"parameters are {stored}, expected {parameters}")
    if master and "sampling" not in run.launch.traits:
        demand(updated == master, f"the optimizer updates {updated} weights, expected {master}")
    return types


class Precision(Strategy):
    """Base of all: ``mixed`` is accelerate's mixed precision; ``stored`` the type to which weights
    are cast, empty if they stay as the engine keeps them."""

    slot: ClassVar[Slot] = Slot.PRECISION
    workloads: ClassVar[tuple[str, ...]] = BOTH
    mixed: ClassVar[str] = "no"
    stored: ClassVar[str] = ""

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        return {"mixed_precision": self.mixed}

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        from strategies import initial

        if self.stored:
            initial.cast(module, getattr(torch, self.stored))


@dataclass(frozen=True, kw_only=True)
class Fp32(Precision):
    """Everything in float32, matrix products included."""

    name: ClassVar[str] = "fp32"
    source: ClassVar[str] = "IEEE 754 single precision; torch.backends.cuda.matmul.allow_tf32 off"

    rounds: ClassVar[bool] = False

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = self.rounds
        torch.backends.cudnn.allow_tf32 = self.rounds

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        import torch

        facts = {**typed(run, "float32", "float32"), **products(run)}
        others = set(facts.get("products", ())) - {"float32"}
        text = f"matrix products of a training step ran in {sorted(others)}, expected float32"
        demand(not others, text)
        tf32 = torch.backends.cuda.matmul.allow_tf32
        demand(tf32 == self.rounds, f"TF32 is {'on' if tf32 else 'off'}")
        return label({**facts, "tf32": tf32}, "tf32")


@dataclass(frozen=True, kw_only=True)
class Tf32(Fp32):
    """float32 whose matrix products round operands to TF32.

    TF32 has 10 bits of mantissa, and only GPUs round to it.

    DiT's own trainer uses it.
    """

    name: ClassVar[str] = "tf32"
    alters: ClassVar[tuple[str, ...]] = ("rounding",)
    unit: ClassVar[float] = 2**-11
    source: ClassVar[str] = "NVIDIA A100 white paper 2020 (TF32); facebookresearch/DiT train.py"
    needs: ClassVar[tuple[str, ...]] = ("tf32",)

    rounds: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Bf16(Precision):
    """Mixed precision in bfloat16, in the engine's own form.

    Under ddp and single it is autocast over float32 weights. Under DeepSpeed it is bfloat16 weights
    with a float32 master. Under FSDP2 it is float32 shards that are gathered in bfloat16. The
    evidence names the form of a row.
    """

    name: ClassVar[str] = "bf16"
    alters: ClassVar[tuple[str, ...]] = ("rounding",)
    unit: ClassVar[float] = 2**-8
    source: ClassVar[str] = "Micikevicius et al. 2018 (arXiv:1710.03740); Kalamkar et al. 2019"
    needs: ClassVar[tuple[str, ...]] = ("bf16",)

    mixed: ClassVar[str] = "bf16"
    half: ClassVar[str] = "bfloat16"
    own_layers: ClassVar[bool] = False
    """It replaces layers, and checks their products itself."""

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute"})

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        traits = run.launch.traits
        stored = self.half if "float_master" in traits else "float32"
        facts = {**typed(run, self.half, stored, "float32"), **products(run)}
        others = self.own_layers or traits & {"replaced_layers", "quantized_weights"}
        if "products" in facts and not others:
            least = len(run.linears) * run.observed.micro_steps
            for phase in ("forward",) if traits & ONE_WAY else ("forward", "backward"):
                ran = run.observed.products(phase)
                text = f"{ran[self.half]} matrix products of {phase} ran in {self.half}"
                demand(ran[self.half] >= least, f"{text}, not {least}: {dict(ran)}")
        return facts


ONE_WAY = frozenset({"frozen_blocks", "some_blocks", "sampling"})
"""Traits under which backward has no product for some of the blocks' layers."""
UNSCALED = "_amp_foreach_non_finite_check_and_unscale_"
"""torch's operator that divides gradients by the loss scale."""


@dataclass(frozen=True, kw_only=True)
class Fp16(Bf16):
    """Mixed precision in float16 with a dynamic loss scale.

    Under ddp and single it is autocast over float32 weights. Under DeepSpeed it is float16 weights
    with a float32 master. ``scale`` is the first scale. A step whose gradients overflow is skipped,
    which makes the row void; then start with a lower scale.
    """

    name: ClassVar[str] = "fp16"
    workloads: ClassVar[tuple[str, ...]] = (TRAIN,)
    idle: ClassVar[str] = "there is no loss to scale when samples are drawn; take fp16_pure"
    unit: ClassVar[float] = 2**-11
    source: ClassVar[str] = (
        "Micikevicius et al. 2018 (arXiv:1710.03740); torch.amp.GradScaler, DeepSpeed's fp16"
    )
    needs: ClassVar[tuple[str, ...]] = ("fp16",)

    ranges: ClassVar[dict[str, Any]] = {
        "scale": (
            lambda v: isinstance(v, int) and v >= 2 and not v & (v - 1),
            "a power of two from 2, as 65536",
        )
    }

    half: ClassVar[str] = "float16"
    scale: int = 65536

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute", "scales_gradients"})

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        from accelerate import GradScalerKwargs

        scaler = GradScalerKwargs(init_scale=float(self.scale))
        return {"mixed_precision": "fp16", "kwargs_handlers": [scaler]}

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        launch.engine.sixteen_bits(accelerator, scale=self.scale)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts, scale = super().evidence(run), run.engine.report(run).loss_scale
        demand(scale is not None and scale > 1, f"the loss scale is {scale}, expected above 1")
        facts = {**facts, "loss_scale": scale}
        # An engine's own loss scaling unscales by plain products, which are no evidence.
        unscaled = any(UNSCALED in ran.name for ran in run.observed.ran)
        return facts if unscaled else label(facts, "loss_scale")


@dataclass(frozen=True, kw_only=True)
class Fp16Pure(Precision):
    """Weights and activations in float16.

    float16 has 10 bits of mantissa (bfloat16 has 7), and its largest number is 65504. It is for
    sampling, because training in it loses small gradients.
    """

    name: ClassVar[str] = "fp16_pure"
    alters: ClassVar[tuple[str, ...]] = ("rounding",)
    unit: ClassVar[float] = 2**-11
    source: ClassVar[str] = "IEEE 754 half precision; torch_dtype=float16 of diffusers' pipelines"
    workloads: ClassVar[tuple[str, ...]] = (SAMPLE,)
    stored: ClassVar[str] = "float16"

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute"})

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        return {**typed(run, "float16", "float16"), **products(run)}


@dataclass(frozen=True, kw_only=True)
class Bf16Master(Bf16):
    """bfloat16 weights with DeepSpeed's float32 master copy.

    Gradients are bfloat16, and updates go through the master copy, which ZeRO shards. It is refused
    if the engine keeps no master copy: autocast over float32 weights is ``bf16``.
    """

    name: ClassVar[str] = "bf16_master"
    workloads: ClassVar[tuple[str, ...]] = (TRAIN,)
    source: ClassVar[str] = "Micikevicius et al. 2018 (arXiv:1710.03740), 3.1; DeepSpeed's bf16"

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        has_master = "float_master" in run.launch.traits
        demand(has_master, "the engine keeps no float32 master of 16-bit weights")
        return super().evidence(run)


@dataclass(frozen=True, kw_only=True)
class Bf16Pure(Bf16):
    """Weights, gradients, optimizer state all in bfloat16.

    There is no float32 master of them.

    The average of the weights (``ema``) stays float32, which takes 4 of the 12 bytes a parameter
    that are left. ``ema:place=none`` removes it. A plain optimizer loses every update below half a
    unit in the last of 8 bits. ``adamw_bf16`` writes with stochastic rounding or a compensated sum.
    ``autocast`` computes norms and sums in float32 and keeps more activations. Public trainers do
    so if they cast their weights and leave accelerate's mixed precision on.
    """

    name: ClassVar[str] = "bf16_pure"
    alters: ClassVar[tuple[str, ...]] = ("rounding", "update")
    source: ClassVar[str] = "Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv:2010.06192)"
    stored: ClassVar[str] = "bfloat16"

    autocast: bool = False

    def traits(self) -> frozenset[str]:
        return frozenset({"half_compute", "pure_bf16"})

    def accelerator_kwargs(self, launch: RunContext) -> dict[str, Any]:
        autocast = self.autocast or self._keeps_bf16(launch)
        return {"mixed_precision": "bf16" if autocast else "no"}

    @staticmethod
    def _keeps_bf16(launch: RunContext) -> bool:
        """Return whether DeepSpeed must be configured to keep all its tensors in bfloat16.

        DeepSpeed then casts float32 adapters too, and without this setting casts nothing (0.19.8,
        runtime/engine.py, ``_configure_distributed_model``).
        """
        return "float_master" in launch.traits and "float_adapters" not in launch.traits

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        if self._keeps_bf16(launch):
            launch.engine.sixteen_bits(accelerator, master=False)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        adapters = "float32" if "float_adapters" in run.launch.traits else "bfloat16"
        stored = "+".join(sorted({"bfloat16", adapters}))
        types = typed(run, "bfloat16", stored, adapters)
        moments = types["moments"]
        demand(moments in (adapters, ""), f"moments are {moments}, expected {adapters}")
        if "float_master" in run.launch.traits:
            return types
        mixed = run.accelerator.mixed_precision == "bf16"
        demand(mixed == self.autocast, f"accelerate's autocast is {'on' if mixed else 'off'}")
        return label({**types, "autocast": mixed}, "autocast")
