"""Adapters that are missing, others, or not what trains."""

from __future__ import annotations

import dataclasses

import torch

from strategies import CATALOG
from strategies.adapters import beside
from strategies.adapters import coded as products
from strategies.adapters.cast import Cast
from strategies.adapters.controlnet import ControlNet
from strategies.adapters.lora import Dora, Lora, Qlora, inject
from strategies.adapters.partial import DiffFit, Head
from strategies.evidence import states
from tests.made.stubs.parts import Table, nothing

Lokr, Loha, Oft = (CATALOG[name] for name in ("lokr", "loha", "oft"))

CONTROL = ControlNet.edit_model


def adapters_left_frozen(self, module, subject):
    inject(module, subject, self.rank)
    states.train_only(module, {"final_layer.linear.weight"})


def in_other_blocks(self, module, subject):
    """As many adapters of the same layers as are asked for, in the blocks that are not."""
    names = self.named(subject)
    chosen = self.chosen(subject, module)
    inject(module, subject, self.rank, [name for name in names if name not in chosen])


def otherwise(**changes):
    """The strategy with other parameters in its place."""

    def edit(self, module, subject):
        dataclasses.replace(self, **changes).put(module, subject)

    return edit


def frozen(part):
    """Adapters of which those with ``part`` in their names are frozen."""

    def edit(self, module, subject):
        self.put(module, subject)
        for name, p in module.named_parameters():
            if part in name:
                p.requires_grad_(False)

    return edit


def switched_off(self, module, subject):
    """Adapters that are there, and of which only the first is in a product."""
    self.put(module, subject)
    for layer in [*beside.adapted(module).values()][1:]:
        layer.enable_adapters(False)
    for p in beside.own(module).values():
        p.requires_grad_(True)


def plain(self, module, subject):
    """LoRA's adapters of the model's own type, and nothing else."""
    inject(module, subject, self.rank)


def rounded_by_each_step(self, trained):
    """Adapters are float32, and hold numbers of bfloat16."""

    def rounded(optimizer, *_):
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.data = p.data.bfloat16().float()

    trained.inner_optimizer.register_step_post_hook(rounded)
    return states.Frozen(trained)


def of_blocks_alone(self, module, subject):
    return subject.linears


def twice_the_rank(self, module, subject):
    inject(module, subject, 2 * self.rank)


def everything_trains(self, module, subject):
    inject(module, subject, self.rank)
    module.requires_grad_(True)


def biases_only(self, module, subject):
    names = {n for n, _ in module.named_parameters() if n.endswith(".bias")}
    states.train_only(module, names)


def cut_off(self, module, subject):
    CONTROL(self, module, subject)
    for block in module.blocks[:2]:
        block.zero.requires_grad_(False)


def half(self, module, subject):
    CONTROL(ControlNet(), module, subject)


def rank_by_name_alone(self, module, subject):
    twice_the_rank(self, module, subject)
    for layer in beside.adapted(module).values():
        layer.r["default"] = self.rank


def other_codes(self, module, subject):
    products.code(module, subject.linears, "fp8" if self.to == "int8" else "int8")


def all_but_one(self, module, subject):
    products.code(module, subject.linears[1:], self.to)


def kept_beside(self, module, subject):
    whole = {name: module.get_submodule(name).weight.detach() for name in subject.linears}
    products.code(module, subject.linears, self.to)
    for name, weight in whole.items():
        module.get_submodule(name).whole = weight


def decoded_once(self, module, subject):
    """Codes are there, and what is multiplied by is a copy that was decoded once."""
    products.code(module, subject.linears, self.to)
    for name in subject.linears:
        module.get_submodule(name).forward = once(module.get_submodule(name))


def once(layer):
    known = []

    def forward(x):
        known[:] = known or [products.decoded(layer.weight, layer.scale, layer.to_type, x.dtype)]
        return torch.nn.functional.linear(x, known[0], layer.bias)

    return forward


class DecodedBackward(products.Int8Product):
    """int8 in forward alone."""

    @staticmethod
    def backward(ctx, gradient):
        codes = products.decoded(ctx.saved_tensors[0], ctx.scale, "int8", gradient.dtype)
        return gradient @ codes, None, None, None


def decoding(self, module, subject):
    products.code(module, subject.linears, self.to)


def decoding_in_one_layer(self, module, subject):
    products.code(module, subject.linears[:-1], self.to, dynamic=True)
    products.code(module, subject.linears[-1:], self.to)


def decoding_in_backward(self, module, subject):
    products.code(module, subject.linears, self.to)
    for name in subject.linears:
        module.get_submodule(name).forward = halfway(module.get_submodule(name))


def halfway(layer):
    return lambda x: DecodedBackward.apply(x, layer.weight, layer.scale, layer.bias)


DORA = Dora.edit_model


def magnitudes_that_stay(self, module, subject):
    DORA(self, module, subject)
    for name, p in module.named_parameters():
        if "magnitude" in name:
            p.requires_grad_(False)


SOME = "single+lora:targets=ffn,blocks=1/last1"
IN_FLOATS = "single+bf16_pure+lora:dtype=fp32"

LOST: Table = {
    "no adapters": ("single+lora", Lora, "edit_model", nothing),
    "adapters of another rank": ("single+lora", Lora, "edit_model", twice_the_rank),
    "another rank, by another name": ("single+lora", Lora, "edit_model", rank_by_name_alone),
    "magnitudes that do not train": ("single+dora", Dora, "edit_model", magnitudes_that_stay),
    "frozen adapters": ("single+lora", Lora, "edit_model", adapters_left_frozen),
    "weights that train beside them": ("single+lora", Lora, "edit_model", everything_trains),
    "adapters of 16 bits": (IN_FLOATS, Lora, "edit_model", plain),
    "adapters of 16 bits in float32": (IN_FLOATS, Lora, "attach", rounded_by_each_step),
    "no checksums": ("single+lora", Lora, "attach", nothing),
    "no magnitudes": ("single+dora", Dora, "edit_model", plain),
    "adapters in other blocks": (SOME, Lora, "edit_model", in_other_blocks),
    "adapters in all blocks": (SOME, Lora, "edit_model", otherwise(blocks="all")),
    "adapters in the blocks alone": (
        "single+lora:reach=model", Lora, "edit_model", otherwise(reach="blocks"),
    ),
    "adapters of other layers": (SOME, Lora, "edit_model", otherwise(targets="attention")),
    "no Kronecker product": ("single+lokr", Lokr, "edit_model", plain),
    "Kronecker, of another rank": ("single+lokr", Lokr, "edit_model", otherwise(rank=4)),
    "Kronecker, of another factor": ("single+lokr", Lokr, "edit_model", otherwise(factor=2)),
    "Kronecker, half frozen": ("single+lokr", Lokr, "edit_model", frozen("lokr_w1")),
    "Kronecker, not multiplied": ("single+lokr", Lokr, "edit_model", switched_off),
    "no Hadamard product": ("single+loha", Loha, "edit_model", plain),
    "Hadamard, of another rank": ("single+loha", Loha, "edit_model", otherwise(rank=4)),
    "Hadamard, half frozen": ("single+loha", Loha, "edit_model", frozen("hada_w2_b")),
    "no rotation": ("single+oft", Oft, "edit_model", nothing),
    "rotations of other groups": ("single+oft", Oft, "edit_model", otherwise(size=16)),
    "rotations not applied": ("single+oft", Oft, "edit_model", switched_off),
    "weights in full, not 8 bits": ("single+cast+lora", Cast, "edit_model", nothing),
    "float8, not int8": ("single+cast+lora", Cast, "edit_model", other_codes),
    "int8, not float8": ("single+cast:to=fp8+lora", Cast, "edit_model", other_codes),
    "one layer in full": ("single+cast+lora", Cast, "edit_model", all_but_one),
    "weights kept beside their codes": ("single+cast+lora", Cast, "edit_model", kept_beside),
    "weights decoded once and kept": ("single+cast+lora", Cast, "edit_model", decoded_once),
    "decoded, not int8": ("single+cast:dynamic=on+lora", Cast, "edit_model", decoding),
    "decoded in one layer": (
        "single+cast:dynamic=on+lora", Cast, "edit_model", decoding_in_one_layer,
    ),
    "decoded in backward": (
        "single+cast:dynamic=on+lora", Cast, "edit_model", decoding_in_backward,
    ),
    "modulations in full": ("single+qlora", Qlora, "_packed", of_blocks_alone),
    "weights in full": ("single+qlora", Qlora, "edit_model", plain),
    "the whole model trains": ("single+head", Head, "edit_model", nothing),
    "biases train too": ("single+head", Head, "edit_model", biases_only),
    "no scales": ("single+difffit", DiffFit, "edit_model", biases_only),
    "the whole model, no branch": ("single+controlnet", ControlNet, "edit_model", nothing),
    "a branch that is cut off": ("single+controlnet", ControlNet, "edit_model", cut_off),
    "no branch on the second half": ("single+controlnet:share=1.0", ControlNet, "edit_model", half),
}  # fmt: skip
