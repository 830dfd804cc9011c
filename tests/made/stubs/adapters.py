"""Adapters that are missing, others, or not what trains."""

from __future__ import annotations

from strategies.adapters.controlnet import ControlNet
from strategies.adapters.lora import Dora, Lora, Qlora, inject
from strategies.adapters.partial import DiffFit, Head
from strategies.evidence import frozen
from tests.made.stubs.parts import Table, nothing

CONTROL = ControlNet.edit_model


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


def cut_off(self, module, subject):
    CONTROL(self, module, subject)
    for block in module.blocks[:2]:
        block.zero.requires_grad_(False)


def half(self, module, subject):
    CONTROL(ControlNet(), module, subject)


LOST: Table = {
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
}  # fmt: skip
