"""Evidence is lost where the effect is: each strategy, stubbed in the ways that it could fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import TINY, part_named

from strategies import CATALOG
from strategies.activations import kernels
from strategies.activations.attend import Attend
from strategies.activations.checkpoint import Checkpoint
from strategies.activations.compile import Compile
from strategies.activations.host import Host
from strategies.activations.offload_activations import OffloadActivations
from strategies.activations.parts import Recompute, segments
from strategies.adapters.controlnet import ControlNet
from strategies.adapters.lora import Dora, Lora, Qlora, inject
from strategies.adapters.partial import DiffFit, Head
from strategies.base import NotInForce
from strategies.communication.sparse_embedding import SparseEmbedding
from strategies.evidence import frozen, states
from strategies.optimizers import bf16_adamw
from strategies.optimizers.adafactor import Adafactor
from strategies.optimizers.adamw import AdamW
from strategies.optimizers.adamw_bf16 import AdamWBf16
from strategies.optimizers.low_bit import Adam4bit, Adam8bit, PagedAdam8bit
from strategies.optimizers.muon import Muon
from strategies.optimizers.offload_adamw import OffloadAdamW
from strategies.optimizers.quantised import torchao_adam
from strategies.optimizers.sgd import Sgd
from strategies.precision.bfloat import Bf16Master, Bf16Pure
from strategies.precision.fp8 import Fp8
from strategies.precision.fp16 import Fp16
from strategies.precision.mixed import Bf16, Fp32, Tf32
from strategies.sharding import sharding_kinds
from strategies.sparsity.prune import Prune
from strategies.sparsity.prune_structured import PruneStructured, prune_heads
from strategies.sparsity.sparse24 import Sparse24
from strategies.step.accumulate import Accumulate
from strategies.step.backward import Backward, Caller
from strategies.step.ema import Average, Ema
from strategies.step.optimizer_in_backward import InBackward, OptimizerInBackward
from tests.strategies.test_compress import LOST as LOST_ON_THE_WIRE


def recompute_as(split, policy=None):
    def edit(self, module, subject):
        module.run_blocks = Recompute(module.run_blocks, split, policy)

    return edit


class Pretending(Recompute):
    """Counts its parts and recomputes nothing."""

    def part(self, blocks, level, *given):
        return self._inside(blocks, level, *given)


class Boasting(Pretending):
    """Counts blocks twice and recomputes nothing."""

    def _inside(self, blocks, level, *given):
        self.blocks_run += len(blocks)
        return super()._inside(blocks, level, *given)


def pretend(kind):
    def edit(self, module, subject):
        module.run_blocks = kind(module.run_blocks, segments(1))

    return edit


def attend_by(function):
    def edit(self, module, subject):
        for block in module.blocks:
            block.attn.attend = function

    return edit


class Idle(Host):
    """Says that it moves tensors and keeps them where they are."""

    def run(self, blocks, x_BTD, c_BD):
        return self.inner(blocks, x_BTD, c_BD)


class Parked(Host):
    """Moves a tensor out in the last block alone."""

    def run(self, blocks, x_BTD, c_BD):
        return super().run(blocks[-1:], self.inner(blocks[:-1], x_BTD, c_BD), c_BD)


def host_as(kind):
    def edit(self, module, subject):
        module.run_blocks = kind(module.run_blocks)

    return edit


COMPILE, FP8 = Compile.edit_model, Fp8.edit_model


def the_other_float8(self, module, subject):
    FP8(Fp8(emulate=not self.emulate), module, subject)


def first_block_in_float8(self, module, subject):
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(module.blocks[0])


def skipping_one(self, module, subject):
    COMPILE(self, module, subject)
    module.blocks[0]._compiled_call_impl = None


def without_budget(self, module, subject):
    COMPILE(Compile(backend=self.backend), module, subject)


def one_in_four(self, module, subject):
    module.blocks[0].attn.attend = kernels.naive


def adamw(**other):
    def make(self, params, settings, launch):
        usual = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
        usual |= {"weight_decay": settings.weight_decay, "fused": True}
        return torch.optim.AdamW(params, **{**usual, **other})

    return make


def sgd(self, params, settings, launch):
    return torch.optim.SGD(params, lr=settings.learning_rate)


def float_adam(self, params, settings, launch):
    return AdamW().make_optimizer(params, settings, launch)


def half_the_bits(self, params, settings, launch):
    return torchao_adam("AdamW8bit", params, settings, launch.device)


def no_momentum(self, params, settings, launch):
    return states.count_steps(torch.optim.SGD(params, lr=settings.learning_rate))


def unpaged(self, params, settings, launch):
    return Adam8bit().make_optimizer(params, settings, launch)


def first_matrices(self, module, subject):
    for block in module.blocks:
        block.attn.qkv.weight.hidden_matrix = True


def plain_sgd(self, params, settings, launch):
    return torch.optim.SGD(params, lr=settings.learning_rate, momentum=0.9)


class Hoarding(InBackward):
    """Steps in backward and keeps every gradient."""

    def _follow(self, gradient):
        super()._follow(gradient)
        self.kept = [*getattr(self, "kept", []), gradient]


def hoard(self, trained):
    return Hoarding(trained)


def adapters_left_frozen(self, module, subject):
    inject(module, subject, self.rank)
    frozen.train_only(module, {"final_layer.linear.weight"})


def full_precision(self, module, subject):
    inject(module, subject, self.rank)


def twice_the_rank(self, module, subject):
    inject(module, subject, 2 * self.rank)


def no_magnitudes(self, module, subject):
    inject(module, subject, self.rank)


def everything_trains(self, module, subject):
    inject(module, subject, self.rank)
    module.requires_grad_(True)


def biases_only(self, module, subject):
    names = {n for n, _ in module.named_parameters() if n.endswith(".bias")}
    frozen.train_only(module, names)


CONTROL, PRUNE, MASKS = ControlNet.edit_model, Prune.edit_model, Prune.attach


def cut_off(self, module, subject):
    CONTROL(self, module, subject)
    for block in module.blocks[:2]:
        block.zero.requires_grad_(False)


def half(self, module, subject):
    CONTROL(ControlNet(), module, subject)


def half_pruned(self, module, subject):
    PRUNE(Prune(), module, subject)


def idle_masks(self, trained):
    masks = MASKS(self, trained)
    for parameter, _ in masks.pruned:
        parameter._backward_hooks.clear()
    masks.after_step = lambda: None
    return masks


def heads_alone(self, module, subject):
    for block in module.blocks:
        block.had = (block.attn.num_heads, block.mlp.fc1.out_features, 10**9)
        prune_heads(block.attn, 2)


class AsUsual(Caller):
    """Counts its calls, and calls backward as everyone does."""

    def __call__(self, loss, **kwargs):
        self.calls += 1
        self.usual(loss, **kwargs)


class Half(Caller):
    """Keeps the gradients of half the parameters."""

    def _autograd_grad(self, loss):
        self.parameters = self.parameters[::2]
        super()._autograd_grad(loss)


def call_by(kind):
    def configure(self, accelerator, module, launch):
        parameters = [p for p in module.parameters() if p.requires_grad]
        accelerator.backward = kind(accelerator, parameters, self.call)

    return configure


class Lazy(Average):
    """Never averages."""

    def after_step(self):
        pass


class Counting(Average):
    """Counts its updates and makes none."""

    def after_step(self):
        self.updates += 1


class WitnessOnly(Average):
    """Averages the witness and leaves the shards alone."""

    def after_step(self):
        kept = [shard.clone() for shard in self.shards]
        super().after_step()
        for shard, before in zip(self.shards, kept, strict=True):
            shard.copy_(before)


class Copying(Average):
    """Copies the weights instead of averaging them."""

    def after_step(self):
        super().after_step()
        for shard, (_, master) in zip(self.shards, self._masters(), strict=True):
            shard.copy_(master.detach())


def attach(kind=Average, decay=None, place="device"):
    def attached(self, trained):
        return kind(trained, trained.settings.ema_decay if decay is None else decay, place)

    return attached


def nothing(*_, **__):
    return None


def nearest(exact, generator=None):
    return exact.to(torch.bfloat16)


def dropping(weight, carried, update):
    return (weight.float() + update).to(weight.dtype), torch.zeros_like(carried)


AS_BF16 = {"mixed_precision": "bf16"}
LOST = {
    "fp32 runs as bf16": ("single", Fp32, "accelerator_kwargs", lambda *_: AS_BF16),
    "bf16 without autocast": ("single+bf16", Bf16, "accelerator_kwargs", lambda *_: {}),
    "tf32 runs as bf16": ("single+tf32", Tf32, "accelerator_kwargs", lambda *_: AS_BF16),
    "bf16_pure keeps float32": ("single+bf16_pure", Bf16Pure, "edit_model", nothing),
    "fp8 runs as bf16": ("single+fp8:emulate=on", Fp8, "edit_model", nothing),
    "fp8 emulated": ("single+fp8", Fp8, "edit_model", the_other_float8),
    "fp8 not emulated": ("single+fp8:emulate=on", Fp8, "edit_model", the_other_float8),
    "one block of four in fp8": ("single+fp8", Fp8, "edit_model", first_block_in_float8),
    "fp16 without autocast": ("single+fp16", Fp16, "accelerator_kwargs", lambda *_: {}),
    "no master beside bfloat16 weights": (
        "single+bf16_master", Bf16Master, "accelerator_kwargs", lambda *_: AS_BF16,
    ),
    "adamw rounds to nearest": (
        "single+bf16_pure+adamw_bf16", AdamWBf16, "make_optimizer", adamw(),
    ),
    "checkpoint edits nothing": ("single+checkpoint", Checkpoint, "edit_model", nothing),
    "every=2 edits nothing": ("single+checkpoint:every=2", Checkpoint, "edit_model", nothing),
    "sqrt edits nothing": ("single+checkpoint:every=sqrt", Checkpoint, "edit_model", nothing),
    "one segment, not one a block": (
        "single+checkpoint", Checkpoint, "edit_model", recompute_as(segments(4)),
    ),
    "one segment, not sqrt": (
        "single+checkpoint:every=sqrt", Checkpoint, "edit_model", recompute_as(segments(4)),
    ),
    "parts counted, not recomputed": (
        "single+checkpoint", Checkpoint, "edit_model", pretend(Pretending),
    ),
    "blocks counted twice, not recomputed": (
        "single+checkpoint", Checkpoint, "edit_model", pretend(Boasting),
    ),
    "two segments, not nested": (
        "single+checkpoint:keep=nested", Checkpoint, "edit_model", recompute_as(segments(2)),
    ),
    "one segment, not prefixes": (
        "single+checkpoint:keep=nothing", Checkpoint, "edit_model", recompute_as(segments(4)),
    ),
    "products recomputed as well": (
        "single+checkpoint:keep=products", Checkpoint, "edit_model", recompute_as(segments(1)),
    ),
    "activations stay": ("single+offload_activations", OffloadActivations, "edit_model", nothing),
    "activations stay, by another runner": (
        "single+offload_activations", OffloadActivations, "edit_model", host_as(Idle),
    ),
    "one block's activations of four": (
        "single+offload_activations", OffloadActivations, "edit_model", host_as(Parked),
    ),
    "checkpoints stay": (
        "single+checkpoint+offload_activations:what=checkpoints",
        OffloadActivations, "edit_model", nothing,
    ),
    "nothing compiled": ("single+compile:backend=aot_eager", Compile, "edit_model", nothing),
    "three blocks compiled of four": (
        "single+compile:backend=aot_eager", Compile, "edit_model", skipping_one,
    ),
    "the model not compiled": (
        "single+compile:scope=model,backend=aot_eager", Compile, "edit_model", nothing,
    ),
    "compiled without the budget": (
        "single+compile:backend=aot_eager,budget=0.5", Compile, "edit_model", without_budget,
    ),
    "torch chooses, not naive": ("single+attend", Attend, "edit_model", nothing),
    "math, not naive": ("single+attend", Attend, "edit_model", attend_by(kernels.forced("MATH"))),
    "naive in one block of four": ("single+attend", Attend, "edit_model", one_in_four),
    "naive, not math": (
        "single+attend:kernel=math", Attend, "edit_model", attend_by(kernels.naive),
    ),
    "naive, not flash": (
        "single+attend:kernel=flash", Attend, "edit_model", attend_by(kernels.naive),
    ),
    "sgd": ("single", AdamW, "make_optimizer", sgd),
    "foreach for fused": ("single", AdamW, "make_optimizer", adamw(fused=False, foreach=True)),
    "fused for foreach": ("single+adamw:impl=foreach", AdamW, "make_optimizer", adamw()),
    "fused for plain": ("single+adamw:impl=plain", AdamW, "make_optimizer", adamw()),
    "other betas": ("single", AdamW, "make_optimizer", adamw(betas=(0.9, 0.99))),
    "other decay of weights": ("single", AdamW, "make_optimizer", adamw(weight_decay=0.1)),
    "other learning rate": ("single", AdamW, "make_optimizer", adamw(lr=2e-4)),
    "amsgrad": ("single", AdamW, "make_optimizer", adamw(amsgrad=True)),
    "float moments for 8 bits": ("single+adam8bit", Adam8bit, "make_optimizer", float_adam),
    "another library": ("single+adam8bit", Adam8bit, "make_optimizer", half_the_bits),
    "8 bits for 4": ("single+adam4bit", Adam4bit, "make_optimizer", half_the_bits),
    "moments that are not paged": (
        "single+paged_adam8bit", PagedAdam8bit, "make_optimizer", unpaged,
    ),
    "adam for adafactor": ("single+adafactor", Adafactor, "make_optimizer", float_adam),
    "adam for muon": ("single+muon", Muon, "make_optimizer", float_adam),
    "adam for every matrix": ("single+muon", Muon, "edit_model", first_matrices),
    "adam for sgd": ("single+sgd", Sgd, "make_optimizer", float_adam),
    "sgd without its momentum": ("single+sgd", Sgd, "make_optimizer", no_momentum),
    "sgd that counts no steps": ("single+sgd", Sgd, "make_optimizer", plain_sgd),
    "steps after backward": (
        "single+optimizer_in_backward", OptimizerInBackward, "attach", nothing,
    ),
    "gradients kept": ("single+optimizer_in_backward", OptimizerInBackward, "attach", hoard),
    "no adapters": ("single+lora", Lora, "edit_model", nothing),
    "adapters of another rank": ("single+lora", Lora, "edit_model", twice_the_rank),
    "frozen adapters": ("single+lora", Lora, "edit_model", adapters_left_frozen),
    "weights that train beside them": ("single+lora", Lora, "edit_model", everything_trains),
    "no checksums": ("single+lora", Lora, "attach", nothing),
    "no magnitudes": ("single+dora", Dora, "edit_model", no_magnitudes),
    "weights in full": ("single+qlora", Qlora, "edit_model", full_precision),
    "the whole model trains": ("single+head", Head, "edit_model", nothing),
    "biases train too": ("single+head", Head, "edit_model", biases_only),
    "no scales": ("single+difffit", DiffFit, "edit_model", biases_only),
    "the whole model, no branch": ("single+controlnet", ControlNet, "edit_model", nothing),
    "a branch that is cut off": ("single+controlnet", ControlNet, "edit_model", cut_off),
    "no branch on the second half": ("single+controlnet:share=1.0", ControlNet, "edit_model", half),
    "no masks": ("single+prune", Prune, "attach", nothing),
    "masks that mask nothing": ("single+prune", Prune, "attach", idle_masks),
    "other masks": ("single+prune:fraction=0.9", Prune, "edit_model", half_pruned),
    "nothing removed": ("single+prune_structured", PruneStructured, "edit_model", nothing),
    "heads and no channels": (
        "single+prune_structured", PruneStructured, "edit_model", heads_alone,
    ),
    "dense layers": ("single+bf16+sparse24", Sparse24, "edit_model", nothing),
    "an optimizer on the device": (
        "single+offload_adamw", OffloadAdamW, "make_optimizer", float_adam,
    ),
    "dense gradients": (
        "single+sgd:momentum=0.0+sparse_embedding", SparseEmbedding, "edit_model", nothing,
    ),
    "backward as usual": ("single+backward", Backward, "configure", nothing),
    "the graph freed": ("single+backward", Backward, "configure", call_by(AsUsual)),
    "gradients accumulated": (
        "single+backward:call=autograd_grad", Backward, "configure", call_by(AsUsual),
    ),
    "half the gradients": (
        "single+backward:call=autograd_grad", Backward, "configure", call_by(Half),
    ),
    "no accumulation": ("single+accumulate", Accumulate, "accelerator_kwargs", lambda *_: {}),
    "half the accumulation": (
        "single+accumulate:steps=4",
        Accumulate,
        "accelerator_kwargs",
        lambda *_: {"gradient_accumulation_steps": 2},
    ),
    "no average": ("single", Ema, "attach", nothing),
    "no average in host memory": ("single+ema:place=cpu", Ema, "attach", nothing),
    "an average nobody asked for": ("single+ema:place=none", Ema, "attach", attach()),
    "an average that never steps": ("single", Ema, "attach", attach(Lazy)),
    "an average that only counts": ("single", Ema, "attach", attach(Counting)),
    "a witness without an average": ("single", Ema, "attach", attach(WitnessOnly)),
    "a copy, not an average": ("single", Ema, "attach", attach(Copying)),
    "another decay": ("single", Ema, "attach", attach(decay=0.5)),
}  # fmt: skip
"""What happened instead -> (recipe, strategy, the stage that is stubbed, the stub)."""


@pytest.mark.parametrize("case", LOST)
def test_evidence_is_lost_when_the_effect_is_stubbed(case, train_here, monkeypatch):
    text, kind, stage, stub = LOST[case]
    monkeypatch.setattr(kind, stage, stub)
    run, _ = train_here(dataclasses.replace(TINY, recipe=text), 2)
    with pytest.raises(NotInForce):
        part_named(text, kind.name).evidence(run.trained)


def test_every_strategy_without_a_launch_file_is_stubbed():
    here = {kind.name for _, kind, _, _ in LOST.values()}
    on_the_wire = {strategy.name for strategy, _ in LOST_ON_THE_WIRE.values()}
    assert here | on_the_wire == set(CATALOG) - set(sharding_kinds())


def test_tf32_left_on_is_noticed(train_here, monkeypatch):
    monkeypatch.setattr(Fp32, "edit_model", nothing)
    run, _ = train_here(TINY, 1)
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with pytest.raises(NotInForce, match="TF32 is on"):
            Fp32().evidence(run.trained)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("write", "function", "stub"),
    [("stochastic", "rounded_by_chance", nearest), ("kahan", "compensated", dropping)],
)
def test_bfloat16_written_plainly_is_noticed(write, function, stub, train_here, monkeypatch):
    monkeypatch.setattr(bf16_adamw, function, stub)
    text = f"single+bf16_pure+adamw_bf16:write={write}"
    run, _ = train_here(dataclasses.replace(TINY, recipe=text), 2)
    with pytest.raises(NotInForce, match="plain rounding"):
        part_named(text, "adamw_bf16").evidence(run.trained)
