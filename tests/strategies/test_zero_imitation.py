"""What a trace under ZeRO-3 asks in DeepSpeed's place says what DeepSpeed's own functions say."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import _init_external_params
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules, z3_leaf_module
from torch import nn

from strategies.engines.zero.trace import _parameters, _whole


@pytest.fixture
def module() -> nn.Module:
    """Two layers, one without a bias, and a parameter of one that the other uses."""
    made = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    for each in made.modules():
        _init_external_params(each)
    made[1]._external_params[7] = made[0].bias
    return made


@pytest.mark.parametrize("recurse", [False, True])
def test_parameters_are_those_that_deepspeed_finds(module, recurse):
    for each in module.modules():
        ours, theirs = ([id(p) for p in f(each, recurse)] for f in (_parameters, iter_params))
        assert ours == theirs
    own = {id(p) for p in _parameters(module[1], recurse)}
    assert own == {id(module[0].bias)} | ({id(module[1][0].weight)} if recurse else set())


def test_a_module_without_parameters_elsewhere_has_its_own():
    assert [p.shape for p in _parameters(nn.Linear(2, 3))] == [torch.Size([3, 2]), torch.Size([3])]


def test_leaves_are_those_that_deepspeed_was_told_of(module):
    assert not any(_whole(each) or z3_leaf_module(each) for each in module.modules())
    set_z3_leaf_modules(module, [nn.Linear])
    found = [_whole(each) for each in module.modules()]
    assert found == [z3_leaf_module(each) for each in module.modules()]
    assert found == [type(each) is nn.Linear for each in module.modules()]
