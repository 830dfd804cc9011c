"""The ways in which the effect of each strategy could fail, by what is stubbed instead.

``LOST``: what happened instead -> (recipe, strategy, the stage that is stubbed, the stub).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import peft
import torch

from strategies import CATALOG
from strategies.activations import attend as kernels
from strategies.activations.attend import Attend
from strategies.activations.block_parts import Recompute
from strategies.activations.checkpoint import RUNNER, Checkpoint, parts_of
from strategies.activations.compile import Compile
from strategies.activations.offload_activations import Host, OffloadActivations
from strategies.activations.runners import run_singly
from strategies.adapters import beside
from strategies.adapters import coded as products
from strategies.adapters.cast import Cast
from strategies.adapters.controlnet import ControlNet
from strategies.adapters.lora import Dora, Lora, Qlora
from strategies.adapters.partial import DiffFit, Head
from strategies.communication.sparse_embedding import SparseEmbedding
from strategies.distillation.distill import Distill
from strategies.distillation.teacher import Lesson
from strategies.evidence import states
from strategies.losses.cross_entropy import CrossEntropy
from strategies.optimizers.table import TABLE
from strategies.precision.fp8 import Fp8
from strategies.precision.mixed import Bf16, Bf16Pure, Fp16, Fp16Pure, Fp32, Tf32
from strategies.sampling import eight_bits
from strategies.sampling.palette import Palette
from strategies.sampling.quantised import Float8, Int8, Nf4
from strategies.sparsity.prune import Prune, PruneStructured
from strategies.sparsity.sparse24 import Sparse24
from strategies.step.backward import Accumulate, Backward, Caller
from strategies.step.ema import Average, Ema
from strategies.step.optimizer_in_backward import InBackward, OptimizerInBackward
from strategies.strategy import Strategy
from strategies.streaming.block_swap import BlockSwap

Table = dict[str, tuple[str, type[Strategy], str, Callable[..., Any]]]


def nothing(*_: Any, **__: Any) -> None:
    """A stage that does nothing."""


def changed(stage: Callable[..., Any], **changes: Any) -> Callable[..., Any]:
    """The stage of the strategy with other parameters in its place."""
    return lambda self, *given: stage(dataclasses.replace(self, **changes), *given)


# -- precision --

AS_BF16 = {"mixed_precision": "bf16"}
FP8 = Fp8.edit_model


def unrounded(self, module, subject):
    """Layers of the right class that multiply as they did before."""
    FP8(self, module, subject)
    for name in subject.linears:
        layer = module.get_submodule(name)
        layer.forward = lambda x, layer=layer: torch.nn.functional.linear(
            x, layer.weight, layer.bias
        )


def while_training(autocast):
    """A model that computes as asked when it is looked at, and otherwise while it trains."""

    def edit(self, module, subject):
        inner = module.forward

        def forward(*given, **named):
            if not torch.is_grad_enabled():
                return inner(*given, **named)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return inner(*given, **named).float()

        module.forward = forward

    return edit


LOST: Table = {
    "fp32 that trains as bf16": ("single", Fp32, "edit_model", while_training(True)),
    "bf16 without autocast": ("single+bf16", Bf16, "accelerator_kwargs", lambda *_: {}),
    "tf32 runs as bf16": ("single+tf32", Tf32, "accelerator_kwargs", lambda *_: AS_BF16),
    "bf16_pure keeps float32": ("single+bf16_pure", Bf16Pure, "edit_model", nothing),
    "fp8 emulated": ("single+fp8", Fp8, "edit_model", changed(FP8, emulate=True)),
    "one scale, not one a row": (
        "single+fp8:emulate=on,scaling=rowwise", Fp8, "edit_model",
        changed(FP8, scaling="tensorwise"),
    ),
    "layers that round nothing": ("single+fp8:emulate=on", Fp8, "edit_model", unrounded),
    "fp16 without autocast": ("single+fp16", Fp16, "accelerator_kwargs", lambda *_: {}),
}  # fmt: skip


# -- activations that are kept, kernels that are others, and blocks that are not compiled --


COMPILE = Compile.edit_model


def recompute_as(length, **how):
    def edit(self, module, subject):
        module.run_blocks = Recompute(module.run_blocks, length, **how)

    return edit


def recompute_first_half(self, module, subject):
    blocks = subject.blocks(module)
    first = blocks[: len(blocks) // 2]
    module.run_blocks = Recompute(module.run_blocks, 1, chosen=first)


class Pretending(Recompute):
    """Counts its parts and recomputes nothing."""

    def part(self, blocks, *given):
        return self._inside(blocks, *given)


def pretend(kind):
    def edit(self, module, subject):
        module.run_blocks = kind(module.run_blocks, 1)

    return edit


def parts_by(kind, first=0):
    """Recomputes the FFNs of the blocks from ``first`` on, by a runner of this kind."""

    def edit(self, module, subject):
        run_singly(module, parts_of(subject.blocks(module)[first:], "ffn"), RUNNER)
        setattr(module, RUNNER, kind(getattr(module, RUNNER), 1))

    return edit


def attend_by(function):
    def edit(self, module, subject):
        for block in module.blocks:
            block.attn.attend = function

    return edit


class Parked(Host):
    """Moves a tensor out in the last block alone."""

    def run(self, blocks, x_BTD, c_BD):
        return super().run(blocks[-1:], self.inner(blocks[:-1], x_BTD, c_BD), c_BD)


def host_as(kind):
    def edit(self, module, subject):
        module.run_blocks = kind(module.run_blocks)

    return edit


def skipping_one(self, module, subject):
    COMPILE(self, module, subject)
    module.blocks[0]._compiled_call_impl = None


def one_in_four(self, module, subject):
    module.blocks[0].attn.attend = kernels.naive


def flash_when_asked(q, k, v):
    """What one forward after training would be shown, and what training does instead."""
    flash = torch.nn.functional.scaled_dot_product_attention
    return (kernels.naive if torch.is_grad_enabled() else flash)(q, k, v)


LOST |= {
    "all logits, not torch's fused loss": (
        "single+cross_entropy:kind=fused", CrossEntropy, "edit_model", nothing,
    ),
    "checkpoint edits nothing": ("single+checkpoint", Checkpoint, "edit_model", nothing),
    "one segment, not one a block": (
        "single+checkpoint", Checkpoint, "edit_model", recompute_as(4),
    ),
    "parts counted, not recomputed": (
        "single+checkpoint", Checkpoint, "edit_model", pretend(Pretending),
    ),
    "one segment, not prefixes": (
        "single+checkpoint:keep=nothing", Checkpoint, "edit_model", recompute_as(4),
    ),
    "the first half, not every second block": (
        "single+checkpoint:share=0.5,spread=on", Checkpoint, "edit_model", recompute_first_half,
    ),
    "products recomputed as well": (
        "single+checkpoint:keep=products", Checkpoint, "edit_model", recompute_as(1),
    ),
    "FFNs of three blocks of four": (
        "single+checkpoint:part=ffn", Checkpoint, "edit_model", parts_by(Recompute, 1),
    ),
    "activations stay": ("single+offload_activations", OffloadActivations, "edit_model", nothing),
    "one block's activations of four": (
        "single+offload_activations", OffloadActivations, "edit_model", host_as(Parked),
    ),
    "three blocks compiled of four": (
        "single+compile:backend=aot_eager", Compile, "edit_model", skipping_one,
    ),
    "compiled without the budget": (
        "single+compile:backend=aot_eager,budget=0.5", Compile, "edit_model",
        changed(COMPILE, budget=1.0),
    ),
    "naive in one block of four": ("single+attend", Attend, "edit_model", one_in_four),
    "flash in one forward, naive in training": (
        "single+attend:kernel=flash", Attend, "edit_model", attend_by(flash_when_asked),
    ),
}  # fmt: skip


# -- students that learn from nobody, from another, or by another loss than they say --


DISTILLED = Distill.attach


def then(change):
    """Attached as ever, and changed by ``change(teacher, lesson)``."""

    def attach(self, run):
        teacher = DISTILLED(self, run)
        change(teacher, run.supervise)
        return teacher

    return attach


def in_another_proportion(teacher, lesson):
    lesson.weights = {**lesson.weights, "true": 0.4}


def moves(teacher, lesson):
    first = next(p for p in teacher.module.parameters() if p.ndim > 1)
    teacher.after_step = lambda: first.add_(1e-3)


def taught_by(kind):
    def attach(self, run):
        teacher = DISTILLED(self, run)
        run.supervise = kind(teacher, run.supervise.captured, self.weights)
        return teacher

    return attach


class Shown(Lesson):
    """Takes the loss against the teacher, and differentiates the true one."""

    def __call__(self, true_loss, predict, conditions):
        super().__call__(true_loss, predict, conditions)
        return true_loss(predict).mean()


PLAIN = "single+distill"
LOST |= {
    "no teacher": (PLAIN, Distill, "attach", nothing),
    "a teacher that moves": (PLAIN, Distill, "attach", then(moves)),
    "both in another proportion": (PLAIN, Distill, "attach", then(in_another_proportion)),
    "a loss that is taken and not differentiated": (PLAIN, Distill, "attach", taught_by(Shown)),
    "a teacher in float32, not bfloat16": (
        "single+distill:store=bf16", Distill, "attach", changed(DISTILLED, store="fp32"),
    ),
}  # fmt: skip


# -- optimizers that are others, or step as others do --


KINDS = {name: CATALOG[name] for name in TABLE}
AdamW = KINDS["adamw"]
PURE = {"adamw_bf16": "bf16_pure+"}
"""What an optimizer does not train without."""


def other_betas(self, params, settings, launch):
    return torch.optim.AdamW(params, **{**settings.adam, "betas": (0.9, 0.99), "fused": True})


def float_adam(self, params, settings, launch):
    return AdamW().make_optimizer(params, settings, launch)


def first_matrices(self, module, subject):
    for block in module.blocks:
        block.attn.qkv.weight.hidden_matrix = True


LOST |= {
    f"adam for {name}": (f"single+{PURE.get(name, '')}{name}", kind, "make_optimizer", float_adam)
    for name, kind in KINDS.items()
    if name != "adamw"
}
LOST |= {
    "other betas": ("single", AdamW, "make_optimizer", other_betas),
    "adam for every matrix": ("single+muon", CATALOG["muon"], "edit_model", first_matrices),
}


# -- adapters that are missing, others, or not what trains --


Lokr, Loha, Oft = (CATALOG[name] for name in ("lokr", "loha", "oft"))

ADAPT, CONTROL = beside.Beside.edit_model, ControlNet.edit_model


def inject(module, subject, rank, names=None):
    config = peft.LoraConfig(r=rank, lora_alpha=rank)
    beside.add_adapters(module, subject, config, subject.linears if names is None else names)


def in_other_blocks(self, module, subject):
    """As many adapters of the same layers as are asked for, in the blocks that are not."""
    names = self.named(subject)
    chosen = self.chosen(subject, module)
    inject(module, subject, self.rank, [name for name in names if name not in chosen])


def switched_off(self, module, subject):
    """Adapters that are there, and of which only the first is in a product."""
    ADAPT(self, module, subject)
    for layer in [*beside.adapted(module).values()][1:]:
        layer.enable_adapters(False)
    for p in beside.own(module).values():
        p.requires_grad_(True)


def plain(self, module, subject):
    """LoRA's adapters of the model's own type, and nothing else."""
    inject(module, subject, self.rank)


def of_blocks_alone(self, module, subject):
    return subject.linears


def everything_trains(self, module, subject):
    inject(module, subject, self.rank)
    module.requires_grad_(True)


def biases_only(self, module, subject):
    names = {n for n, _ in module.named_parameters() if n.endswith(".bias")}
    states.train_only(module, names)


def all_but_one(self, module, subject):
    products.code(module, subject.linears[1:], self.to)


def kept_beside(self, module, subject):
    whole = {name: module.get_submodule(name).weight.detach() for name in subject.linears}
    products.code(module, subject.linears, self.to)
    for name, weight in whole.items():
        module.get_submodule(name).whole = weight


def decoding(self, module, subject):
    products.code(module, subject.linears, self.to)


DORA = Dora.edit_model


def magnitudes_that_stay(self, module, subject):
    DORA(self, module, subject)
    for name, p in module.named_parameters():
        if "magnitude" in name:
            p.requires_grad_(False)


SOME = "single+lora:targets=ffn,blocks=1/last1"
IN_FLOATS = "single+bf16_pure+lora:dtype=fp32"

LOST |= {
    "magnitudes that do not train": ("single+dora", Dora, "edit_model", magnitudes_that_stay),
    "weights that train beside them": ("single+lora", Lora, "edit_model", everything_trains),
    "adapters of 16 bits": (IN_FLOATS, Lora, "edit_model", plain),
    "adapters in other blocks": (SOME, Lora, "edit_model", in_other_blocks),
    "Kronecker, not multiplied": ("single+lokr", Lokr, "edit_model", switched_off),
    "Hadamard, of another rank": ("single+loha", Loha, "edit_model", changed(ADAPT, rank=4)),
    "no rotation": ("single+oft", Oft, "edit_model", nothing),
    "one layer in full": ("single+cast+lora", Cast, "edit_model", all_but_one),
    "weights kept beside their codes": ("single+cast+lora", Cast, "edit_model", kept_beside),
    "decoded, not int8": ("single+cast:dynamic=on+lora", Cast, "edit_model", decoding),
    "modulations in full": ("single+qlora", Qlora, "_packed", of_blocks_alone),
    "the whole model trains": ("single+head", Head, "edit_model", nothing),
    "no scales": ("single+difffit", DiffFit, "edit_model", biases_only),
    "no branch on the second half": (
        "single+controlnet:share=1.0", ControlNet, "edit_model", changed(CONTROL, share=0.5),
    ),
}  # fmt: skip


# -- weights that stay dense, and gradients that do --


MASKS = Prune.attach


def idle_masks(self, run):
    masks = MASKS(self, run)
    for parameter, _ in masks.pruned:
        parameter._backward_hooks.clear()
    masks.after_step = lambda: None
    return masks


LOST |= {
    "no masks": ("single+prune", Prune, "attach", nothing),
    "masks that mask nothing": ("single+prune", Prune, "attach", idle_masks),
    "nothing removed": ("single+prune_structured", PruneStructured, "edit_model", nothing),
    "dense layers": ("single+bf16+sparse24", Sparse24, "edit_model", nothing),
    "dense gradients": (
        "single+sgd:momentum=0.0+sparse_embedding", SparseEmbedding, "edit_model", nothing,
    ),
}  # fmt: skip


# -- steps that accumulate, average, call backward or update otherwise --


class Hoarding(InBackward):
    """Steps in backward and keeps every gradient."""

    def _step(self, group, p):
        self.kept = [*getattr(self, "kept", []), p.grad]
        super()._step(group, p)


def hoard(self, run):
    return Hoarding(run)


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


class Counting(Average):
    """Counts its updates and makes none."""

    def after_step(self):
        self.updates += 1


def attach(kind=Average, decay=None, place="device"):
    def attached(self, run):
        return kind(run, run.settings.ema_decay if decay is None else decay, place)

    return attached


LOST |= {
    "steps after backward": (
        "single+optimizer_in_backward", OptimizerInBackward, "attach", nothing,
    ),
    "gradients kept": ("single+optimizer_in_backward", OptimizerInBackward, "attach", hoard),
    "backward as usual": ("single+backward", Backward, "configure", nothing),
    "half the gradients": (
        "single+backward:call=autograd_grad", Backward, "configure", call_by(Half),
    ),
    "half the accumulation": (
        "single+accumulate:steps=4",
        Accumulate,
        "accelerator_kwargs",
        lambda *_: {"gradient_accumulation_steps": 2},
    ),
    "no average": ("single", Ema, "attach", nothing),
    "an average that only counts": ("single", Ema, "attach", attach(Counting)),
    "another decay": ("single", Ema, "attach", attach(decay=0.5)),
}  # fmt: skip


# -- blocks whose weights never leave the device, never come to it, or train elsewhere --


ATTACH, CHOSEN = BlockSwap.attach, BlockSwap._chosen
RECIPE = "single+block_swap:blocks=3"
FROZEN = "single+block_swap:blocks=3+lora"
FUSED = "single+block_swap:blocks=3+optimizer_in_backward"


def put_back(self, run):
    """The model as it was; nothing is streamed."""
    for block in CHOSEN(self, run.module, run.subject).values():
        for owner, name, p in block.swapped:
            owner._parameters[name] = p


def never_released(self, run):
    streamer = ATTACH(self, run)
    for one in streamer.streamed.values():
        one.release = nothing
    return streamer


def released_after_the_step(self, run):
    """All weights come in forward, and go when the step is over."""
    streamer = ATTACH(self, run)
    keep = streamer._keep
    streamer._keep = lambda wanted: keep([*wanted, *streamer._there()] if wanted else [])
    return streamer


def never_returned(self, run):
    """The last block's stepped weights stay on the device."""
    streamer = ATTACH(self, run)
    streamer.streamed[max(streamer.streamed)].keep = nothing
    return streamer


def one_block_fewer(self, module, subject):
    return dict(list(CHOSEN(self, module, subject).items())[1:])


def not_optimized(self, run):
    with mock.patch.object(type(run.inner_optimizer), "add_param_group", nothing):
        return ATTACH(self, run)


LOST |= {
    "no weights streamed": (RECIPE, BlockSwap, "attach", put_back),
    "streamed weights never leave the device": (RECIPE, BlockSwap, "attach", never_released),
    "all weights there for the whole step": (FROZEN, BlockSwap, "attach", released_after_the_step),
    "weights of one block lost after their step": (FUSED, BlockSwap, "attach", never_returned),
    "two blocks streamed of three": (RECIPE, BlockSwap, "_chosen", one_block_fewer),
    "streamed weights that nobody steps": (RECIPE, BlockSwap, "attach", not_optimized),
}  # fmt: skip


# -- samples drawn otherwise than was asked for --


PALETTE = Palette.store
DYNAMIC = "single+float8:dynamic=on,emulate=on"


def first_block(self, module, subject):
    """One block of all."""
    first = {id(part) for part in subject.blocks(module)[0].modules()}
    names = eight_bits.linears(module, subject)
    self.store(module, subject, [n for n in names if id(module.get_submodule(n)) in first])


def beside_floats(self, module, subject, names):
    """Codes are there, and the floats stay."""
    PALETTE(self, module, subject, names)
    for name in names:
        layer = module.get_submodule(name)
        layer.whole_weight = torch.zeros(layer.out_features, layer.in_features)


def in_float8(self, module, subject, names):
    """Torchao's codes of float8, whose products are of floats."""
    eight_bits.quantize(module, names, "float8")


LOST_WHEN_DRAWN: Table = {
    "fp16_pure drawn of float32": ("single+fp16_pure", Fp16Pure, "edit_model", nothing),
    "int8 of one block": ("single+int8", Int8, "edit_model", first_block),
    "float8 of one operand": (DYNAMIC, Float8, "store", in_float8),
    "nf4 of nothing": ("single+nf4", Nf4, "edit_model", nothing),
    "palette beside floats": ("single+palette", Palette, "store", beside_floats),
}  # fmt: skip
