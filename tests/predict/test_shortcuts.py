"""The short ways through a large world are short (test_remembered: and change nothing)."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.planner.tracing.shortcuts import Shortcuts
from harness.planner.tracing.trace import StoragelessTracer


def cut(ranks: int) -> int:
    """Cut and join a buffer as DeepSpeed does for its ranks; return how many ops a trace sees."""
    ops: list[tuple] = []
    tracer = StoragelessTracer({"cpu": "device"}, witness=lambda *given: ops.append(given))
    with Shortcuts(), FakeTensorMode(), tracer:
        whole = torch.zeros(3 * ranks - 1)
        slices = [whole[3 * rank : 3 * rank + 3] for rank in range(ranks)]
        pieces = [whole.narrow(0, 3 * rank, 2) for rank in range(ranks)]
        joined = torch.cat(slices + pieces)
        chunks = torch.chunk(joined[: 2 * ranks], ranks)
    lengths = {len(piece) for piece in slices}, {len(piece) for piece in pieces}
    assert (lengths, len(chunks), len(joined)) == (({2, 3}, {2}), ranks, 5 * ranks - 1)
    sizes = [storage.size for storage in tracer.record.storages]
    assert sizes == [4 * (3 * ranks - 1), 4 * (5 * ranks - 1)]
    return len(ops)


def test_ops_do_not_grow_with_the_world():
    assert cut(1024) == cut(16) < 20


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
