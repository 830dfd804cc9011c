"""Patches that repeat what a public row's trainer, or a library of its time, did.

A row of docs/public-rows.yaml names them by its keys ``dropout``, ``emptied``, ``zero``, ``norms``
and ``mask``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import peft
import torch
from torch.overrides import TorchFunctionMode

from harness.planner.tracing import cuda_calls
from harness.subjects.library import calls
from harness.worker import setup
from strategies.engines.zero import config

KEYS = frozenset({"dropout", "emptied", "zero", "norms", "mask"})


class _SquareMask(TorchFunctionMode):
    """Make a mask of tokens by tokens from one of tokens, as diffusers once did."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.masked_fill and out.ndim == 2 and out.dtype is torch.bool:
            return out[:, :, None] & out[:, None, :]
        if func is torch.Tensor.unsqueeze and out.ndim == 5 and out.dtype is torch.bool:
            return args[0]
        return out


def _square(*given: Any) -> Any:
    with _SquareMask():
        return calls.hunyuanvideo(*given)


def _emptied(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any, **more: Any) -> Any:
        made = prepare(*given, **more)
        torch.cuda.empty_cache()
        return made

    return run


@contextlib.contextmanager
def patches(row: Mapping[str, Any]) -> Iterator[None]:
    """Patch this process as the row's keys say."""
    fill, listed = config.fill, cuda_calls.FLOAT32 - {"rms_norm"}
    with contextlib.ExitStack() as stack:

        def patch(where: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, value))

        if "mask" in row:
            patch(calls, "hunyuanvideo", _square)
        if "dropout" in row:
            given = functools.partial(peft.LoraConfig, lora_dropout=row["dropout"])
            patch(peft, "LoraConfig", given)
        if "emptied" in row:
            patch(setup, "prepare", _emptied(setup.prepare))
        if "zero" in row:  # settings of the row's DeepSpeed file
            patch(config, "fill", lambda block, values: fill(block, {**values, **row["zero"]}))
        if "norms" in row:  # torch 2.9 to 2.11: autocast leaves the kernel's operands as they are
            patch(cuda_calls, "FLOAT32", listed)
        if row.get("norms") == "parts":  # torch before 2.9 has no kernel
            patch(cuda_calls, "rms_norm", cuda_calls.RMS_NORM)
        yield
