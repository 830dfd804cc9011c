"""Optimizers that are others, or step as others do."""

from __future__ import annotations

import torch

from strategies.evidence import states
from strategies.optimizers.adamw import Adafactor, AdamW, AdamWBf16, Sgd
from strategies.optimizers.came import Came
from strategies.optimizers.low_bit import (
    TORCHAO,
    Adam4bit,
    Adam8bit,
    Adam16bit,
    PagedAdam8bit,
    torchao_adam,
)
from strategies.optimizers.muon import Muon
from strategies.optimizers.offload_adamw import OffloadAdamW
from strategies.optimizers.prodigy import Prodigy
from tests.made.stubs.parts import Table


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
    return torchao_adam(f"{TORCHAO}:AdamW8bit", params, settings, launch.device)


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


def behind(kind, **other):
    """An optimizer of that class and name: its groups say one thing, and its step does another."""

    def step(self, closure=None):
        told = [{name: group[name] for name in other} for group in self.param_groups]
        for group in self.param_groups:
            group.update(other)
        try:
            return kind.step(self, closure)
        finally:
            for group, said in zip(self.param_groups, told, strict=True):
                group.update(said)

    return type(kind.__name__, (kind,), {"step": step})


def adamw_behind(**other):
    def make(self, params, settings, launch):
        return behind(torch.optim.AdamW, **other)(params, **settings.adam, fused=True)

    return make


def sgd_behind(**other):
    def make(self, params, settings, launch):
        kind = behind(torch.optim.SGD, **other)
        made = kind(params, lr=settings.learning_rate, momentum=self.momentum)
        return states.count_steps(made)

    return make


def lying(kind, **other):
    """The strategy's own optimizer, whose step goes by ``other`` than its groups say."""
    made = kind.make_optimizer

    def make(self, params, settings, launch):
        optimizer = made(self, params, settings, launch)
        optimizer.__class__ = behind(type(optimizer), **other)
        return optimizer

    return make


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


@after_each_step
def no_sums(optimizer):
    for state in optimizer.state.values():
        state["s"].zero_()


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
    "bfloat16 moments by other betas than its groups tell": (
        "single+adam16bit", Adam16bit, "make_optimizer", lying(Adam16bit, betas=(0.5, 0.9)),
    ),
    "moments that are not paged": (
        "single+paged_adam8bit", PagedAdam8bit, "make_optimizer", unpaged,
    ),
    "moments in ordinary memory": (
        "single+paged_adam8bit", PagedAdam8bit, "make_optimizer", unmanaged,
    ),
    "adam for adafactor": ("single+adafactor", Adafactor, "make_optimizer", float_adam),
    "adafactor at another rate than its groups tell": (
        "single+adafactor", Adafactor, "make_optimizer", lying(Adafactor, lr=2e-4),
    ),
    "8 bits at another rate than its groups tell": (
        "single+adam8bit", Adam8bit, "make_optimizer", lying(Adam8bit, lr=2e-4),
    ),
    "8 bits by other betas than its groups tell": (
        "single+adam8bit:lib=torchao", Adam8bit, "make_optimizer",
        lying(Adam8bit, betas=(0.5, 0.9)),
    ),
    "4 bits by other betas than its groups tell": (
        "single+adam4bit", Adam4bit, "make_optimizer", lying(Adam4bit, betas=(0.5, 0.9)),
    ),
    "bfloat16 weights at another rate than its groups tell": (
        "single+bf16_pure+adamw_bf16", AdamWBf16, "make_optimizer", lying(AdamWBf16, lr=2e-4),
    ),
    "compensated weights at another rate than its groups tell": (
        "single+bf16_pure+adamw_bf16:write=kahan", AdamWBf16, "make_optimizer",
        lying(AdamWBf16, lr=2e-4),
    ),
    "betas that its groups do not tell": (
        "single", AdamW, "make_optimizer", adamw_behind(betas=(0.5, 0.9)),
    ),
    "a learning rate that its groups do not tell": (
        "single", AdamW, "make_optimizer", adamw_behind(lr=2e-4),
    ),
    "a momentum that its groups do not tell": (
        "single+sgd", Sgd, "make_optimizer", sgd_behind(momentum=0.0),
    ),
    "a step of sgd that its groups do not tell": (
        "single+sgd:momentum=0.0", Sgd, "make_optimizer", sgd_behind(lr=1e-3),
    ),
    "muon that makes nothing orthogonal": (
        "single+muon", Muon, "make_optimizer", muon_with(ns_steps=0),
    ),
    "muon with another momentum": (
        "single+muon", Muon, "make_optimizer", muon_with(momentum=0.5),
    ),
    "adam for muon": ("single+muon", Muon, "make_optimizer", float_adam),
    "adam for every matrix": ("single+muon", Muon, "edit_model", first_matrices),
    "adam for came": ("single+came", Came, "make_optimizer", float_adam),
    "came at another rate than its groups tell": (
        "single+came", Came, "make_optimizer", lying(Came, lr=2e-4),
    ),
    "adam for prodigy": ("single+prodigy", Prodigy, "make_optimizer", float_adam),
    "prodigy by other betas than its groups tell": (
        "single+prodigy", Prodigy, "make_optimizer", lying(Prodigy, betas=(0.5, 0.9)),
    ),
    "prodigy below its first rate": ("single+prodigy", Prodigy, "make_optimizer", lowered),
    "prodigy that sums nothing": ("single+prodigy", Prodigy, "make_optimizer", no_sums),
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
