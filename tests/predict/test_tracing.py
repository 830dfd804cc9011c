"""What a trace stands on: adapters of engines, short ways through a large world, ops of CUDA on
tensors that stand for a GPU's, and forks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from deepspeed.runtime.zero.partition_parameters import _init_external_params
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules, z3_leaf_module
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils._python_dispatch import TorchDispatchMode

from harness.planner.adapters import ADAPTERS, adapter_of
from harness.planner.adapters.zero_patches import _is_leaf, _parameters
from harness.planner.tracing import cuda_calls, forks
from harness.planner.tracing.cuda_calls import as_bias, cuda_like
from harness.planner.tracing.forks import in_forks
from harness.planner.tracing.shortcuts import Shortcuts
from harness.planner.tracing.trace import StoragelessTracer
from harness.planner.worker import predict
from harness.resolve import resolve
from strategies.sharding import sharding_kinds

# ---- adapters of engines ----


@pytest.mark.parametrize("kind", sorted(sharding_kinds()))
def test_the_engine_of_every_launch_file_has_an_adapter(kind):
    engine = sharding_kinds()[kind].engine("cuda")
    assert type(adapter_of(engine)) is ADAPTERS[type(engine).__name__]


def test_an_engine_without_an_adapter_has_no_prediction_and_a_reason(monkeypatch):
    monkeypatch.delitem(ADAPTERS.data, "Alone")
    found = predict(resolve(dataclasses.replace(TINY, recipe="single", processes=1)))
    assert found.method == "none" and "Alone has no adapter" in found.reason


def test_zero3_s_parameters_and_leaves_are_those_that_deepspeed_finds():
    """Two layers, one without a bias, and a parameter of one that the other uses."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    for each in module.modules():
        _init_external_params(each)
    module[1]._external_params[7] = module[0].bias
    set_z3_leaf_modules(module, [nn.Linear])
    for each, recurse in itertools.product(module.modules(), (False, True)):
        ours, theirs = ([id(p) for p in f(each, recurse)] for f in (_parameters, iter_params))
        assert ours == theirs
        assert _is_leaf(each) == z3_leaf_module(each) == (type(each) is nn.Linear)
    own = [_parameters(module[1], recurse) for recurse in (False, True)]
    assert [len(found) for found in own] == [1, 2] and own[0][0] is module[0].bias


# ---- short ways through a large world ----


def cut(mode: contextlib.AbstractContextManager) -> tuple[list[int], list[int]]:
    """Cut and join a buffer as DeepSpeed does for 16 ranks; return sizes of storages and pieces."""
    tracer = StoragelessTracer({"cpu": "device"})
    with mode, FakeTensorMode(), tracer:
        whole = torch.zeros(47)
        slices = [whole[3 * rank : 3 * rank + 3] for rank in range(16)]
        joined = torch.cat(slices + [whole.narrow(0, 3 * rank, 2) for rank in range(15)])
        pieces = [*slices, joined, *torch.chunk(joined[:32], 16)]
    return [one.size for one in tracer.record.storages], [len(piece) for piece in pieces]


def test_pieces_of_a_large_world_take_the_memory_of_the_long_way():
    assert cut(Shortcuts()) == cut(contextlib.nullcontext())


def test_what_the_short_way_cannot_answer_goes_the_long_way():
    with Shortcuts():
        whole = torch.arange(20.0)
        assert [len(p) for p in torch.chunk(whole, 3)] == [7, 7, 6]
        assert whole[::2].tolist() == whole.tolist()[::2]
        assert whole[-3:].tolist() == [17.0, 18.0, 19.0]
        square, grown = whole.view(4, 5), whole.clone().requires_grad_()
        assert square[1:3].shape == (2, 5) and square.narrow(1, 2, 3).shape == (4, 3)
        assert torch.cat([square] * 9).shape == (36, 5)
        assert torch.cat([grown[:4]] * 9).requires_grad
        mixed = torch.cat([whole] * 8 + [whole.double()])
        assert mixed.dtype is torch.float64 and len(mixed) == 180


# ---- ops of a GPU ----

NAMES = {
    "grid_sampler": "grid_sample", "nll_loss2d": "nll_loss",
    "_convolution": "convolution", "cudnn_convolution": "convolution",
    "cudnn_convolution_transpose": "convolution",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
}  # fmt: skip
"""Op that autocast casts -> function that a model calls."""
RECURRENT = {
    "_cudnn_rnn",  # registered by a build of torch for CUDA
    *(f"{kind}_cell" for kind in ("rnn_tanh", "rnn_relu", "gru", "lstm", "_thnn_fused_gru",
                                  "_thnn_fused_lstm")),
}  # fmt: skip


def test_no_op_that_autocast_casts_is_missing():
    ops = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {name.partition("::")[2].partition(".")[0] for name in ops if name.startswith("aten")}
    called = {
        "interpolate" if name.lstrip("_").startswith("upsample") else NAMES.get(name, name)
        for name in names - RECURRENT
    }
    assert "rms_norm" in called
    assert called <= cuda_calls.LOWER | cuda_calls.FLOAT32 | cuda_calls.WIDEST


@pytest.fixture
def x():
    return torch.empty(2, 9, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)


def test_a_norm_is_one_kernel_that_keeps_a_number_per_row(x):
    norm = torch.nn.RMSNorm(128, device="meta", dtype=torch.bfloat16)
    with cuda_like("flash"):
        out = norm(x)
    given, weight, deviation = out.grad_fn.saved_tensors
    assert given is x and weight is norm.weight and out.dtype is x.dtype
    assert deviation.shape == (2, 9, 1) and deviation.dtype is torch.float32
    with cuda_like("flash"):
        assert "RMSNorm" not in norm.float()(x).grad_fn.name(), "weights of another type"
    with cuda_like("flash"), torch.autocast("cuda", torch.bfloat16):
        out = norm.float()(x)
    assert out.dtype is torch.float32 and out.grad_fn.saved_tensors[0].dtype is torch.float32


def test_dropout_keeps_a_mask_of_bytes(x):
    with cuda_like("flash"):
        out = torch.nn.Dropout(0.1)(x)
    kept = out.grad_fn._saved_result1
    assert out.dtype is x.dtype and kept.dtype is torch.bool and kept.numel() == x.numel()
    with cuda_like("flash"):
        plain = torch.nn.functional.dropout(torch.ones(4, requires_grad=True), 0.1)
    assert not hasattr(plain.grad_fn, "_saved_result1"), "on a CPU it is noise"


class Ran(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def heads(count: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, count, tokens, 64, dtype=dtype, device="meta")


def kernels(kind: str, q: torch.Tensor, k: torch.Tensor, **more) -> set[str]:
    with cuda_like(kind), Ran() as ran:
        out = attend(query=q, key=k, value=k, **more)
    assert out.shape == q.shape
    return {name.split("_attention")[0].rpartition("product_")[2] for name in ran.names
            if "_scaled_dot_product" in name}  # fmt: skip


def test_a_call_by_keyword_runs_the_kernel_that_takes_it():
    q, few, half = heads(4, 32), heads(2, 32), heads(4, 32, torch.float16)
    assert kernels("flash", q, q) == {"flash"} and kernels("cudnn", q, q) == {"cudnn"}
    mask = torch.ones(1, 1, 1, 32, dtype=torch.bool, device="meta")
    assert kernels("flash", q, q, attn_mask=mask) == {"efficient"}
    assert kernels("flash", q, few, enable_gqa=True) == {"flash"}
    assert kernels("efficient", q, q) == set(), "bfloat16 on an old card"
    assert kernels("efficient", half, half) == {"efficient"}
    few = heads(2, 32, torch.float16)
    assert kernels("efficient", half, few, enable_gqa=True) == set(), "a key for each head"


@pytest.mark.parametrize(("rows", "tokens", "held"), [
    (1, 32, 32 * 2), (1, 20, 24 * 2), (20, 20, 20 * 24 * 2),  # a row is padded to 8
])  # fmt: skip
def test_a_boolean_mask_becomes_numbers_of_the_queries_type(rows, tokens, held):
    q, mask = heads(4, tokens), torch.ones(1, 1, rows, tokens, dtype=torch.bool, device="meta")
    bias = as_bias(mask, q, q, padded=True)
    assert bias.dtype is torch.bfloat16 and bias.shape == (1, 4, tokens, tokens)
    assert bias.untyped_storage().nbytes() == held
    same = as_bias(bias, q, q, padded=True)
    assert same.untyped_storage()._cdata == bias.untyped_storage()._cdata, "numbers stay"


# ---- forks ----


def test_each_answers_by_its_index_and_so_many_run_at_a_time():
    def function(index: int) -> dict:
        began = time.monotonic()
        time.sleep(0.2)
        span = began, time.monotonic()
        return {"index": index, "pid": os.getpid(), "span": span, "long": "x" * 3_000_000}

    functions = [functools.partial(function, index) for index in range(5)]
    found = {one.index: one.made for one in in_forks(functions, 2, 60)}
    assert {index: made["index"] for index, made in found.items()} == {i: i for i in range(5)}
    assert {len(made["long"]) for made in found.values()} == {3_000_000}
    assert len({made["pid"] for made in found.values()} | {os.getpid()}) == 6
    spans = [made["span"] for made in found.values()]
    assert max(sum(a <= began < b for a, b in spans) for began, _ in spans) <= 2


def test_what_dies_or_never_ends_is_lost_alone(monkeypatch):
    def dies() -> dict:
        os._exit(3)

    def hangs() -> dict:
        while True:
            signal.pause()

    def raises() -> dict:
        raise ValueError("lost")

    def killed() -> dict:
        os.kill(os.getpid(), signal.SIGKILL)

    found, limit = {}, 3600.0

    def clock() -> float:
        """The limit passes when all others have ended."""
        return time.monotonic() + limit * (len(found) == 4)

    monkeypatch.setattr(forks, "time", SimpleNamespace(monotonic=clock))
    for one in in_forks([dies, hangs, lambda: {"there": 1}, raises, killed], 5, limit):
        found[one.index] = one.made
    assert "exit code 3" in found[0]["why"] and "exit code 1" in found[3]["why"]
    assert found[1] == {"why": "not done after 3600 s"} and found[2] == {"there": 1}
    assert "SIGKILL" in found[4]["why"] and "host memory" in found[4]["why"]
