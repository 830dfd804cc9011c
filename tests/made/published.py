"""Rows that others measured on GPUs, as ``docs/public-peaks.yaml`` has them, predicted.

``python -m tests.made.published`` predicts every row and prints the table of ``docs/models.md``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from tests.children.peaks import in_forks  # isort: skip: it keeps GPUs and kernels away

import torch
from torch.overrides import TorchFunctionMode

from harness import ROOT
from harness.predict.worker import predict
from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects.library import calls

FILE = ROOT / "docs" / "public-peaks.yaml"
GIB = 2**30


def rows() -> list[dict[str, Any]]:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def spec_of(row: dict[str, Any]) -> Spec:
    """The run that repeats a row: on one GPU, clipped at 1 and without an average, as they do."""
    usual = dict(data="synthetic", objective="flow", global_batch=1, device="cuda", ema=0.0)
    return Spec(**usual | {"grad_clip": 1.0} | row["run"])


class _Square(TorchFunctionMode):
    """What a library of the time did with a mask of tokens: it made one of tokens by tokens."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.masked_fill and out.ndim == 2 and out.dtype is torch.bool:
            return out[:, :, None] & out[:, None, :]
        if func is torch.Tensor.unsqueeze and out.ndim == 5 and out.dtype is torch.bool:
            return args[0]
        return out


@contextlib.contextmanager
def as_it_was(row: dict[str, Any]) -> Iterator[None]:
    if row.get("mask") != "square":
        yield
        return

    def squared(*given: Any) -> Any:
        with _Square():
            return calls.hunyuanvideo(*given)

    with mock.patch.dict(calls.CALLS, {"hunyuanvideo": squared}):
        yield


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """GiB that a row is predicted to reserve, and to hold between two steps."""
    with as_it_was(row):
        found = predict(resolve(spec_of(row)))
    if found.method != "trace":
        return {"why": f"{found.reason} {found.fault}"}
    return {"reserved": found.reserved / GIB, "between": found.between / GIB}


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    yield "| run | source | settings | reserved | predicted | | between steps | predicted | |"
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
    for row, got in zip(rows(), found, strict=True):
        if "why" in got:
            yield f"| {row['name']} | {row['source']} | {row['settings']} | not predicted |"
            continue
        cells = [row["name"], row["source"], row["settings"]]
        for key in ("reserved", "between"):
            known = row.get(key)
            more = (f"{known:.3f}", f"{got[key]:.3f}", f"{100 * (got[key] / known - 1):+.1f} %")
            cells += more if known else ("-", f"{got[key]:.3f}", "")
        yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    chosen = [r for r in rows() if len(sys.argv) < 2 or r.get("test")]
    found = in_forks(predicted, chosen)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found))
    else:
        print(*table(found), sep="\n")
