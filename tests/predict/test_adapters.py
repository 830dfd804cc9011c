"""Adapters of the engines: one for each, a reason without one, and patches that agree with
DeepSpeed's own functions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import TINY
from deepspeed.runtime.zero.partition_parameters import _init_external_params
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules, z3_leaf_module
from torch import nn

from harness.planner.adapters import ADAPTERS, adapter_of
from harness.planner.adapters.zero_patches import _parameters, _whole
from harness.planner.worker import predict
from harness.resolve import resolve
from strategies.sharding import sharding_kinds


@pytest.mark.parametrize("kind", sorted(sharding_kinds()))
def test_the_engine_of_every_launch_file_has_an_adapter(kind):
    engine = sharding_kinds()[kind].engine("cuda")
    assert type(adapter_of(engine)) is ADAPTERS[type(engine).__name__]


def test_an_engine_without_an_adapter_has_no_prediction_and_a_reason(monkeypatch):
    monkeypatch.delitem(ADAPTERS.data, "Alone")
    found = predict(resolve(dataclasses.replace(TINY, recipe="single", processes=1)))
    assert found.method == "none" and "Alone has no adapter" in found.reason


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
