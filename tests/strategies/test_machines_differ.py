"""What a library lacks on a machine or in a version that is not this one, made so here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils import cpp_extension

from strategies.engines.zero.inputs import plain_file_access


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


def test_a_toolkit_that_is_there_builds_its_own(no_op_is_loaded, monkeypatch):
    from deepspeed.ops.op_builder.builder import OpBuilder

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", "/somewhere")
    assert not plain_file_access()
    assert not OpBuilder._loaded_ops


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
