"""What a CPU lacks, stood in for, so that strategies for GPUs can show their evidence on one.

Each is a context: while it lasts, a training in this process has what the strategy asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch

from harness.worker import setup


@contextlib.contextmanager
def half_precision() -> Iterator[None]:
    """float16 autocast and a loss scale, which accelerate gives to GPUs alone."""
    make = setup.make_accelerator

    def made(resolved):
        accelerator = make(resolved)
        if accelerator.mixed_precision == "fp16":
            accelerator.native_amp = True
            settings = accelerator.scaler_handler.to_kwargs()
            accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
        return accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_accelerator", made)
        yield


@contextlib.contextmanager
def pages() -> Iterator[None]:
    """Moments that bitsandbytes marks as paged, though no driver moves them."""
    from bitsandbytes.optim.optimizer import Optimizer8bit

    buffer = Optimizer8bit.get_state_buffer

    def marked(self, p, dtype=torch.float32):
        found = buffer(self, p, dtype)
        found.is_paged = self.is_paged and p.numel() >= 1e5
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer8bit, "get_state_buffer", marked)
        patch.setattr(Optimizer8bit, "prefetch_state", lambda *_: None)
        yield


class HostAdamW(torch.optim.AdamW):
    """AdamW with copies of the weights that say they are pinned."""

    __module__ = "strategies.optimizers.torchao_adamw"

    def __init__(self, params, **settings) -> None:
        params = list(params)
        super().__init__(params, **settings)
        self.param_d2h_map = {p: p.detach().clone() for p in params}
        for copy in self.param_d2h_map.values():
            copy.is_pinned = lambda: True


@contextlib.contextmanager
def host_optimizer() -> Iterator[None]:
    """An optimizer in place of torchao's, which wants a GPU to copy from."""
    from strategies.optimizers import torchao_adamw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchao_adamw, "HostAdamW", HostAdamW)
        yield


def kept(dense):
    """torch's choice in tiles of 4 by 4: the largest first, at most two a row and a column."""
    rows, columns = dense.shape
    tiles = dense.abs().view(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    chosen, each = torch.zeros_like(tiles, dtype=torch.bool), torch.arange(len(tiles))
    for place in tiles.argsort(dim=1, descending=True).unbind(1):
        square, row, column = chosen.view(-1, 4, 4), place // 4, place % 4
        free = (square[each, row].sum(1) < 2) & (square[each, :, column].sum(1) < 2)
        chosen[each[free], place[free]] = True
    return chosen.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def packed(dense, algorithm="", use_cutlass=True):
    """What torch's kernel gives, with pruned weights in full where a GPU has packed ones."""
    pruned = (dense * kept(dense)).bfloat16()
    none = torch.empty(0, 0)
    return pruned, none, pruned.t().contiguous(), none, none


def product(packed, dense, bias=None, alpha=None, out_dtype=None, transpose_result=False, *_, **__):
    out = packed @ dense if bias is None else packed @ dense + bias[:, None]
    return out.t().contiguous() if transpose_result else out


@contextlib.contextmanager
def sparse_kernels() -> Iterator[None]:
    """CPU kernels for the two operations of 2:4 sparsity that torch has on GPUs alone."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_sparse_semi_structured_tile", packed, "CPU")
    library.impl("_cslt_sparse_mm", product, "CPU")
    try:
        yield
    finally:
        library._destroy()


STAND_INS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "fp16": half_precision,
    "paged_adam8bit": pages,
    "offload_adamw": host_optimizer,
    "sparse24": sparse_kernels,
}
"""Name of a strategy -> what it cannot do without."""
