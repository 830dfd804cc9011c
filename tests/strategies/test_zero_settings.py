"""What a launch file of ZeRO may not ask for, and what DeepSpeed lacks on a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils import cpp_extension

from strategies import engines
from strategies.engines.replicas import Broken
from strategies.engines.zero.inputs import give_by_place, plain_file_access
from strategies.launch_file import FOLDER


def changed(folder: Path, name: str, **zero) -> Path:
    """The launch file ``name`` with other settings in its JSON, in a folder of their own."""
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


def test_a_hook_behind_sees_what_came_by_keyword():
    """An input in front keeps its default."""
    attention, seen = torch.nn.MultiheadAttention(4, 1), []
    q = torch.ones(1, 4)
    wanted, _ = attention(q, q, q, need_weights=False)
    give_by_place(attention)
    attention.register_forward_pre_hook(lambda module, given: seen.append(len(given)))
    assert attention(q, q, value=q, need_weights=False)[0].equal(wanted) and seen == [8]


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
    from harness.worker.measure import hold

    taken = {}

    def fraction(share, device):
        taken[torch.cuda._utils._get_device_index(device)] = share

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8, 16))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction)
    hold(torch.device("cuda"), 4)
    assert taken == {0: 0.25}
