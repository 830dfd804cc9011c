"""Samples drawn otherwise than was asked for."""

from __future__ import annotations

import torch

from strategies.activations.attend import Attend
from strategies.activations.compile import Compile
from strategies.precision.bfloat import Bf16Pure
from strategies.precision.mixed import Bf16, Fp16Pure, Fp32
from strategies.sampling import eight_bits
from strategies.sampling import eight_bits as layers
from strategies.sampling.palette import Palette
from strategies.sampling.quantised import Float8, Int8, Nf4
from strategies.streaming.block_swap import BlockSwap
from tests.made.stubs import streaming
from tests.made.stubs.parts import Table, nothing

AS_BF16 = {"mixed_precision": "bf16"}
NF4, PALETTE = Nf4.store, Palette.store
DYNAMIC = "single+float8:dynamic=on,emulate=on"


def first_block(self, module, subject):
    """One block of all."""
    first = {id(part) for part in subject.blocks(module)[0].modules()}
    names = layers.linears(module, subject)
    self.store(module, subject, [n for n in names if id(module.get_submodule(n)) in first])


def stored_as(to):
    """Torchao's codes of a kind, whatever the strategy is called."""

    def store(self, module, subject, names):
        eight_bits.quantize(module, names, to)

    return store


def beside_floats(self, module, subject, names):
    """Codes are there, and the floats stay."""
    PALETTE(self, module, subject, names)
    for name in names:
        layer = module.get_submodule(name)
        layer.whole_weight = torch.zeros(layer.out_features, layer.in_features)


def twice_the_bits(self, module, subject, names):
    PALETTE(Palette(bits=2 * self.bits), module, subject, names)


def computing_in(dtype):
    """A model whose products run in ``dtype``, whatever its weights are."""

    def edit(self, module, subject):
        inner = module.forward

        def forward(*given, **named):
            with torch.autocast("cpu", dtype):
                return inner(*given, **named)

        module.forward = forward

    return edit


IN_HALF = computing_in(torch.float16)
INT8, FLOAT8 = stored_as("int8"), stored_as("float8")
LOST: Table = {
    "fp32 drawn as bf16": ("single", Fp32, "accelerator_kwargs", lambda *_: AS_BF16),
    "bf16 drawn as fp32": ("single+bf16", Bf16, "accelerator_kwargs", lambda *_: {}),
    "bf16_pure drawn of float32": ("single+bf16_pure", Bf16Pure, "edit_model", nothing),
    "fp16_pure drawn of float32": ("single+fp16_pure", Fp16Pure, "edit_model", nothing),
    "fp16_pure over float32": ("single+fp16_pure", Fp16Pure, "edit_model", IN_HALF),
    "int8 of nothing": ("single+int8", Int8, "edit_model", nothing),
    "int8 of one block": ("single+int8", Int8, "edit_model", first_block),
    "int8 in 4 bits": ("single+int8", Int8, "store", NF4),
    "int8 as floats": ("single+int8", Int8, "store", FLOAT8),
    "float8 of one operand": (DYNAMIC, Float8, "store", FLOAT8),
    "float8 of both, of one block": (DYNAMIC, Float8, "edit_model", first_block),
    "float8 as integers": ("single+float8", Float8, "store", INT8),
    "nf4 in 8 bits": ("single+nf4", Nf4, "store", INT8),
    "palette of one block": ("single+palette", Palette, "edit_model", first_block),
    "palette beside floats": ("single+palette", Palette, "store", beside_floats),
    "palette of twice the bits": ("single+palette:bits=3", Palette, "store", twice_the_bits),
    "drawn with no weights streamed": (
        streaming.RECIPE, BlockSwap, "attach", streaming.put_back,
    ),
    "drawn with streamed weights that stay": (
        streaming.RECIPE, BlockSwap, "attach", streaming.never_released,
    ),
    "another kernel": ("single+attend:kernel=math", Attend, "edit_model", nothing),
    "nothing compiled": ("single+compile:backend=aot_eager", Compile, "edit_model", nothing),
}  # fmt: skip
