"""What operations on fake tensors gave is kept, for later traces too, and no prediction changes by
it."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from conftest import predictions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.planner.tracing import op_cache
from harness.planner.tracing.forks import in_forks
from harness.planner.tracing.op_cache import OpCache, device_of, known
from harness.planner.tracing.trace import StoragelessTracer
from harness.spec import Spec

SPEC = Spec(
    recipe="", model="DiT-T/8:depth=2", data="synthetic", global_batch=4, processes=4, device="cuda"
)
CASES = [
    {"recipe": "zero3_offload+fp16+lora:rank=4+checkpoint"},
    {"recipe": "fsdp2+bf16"},
    {"recipe": "single+adam8bit+accumulate:steps=2", "processes": 1},
]


@pytest.mark.thorough
def test_a_prediction_is_the_same_to_the_byte_where_torch_answers_every_operation(tmp_path):
    specs = [dataclasses.asdict(SPEC) | case for case in CASES]
    # A library keeps tables from the first trace of a process: that one is compared with none.
    cases = [{**spec, "remembered": kept} for spec in specs for kept in (True, False)]
    found = predictions([specs[0], *cases], tmp_path)[1:]
    for case, short, long in zip(CASES, found[::2], found[1::2], strict=True):
        assert short["method"] == "trace", short["reason"]
        for one in (short, long):
            one["work"].sort(key=str)
        assert short == long, case


@pytest.fixture(autouse=True)
def _nothing_known():
    with mock.patch.dict(op_cache._KNOWN, clear=True):
        yield


class Kept(TorchDispatchMode):
    """Asks ``OpCache`` for each operation; ``asked`` counts those that torch was asked for."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.op_cache = OpCache(fake)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return device_of(args[0])
        return self.op_cache(func, args, kwargs or {})


def _told(tensor: torch.Tensor) -> tuple:
    return (tensor.shape, tensor.stride(), tensor.dtype, device_of(tensor), tensor.requires_grad,
            tensor.storage_offset(), tensor.untyped_storage().nbytes())  # fmt: skip


def _steps() -> list[torch.Tensor]:
    """Operations that only one part of a key tells apart, each done twice."""
    found = []
    for _ in range(2):
        for kind, device in (
            (torch.float32, "cpu"),
            (torch.bfloat16, "cpu"),
            (torch.float32, "meta"),
        ):
            wide = torch.empty(4, 6, dtype=kind, device=device)
            for plain in (wide, wide.t(), wide[:, :3], wide[1:]):
                found += [plain + 1, plain.sum(0), plain.sum(0, keepdim=True), plain.to(torch.half)]
                found += [torch.zeros_like(plain), *plain.split(2), plain.mul_(2), plain > 0]
                found += [
                    torch.stack([plain, plain]),
                    plain.clone(memory_format=torch.preserve_format),
                ]
        found += [plain * 2, plain * 2.0, plain * True, torch.ones(3).to("meta")]
        whole = torch.ones(3, dtype=torch.int64)  # of floats each product has the same type
        found += [whole * 2, whole * 2.0, whole * True]
        found += [*torch.nn.functional.layer_norm(wide, (6,)).topk(2)]
        found += [torch.zeros(3).add(1, alpha=alpha) for alpha in (1, 2)]
        for kind in (torch.float64, torch.float32):  # what nobody names a type for has the usual
            torch.set_default_dtype(kind)
            found += [torch.ones(3), torch.ones(3, dtype=torch.int64) / 2]
    return found


def test_each_result_is_as_torch_gives_it():
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        plain = [_told(tensor) for tensor in _steps()]
        with Kept(fake):
            ours = _steps()
            assert [_told(tensor) for tensor in ours] == plain
        assert known() > 20


def test_a_view_shares_its_storage_and_what_is_written_is_the_operand():
    with FakeTensorMode() as fake, Kept(fake):
        whole = torch.empty(4, 4)
        for _ in range(2):
            assert whole[1:].untyped_storage()._cdata == whole.untyped_storage()._cdata
            assert whole.add_(1) is whole
            assert (whole + 1).untyped_storage()._cdata != whole.untyped_storage()._cdata


def test_the_second_time_torch_is_not_asked():
    with FakeTensorMode() as fake, Kept(fake):
        one = torch.empty(4, 4)
        made = one + 1
        with mock.patch.object(FakeTensorMode, "dispatch", side_effect=AssertionError):
            again = one + 1
            view = torch.ops.aten.slice.Tensor(again, 0, 1)
        assert _told(again) == _told(made) and view.shape == (3, 4)


def test_what_is_filled_is_the_operand_named_so_and_has_the_shape_that_it_is_given():
    parts = [torch.empty(2), torch.empty(3)]
    for length in (5, 0):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, Kept(fake):
            for _ in range(2):
                out = torch.empty(length)
                assert torch.cat(parts, out=out) is out and out.shape == (5,)
                assert out.untyped_storage().nbytes() == 20


def test_a_view_of_what_has_no_storage_of_its_own_is_followed():
    """A sparse gradient, as ``sparse_embedding`` makes them: its indices and values are seen."""
    tracer = StoragelessTracer({"meta": "device", "cpu": "host"})
    with FakeTensorMode() as fake:
        tracer.op_cache = OpCache(fake)
        with tracer:
            places, values = torch.zeros(1, 2, dtype=torch.int64), torch.ones(2, 3)
            sparse = torch.sparse_coo_tensor(places, values, (4, 3), check_invariants=False)
            assert sparse.detach().is_sparse
    assert sorted(storage.size for storage in tracer.record.storages) == [16, 24]


def test_no_generator_decides_what_a_fake_tensor_is():
    with FakeTensorMode() as fake, Kept(fake):
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
        with mock.patch.object(FakeTensorMode, "dispatch", side_effect=AssertionError):
            assert _told(torch.randn(3, generator=torch.Generator())) == _told(drawn)


def test_what_one_fork_asked_torch_the_next_knows():
    dispatch = FakeTensorMode.dispatch

    def function() -> dict:
        asked = []

        def counted(self, func, *given):
            asked.append(str(func))
            return dispatch(self, func, *given)

        noted = mock.patch.object(FakeTensorMode, "dispatch", counted)
        with noted, FakeTensorMode() as fake, Kept(fake):
            told = [_told(tensor)[:2] for tensor in (torch.empty(4, 4) + 1).topk(2)]
        return {"asked": asked, "told": told}

    first, second, third = (one.made for one in in_forks([function] * 3, 1, 60))
    assert "aten.topk.default" in first["asked"] and "aten.empty.memory_format" in first["asked"]
    assert second["asked"] == third["asked"] == []
    assert first["told"] == second["told"] == [[[4, 2], [2, 1]]] * 2


def test_too_many_answers_are_forgotten(monkeypatch):
    with FakeTensorMode() as fake, Kept(fake):
        torch.empty(4, 4) + 1
    told = op_cache.learned(0)
    there = known()
    op_cache.learn(told)
    assert known() == there == 2
    monkeypatch.setattr(op_cache, "MOST", 3)
    op_cache._KNOWN["older"] = op_cache.OTHER
    op_cache.learn(told)
    assert known() == 2 and "older" not in op_cache._KNOWN


@pytest.mark.parametrize("other", [torch.float64, torch.int32])
def test_values_read_back_stay_right(other):
    """A tensor made of a number keeps it, as torch's mode does, and no key would tell."""
    with FakeTensorMode() as fake, Kept(fake):
        values = [(torch.tensor(n, dtype=other) + 1).item() for n in (1, 2)]
    assert values == [2, 3]
