"""ZeRO's further settings, in process: what a launch file may not ask for, what accelerate makes of
an optimizer that is offloaded, and an example file of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils import cpp_extension

from harness.resolve import resolve
from harness.spec import Spec
from strategies import engines
from strategies.base import Settings, load
from strategies.engines.replicas import Broken
from strategies.engines.zero import inputs
from strategies.engines.zero.inputs import plain_file_access
from strategies.launch_file import FOLDER


def launch(recipe: str, processes: int, device: str = "cuda"):
    spec = Spec(recipe=recipe, processes=processes, global_batch=processes, device=device)
    return resolve(spec).launch


def changed(folder: Path, name: str, **zero) -> Path:
    """The launch file ``name`` and its JSON with other settings, in a folder of their own; a key
    that a JSON has outside of its zero_optimization is changed there."""
    config, yaml = json.loads((FOLDER / f"{name}.json").read_text()), FOLDER / f"{name}.yaml"
    for key, value in zero.items():
        outside = key in {*config, "activation_checkpointing", "compile"}
        (config if outside else config["zero_optimization"])[key] = value
    own, file = folder / "own.json", folder / "own.yaml"
    own.write_text(json.dumps(config))
    file.write_text(yaml.read_text().replace(f"launch_configs/{name}.json", str(own)))
    return file


# -- what a launch file may not ask for -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("zero3", {"mics_shard_size": 2}, "there is no mics: .* take hsdp"),
        ("zero3", {"compile": {"deepcompile": True}}, "there is no deepcompile: .* take compile"),
        ("zero3", {"zero_quantized_weights": True}, "there is no zero3_qwz: .* take zero3"),
        ("zero2_offload", {"zenflow": {"topk_ratio": 0.1}}, "there is no zenflow: .* take zero2"),
        (
            "zero2_offload",
            {"zero_force_ds_cpu_optimizer": True},
            'without decoupled weight decay and betas: write "zero_force_ds_cpu_optimizer": false',
        ),
    ],
)
def test_what_a_file_may_not_ask_for_is_refused_by_name(name, settings, words, tmp_path):
    assert not isinstance(engines.of_file(changed(tmp_path, name)), Broken)
    found = engines.of_file(changed(tmp_path, name, **settings))
    assert isinstance(found, Broken) and re.search(words, found.why)


# -- weight decay under offload ---------------------------------------------------------------


def stepped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A weight behind three steps, whose last gradients are smaller than its decay."""
    (weight,) = optimizer.param_groups[0]["params"]
    for size in (1.0, 1e-3, 1e-3):
        weight.grad = torch.linspace(-size, size, weight.numel())
        optimizer.step()
    return weight.detach()


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 1000).roll(17))]


def test_accelerate_would_couple_the_decay_of_a_cpu_adam_that_it_is_given():
    """Unless the JSON forbids it, accelerate makes an offloaded optimizer anew; one that is no
    ``torch.optim.AdamW`` gets Adam's decay, which is added to the gradient: nothing that a run
    without weight decay shows, and a thousandth of the loss with one."""
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    settings = Settings(learning_rate=1e-3, weight_decay=0.1)
    engine = launch("zero2_offload", 2, "cpu").engine
    plain = stepped(torch.optim.AdamW(weights(), **settings.adam))
    make = load(engine.host_adamw)
    ours = make(weights(), **settings.adam)
    assert ours.adam_w_mode and torch.allclose(stepped(ours), plain, rtol=0, atol=1e-6)
    remade = map_pytorch_optim_to_deepspeed(make(weights(), **settings.adam))
    assert not remade.adam_w_mode
    away = (stepped(remade) - plain).abs()
    assert away.max() > settings.learning_rate and (away > 1e-5).float().mean() > 0.3


# -- calls by place --


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


# -- what DeepSpeed lacks on a machine --


@pytest.fixture
def no_op_is_loaded(monkeypatch):
    builder = pytest.importorskip("deepspeed.ops.op_builder.builder")
    monkeypatch.setattr(builder.OpBuilder, "_loaded_ops", {})


@pytest.mark.libaio
def test_files_are_swapped_beside_a_gpu_without_its_toolkit(no_op_is_loaded, monkeypatch):
    from deepspeed.ops.op_builder.async_io import AsyncIOBuilder

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    with mock.patch("torch.cuda.is_available", return_value=True):
        with pytest.raises(TypeError):  # else DeepSpeed has mended it, and we need nothing
            AsyncIOBuilder().load(verbose=False)
        assert plain_file_access()
        assert hasattr(AsyncIOBuilder().load(verbose=False), "aio_handle")


def test_the_only_gpu_of_a_process_can_be_limited_though_it_has_no_number(monkeypatch):
    """accelerate's device of a process that trains alone is "cuda"; torch wants its index."""
    from harness.worker.memory_limit import hold

    taken = {}

    def fraction(share, device):
        taken[torch.cuda._utils._get_device_index(device)] = share

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8, 16))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction)
    hold(torch.device("cuda"), 4)
    assert taken == {0: 0.25}
