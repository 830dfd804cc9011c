"""What operations on fake tensors gave is kept, and no prediction changes by it."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from conftest import predictions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.predict.tracing.remembered import Remembered, device_of
from harness.spec import Spec

SPEC = Spec(
    recipe="", model="DiT-T/8:depth=2", data="synthetic", global_batch=4, processes=4, device="cuda"
)
CASES = [
    {"recipe": "zero3_offload+fp16+lora:rank=4+checkpoint"},
    {"recipe": "fsdp2+bf16"},
    {"recipe": "single+adam8bit+accumulate:steps=2", "processes": 1},
]


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


class Kept(TorchDispatchMode):
    """Asks ``Remembered`` for each operation; ``asked`` counts those that torch was asked for."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.remembered = Remembered(fake)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return device_of(args[0])
        return self.remembered(func, args, kwargs or {})


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
        found += [*torch.nn.functional.layer_norm(wide, (6,)).topk(2)]
        found += [torch.zeros(3).add(1, alpha=alpha) for alpha in (1, 2)]
        for kind in (torch.float64, torch.float32):  # what nobody names a type for has the usual
            torch.set_default_dtype(kind)
            found += [torch.ones(3), torch.ones(3, dtype=torch.int64) / 2]
    return found


def test_each_result_is_as_torch_gives_it():
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        plain = [_told(tensor) for tensor in _steps()]
        with Kept(fake) as kept:
            ours = _steps()
            assert [_told(tensor) for tensor in ours] == plain
        assert len(kept.remembered._known) > 20


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


@pytest.mark.parametrize("other", [torch.float64, torch.int32])
def test_values_read_back_stay_right(other):
    """A tensor made of a number keeps it, as torch's mode does, and no key would tell."""
    with FakeTensorMode() as fake, Kept(fake):
        values = [(torch.tensor(n, dtype=other) + 1).item() for n in (1, 2)]
    assert values == [2, 3]
