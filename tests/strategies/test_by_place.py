"""What is given by keyword is given by place, so that ZeRO-3's hooks see it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from strategies.engines.zero import inputs


def forward(self, hidden, text=None, scale=1.0, *rest, mask=None, **more):
    """A block's, as libraries write them."""


PARAMETERS = tuple(inspect.signature(forward).parameters.values())[1:4]
CALLS = [
    ((1,), {}, (1,), {}),
    ((), {"hidden": 1}, (1,), {}),
    ((1,), {"scale": 3}, (1, None, 3), {}),
    ((1,), {"text": 2, "mask": 4, "other": 5}, (1, 2), {"mask": 4, "other": 5}),
    ((), {"text": 2}, (), {"text": 2}),
    ((1, 2, 3, 4), {"mask": 5}, (1, 2, 3, 4), {"mask": 5}),
]


@pytest.mark.parametrize(("given", "named", "places", "left"), CALLS)
def test_the_same_call_with_as_much_by_place_as_can_be(given, named, places, left):
    assert inputs.placed(PARAMETERS, given, named) == (places, left)


class Block(nn.Module):
    """Called by keyword, with a module inside that is too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, hidden, scale=1.0, *, shift=0.0):
        """Hidden states of two features."""
        return self.inner(input=hidden) * scale + shift


def test_a_hook_behind_sees_what_came_by_keyword_and_the_result_is_the_same():
    block, seen = Block(), []
    wanted = block(hidden=torch.ones(1, 2), scale=2.0, shift=1.0)
    inputs.give_by_place(block)
    for part in block.modules():
        part.register_forward_pre_hook(lambda module, given: seen.append(len(given)))
    assert torch.equal(block(hidden=torch.ones(1, 2), scale=2.0, shift=1.0), wanted)
    assert seen == [2, 1]
