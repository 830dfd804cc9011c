"""Adapters that are missing, others, or not what trains."""

from __future__ import annotations

from strategies.adapters import lora
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


def rank_by_name_alone(self, module, subject):
    twice_the_rank(self, module, subject)
    for layer in lora.adapted(module):
        layer.r["default"] = self.rank


DORA = Dora.edit_model


def magnitudes_that_stay(self, module, subject):
    DORA(self, module, subject)
    for name, p in module.named_parameters():
        if "magnitude" in name:
            p.requires_grad_(False)


LOST: Table = {
    "no adapters": ("single+lora", Lora, "edit_model", nothing),
    "adapters of another rank": ("single+lora", Lora, "edit_model", twice_the_rank),
    "another rank, by another name": ("single+lora", Lora, "edit_model", rank_by_name_alone),
    "magnitudes that do not train": ("single+dora", Dora, "edit_model", magnitudes_that_stay),
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
