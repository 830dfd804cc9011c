"""Activations that are kept, kernels that are others, and blocks that are not compiled."""

from __future__ import annotations

import torch

from strategies.activations import attend as kernels
from strategies.activations.attend import Attend
from strategies.activations.block_parts import Recompute, segments
from strategies.activations.checkpoint import RUNNER, Checkpoint, parts_of
from strategies.activations.compile import Compile
from strategies.activations.offload_activations import Host, OffloadActivations
from strategies.activations.runners import run_singly
from tests.made.stubs.parts import Table, nothing

COMPILE = Compile.edit_model


def recompute_as(split, **how):
    def edit(self, module, subject):
        module.run_blocks = Recompute(module.run_blocks, split, **how)

    return edit


def recompute_first_half(self, module, subject):
    blocks = subject.blocks(module)
    first = blocks[: len(blocks) // 2]
    module.run_blocks = Recompute(module.run_blocks, segments(1), chosen=first)


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


def parts_by(kind, first=0):
    """Recomputes the FFNs of the blocks from ``first`` on, by a runner of this kind."""

    def edit(self, module, subject):
        run_singly(module, parts_of(subject.blocks(module)[first:], "ffn"), RUNNER)
        setattr(module, RUNNER, kind(getattr(module, RUNNER), segments(1)))

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


def skipping_one(self, module, subject):
    COMPILE(self, module, subject)
    module.blocks[0]._compiled_call_impl = None


def without_budget(self, module, subject):
    COMPILE(Compile(backend=self.backend), module, subject)


def one_in_four(self, module, subject):
    module.blocks[0].attn.attend = kernels.naive


def flash_when_asked(q, k, v):
    """What one forward after training would be shown, and what training does instead."""
    attend = kernels.naive if torch.is_grad_enabled() else kernels.forced("FLASH_ATTENTION")
    return attend(q, k, v)


def naive_when_asked(q, k, v):
    attend = kernels.forced("FLASH_ATTENTION") if torch.is_grad_enabled() else kernels.naive
    return attend(q, k, v)


LOST: Table = {
    "checkpoint edits nothing": ("single+checkpoint", Checkpoint, "edit_model", nothing),
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
    "one segment, not prefixes": (
        "single+checkpoint:keep=nothing", Checkpoint, "edit_model", recompute_as(segments(4)),
    ),
    "all blocks, not half of them": (
        "single+checkpoint:share=0.5", Checkpoint, "edit_model", recompute_as(segments(1)),
    ),
    "the first half, not every second block": (
        "single+checkpoint:share=0.5,spread=on", Checkpoint, "edit_model", recompute_first_half,
    ),
    "no block, not half of them": (
        "single+checkpoint:share=0.5", Checkpoint, "edit_model", nothing,
    ),
    "products recomputed as well": (
        "single+checkpoint:keep=products", Checkpoint, "edit_model", recompute_as(segments(1)),
    ),
    "blocks, not their FFNs": (
        "single+checkpoint:part=ffn", Checkpoint, "edit_model", recompute_as(segments(1)),
    ),
    "FFNs counted, not recomputed": (
        "single+checkpoint:part=ffn", Checkpoint, "edit_model", parts_by(Pretending),
    ),
    "FFNs of three blocks of four": (
        "single+checkpoint:part=ffn", Checkpoint, "edit_model", parts_by(Recompute, 1),
    ),
    "FFNs, not attention": (
        "single+checkpoint:part=attention", Checkpoint, "edit_model", parts_by(Recompute),
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
    "flash in one forward, naive in training": (
        "single+attend:kernel=flash", Attend, "edit_model", attend_by(flash_when_asked),
    ),
    "naive in one forward, flash in training": (
        "single+attend", Attend, "edit_model", attend_by(naive_when_asked),
    ),
    "naive, not flash": (
        "single+attend:kernel=flash", Attend, "edit_model", attend_by(kernels.naive),
    ),
}  # fmt: skip
