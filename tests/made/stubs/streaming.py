"""Blocks whose weights never leave the device, never come to it, or train elsewhere."""

from __future__ import annotations

from unittest import mock

from strategies.streaming.block_swap import BlockSwap
from tests.made.stubs.parts import Table, nothing

ATTACH, CHOSEN = BlockSwap.attach, BlockSwap._chosen
RECIPE = "single+block_swap:blocks=3"
FROZEN = "single+block_swap:blocks=3+lora"
FUSED = "single+block_swap:blocks=3+optimizer_in_backward"


def put_back(self, trained):
    """The model as it was; nothing is streamed."""
    for block in CHOSEN(self, trained.module, trained.subject).values():
        for owner, name, p in block.swapped:
            owner._parameters[name] = p


def never_released(self, trained):
    streamer = ATTACH(self, trained)
    for one in streamer.streamed.values():
        one.release = nothing
    return streamer


def released_after_the_step(self, trained):
    """All weights come in forward, and go when the step is over."""
    streamer = ATTACH(self, trained)
    keep = streamer._keep
    streamer._keep = lambda wanted: keep([*wanted, *streamer._there()] if wanted else [])
    return streamer


def never_returned(self, trained):
    """The last block's stepped weights stay on the device."""
    streamer = ATTACH(self, trained)
    streamer.streamed[max(streamer.streamed)].keep = nothing
    return streamer


def one_block_fewer(self, module, subject):
    return dict(list(CHOSEN(self, module, subject).items())[1:])


def gradients_dropped(self, trained):
    streamer = ATTACH(self, trained)
    for one in streamer.streamed.values():
        one.leave = lambda host, here: setattr(here, "grad", None)
    return streamer


def not_optimized(self, trained):
    with mock.patch.object(type(trained.inner_optimizer), "add_param_group", nothing):
        return ATTACH(self, trained)


LOST: Table = {
    "no weights streamed": (RECIPE, BlockSwap, "attach", put_back),
    "streamed weights never leave the device": (RECIPE, BlockSwap, "attach", never_released),
    "all weights there for the whole step": (FROZEN, BlockSwap, "attach", released_after_the_step),
    "weights of one block lost after their step": (FUSED, BlockSwap, "attach", never_returned),
    "two blocks streamed of three": (RECIPE, BlockSwap, "_chosen", one_block_fewer),
    "gradients of streamed weights dropped": (RECIPE, BlockSwap, "attach", gradients_dropped),
    "streamed weights that nobody steps": (RECIPE, BlockSwap, "attach", not_optimized),
}  # fmt: skip
