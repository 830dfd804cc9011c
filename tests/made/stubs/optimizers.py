"""Optimizers that are others, or step as others do."""

from __future__ import annotations

import torch

from strategies import CATALOG
from strategies.evidence import states
from strategies.optimizers.table import TABLE, torchao_adam
from tests.made.stubs.parts import Table

KINDS = {name: CATALOG[name] for name in TABLE}
AdamW, AdamWBf16, Adafactor, Sgd = (KINDS[n] for n in ("adamw", "adamw_bf16", "adafactor", "sgd"))
Adam8bit, Adam4bit, Adam16bit = (KINDS[n] for n in ("adam8bit", "adam4bit", "adam16bit"))
PagedAdam8bit, OffloadAdamW = KINDS["paged_adam8bit"], KINDS["offload_adamw"]
Came, Prodigy, Muon = (KINDS[n] for n in ("came", "prodigy", "muon"))


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
    return torchao_adam("torchao.optim:AdamW8bit", params, settings, launch.device)


ADAM16 = Adam16bit.make_optimizer


def moments_of_the_weights(self, params, settings, launch):
    optimizer = ADAM16(self, params, settings, launch)
    optimizer._new_buffer = lambda p, signed: torch.zeros_like(p)
    return optimizer


def no_momentum(self, params, settings, launch):
    return states.count_steps(torch.optim.SGD(params, lr=settings.learning_rate))


def unpaged(self, params, settings, launch):
    return Adam8bit().make_optimizer(params, settings, launch)


def unmanaged(self, params, settings, launch):
    from bitsandbytes.optim import PagedAdamW8bit

    optimizer = PagedAdamW8bit(params, **settings.adam)
    optimizer.is_paged = False
    return optimizer


OFFLOADED = OffloadAdamW.make_optimizer


def pageable(self, params, settings, launch):
    optimizer = OFFLOADED(self, params, settings, launch)
    for copy in optimizer.param_d2h_map.values():
        copy.is_pinned = lambda: False
    return optimizer


def first_matrices(self, module, subject):
    for block in module.blocks:
        block.attn.qkv.weight.hidden_matrix = True


def plain_sgd(self, params, settings, launch):
    return torch.optim.SGD(params, lr=settings.learning_rate, momentum=0.9)


MUON = Muon.make_optimizer


def muon_with(**other):
    def make(self, params, settings, launch):
        optimizer = MUON(self, params, settings, launch)
        for group in optimizer.param_groups:
            if group["part"] == "muon":
                group.update(other)
        return optimizer

    return make


PRODIGY = Prodigy.make_optimizer


def after_each_step(change):
    def make(self, params, settings, launch):
        optimizer = PRODIGY(self, params, settings, launch)
        optimizer.register_step_post_hook(lambda stepped, *_: change(stepped))
        return optimizer

    return make


@after_each_step
def lowered(optimizer):
    for group in optimizer.param_groups:
        group["d"] = group["d0"] / 2


LOST: Table = {
    "adamw rounds to nearest": (
        "single+bf16_pure+adamw_bf16", AdamWBf16, "make_optimizer", adamw(),
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
    "float moments of that class": (
        "single+adam16bit", Adam16bit, "make_optimizer", moments_of_the_weights,
    ),
    "bfloat16 moments of plain AdamW": (
        "single+bf16_pure+adam16bit", Adam16bit, "make_optimizer", float_adam,
    ),
    "moments that are not paged": (
        "single+paged_adam8bit", PagedAdam8bit, "make_optimizer", unpaged,
    ),
    "moments in ordinary memory": (
        "single+paged_adam8bit", PagedAdam8bit, "make_optimizer", unmanaged,
    ),
    "adam for adafactor": ("single+adafactor", Adafactor, "make_optimizer", float_adam),
    "muon that makes nothing orthogonal": (
        "single+muon", Muon, "make_optimizer", muon_with(ns_steps=0),
    ),
    "muon with another momentum": (
        "single+muon", Muon, "make_optimizer", muon_with(momentum=0.5),
    ),
    "adam for muon": ("single+muon", Muon, "make_optimizer", float_adam),
    "adam for every matrix": ("single+muon", Muon, "edit_model", first_matrices),
    "adam for came": ("single+came", Came, "make_optimizer", float_adam),
    "adam for prodigy": ("single+prodigy", Prodigy, "make_optimizer", float_adam),
    "prodigy below its first rate": ("single+prodigy", Prodigy, "make_optimizer", lowered),
    "adam for sgd": ("single+sgd", Sgd, "make_optimizer", float_adam),
    "sgd without its momentum": ("single+sgd", Sgd, "make_optimizer", no_momentum),
    "sgd that counts no steps": ("single+sgd", Sgd, "make_optimizer", plain_sgd),
    "an optimizer on the device": (
        "single+offload_adamw", OffloadAdamW, "make_optimizer", float_adam,
    ),
    "copies that can be swapped out": (
        "single+offload_adamw", OffloadAdamW, "make_optimizer", pageable,
    ),
}  # fmt: skip
