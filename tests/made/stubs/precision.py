"""Precision that is not the one asked for."""

from __future__ import annotations

import torch

from strategies.precision.bfloat import Bf16Pure
from strategies.precision.fp8 import Fp8
from strategies.precision.mixed import Bf16, Fp16, Fp32, Tf32
from tests.made.stubs.parts import Table, nothing

AS_BF16 = {"mixed_precision": "bf16"}
FP8 = Fp8.edit_model


def the_other_float8(self, module, subject):
    FP8(Fp8(emulate=not self.emulate), module, subject)


def first_block_in_float8(self, module, subject):
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(module.blocks[0])


def the_other_scales(self, module, subject):
    scaling = "rowwise" if self.scaling == "tensorwise" else "tensorwise"
    FP8(Fp8(emulate=self.emulate, scaling=scaling), module, subject)


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
    "fp32 runs as bf16": ("single", Fp32, "accelerator_kwargs", lambda *_: AS_BF16),
    "fp32 that trains as bf16": ("single", Fp32, "edit_model", while_training(True)),
    "bf16 that trains as fp32": ("single+bf16", Bf16, "edit_model", while_training(False)),
    "bf16 without autocast": ("single+bf16", Bf16, "accelerator_kwargs", lambda *_: {}),
    "tf32 runs as bf16": ("single+tf32", Tf32, "accelerator_kwargs", lambda *_: AS_BF16),
    "bf16_pure keeps float32": ("single+bf16_pure", Bf16Pure, "edit_model", nothing),
    "fp8 runs as bf16": ("single+fp8:emulate=on", Fp8, "edit_model", nothing),
    "fp8 emulated": ("single+fp8", Fp8, "edit_model", the_other_float8),
    "fp8 not emulated": ("single+fp8:emulate=on", Fp8, "edit_model", the_other_float8),
    "one scale, not one a row": (
        "single+fp8:emulate=on,scaling=rowwise", Fp8, "edit_model", the_other_scales,
    ),
    "a scale a row, not one": ("single+fp8:emulate=on", Fp8, "edit_model", the_other_scales),
    "layers that round nothing": ("single+fp8:emulate=on", Fp8, "edit_model", unrounded),
    "one block alone in fp8": ("single+fp8", Fp8, "edit_model", first_block_in_float8),
    "fp16 without autocast": ("single+fp16", Fp16, "accelerator_kwargs", lambda *_: {}),
}  # fmt: skip
