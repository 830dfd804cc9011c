"""Rows that others measured on GPUs, as ``docs/public-peaks.yaml`` has them, predicted.

``python -m tests.made.published [new | NUMBER ...]`` predicts every row (or those that have no
prediction yet, or those, counted from 1), keeps what came of it in ``docs/public-peaks.json`` and
writes the tables of ``docs/explanation/accuracy.md``, ``docs/reference/public-rows.md`` and
``docs/reference/public-times.md`` anew; ``tables`` writes these tables alone;
``--test OUT.json`` predicts those that have a "test".
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from tests.children.peaks import in_forks  # isort: skip: it keeps GPUs and kernels away

import torch
from torch.overrides import TorchFunctionMode

from harness.planner import pool, uncertainty
from harness.planner.speed.roofline import issued
from harness.planner.tracing import cuda_calls
from harness.planner.uncertainty import class_of
from harness.planner.verdict import judge
from harness.planner.worker import predict
from harness.prediction import Prediction
from harness.resolve import Resolved, resolve
from harness.result import write_json
from harness.spec import Spec
from harness.subjects.library import calls
from harness.system import cards
from harness.worker import setup
from strategies.adapters import lora
from strategies.engines.zero import config
from tests.made import krea2_then, public_rows
from tests.made.pages import anew
from tests.made.public_rows import (
    PAGE,
    RECORD,
    ROWS_PAGE,
    TIMES_PAGE,
    Found,
    class_table,
    count_table,
    kept,
    memory_table,
    near_table,
    rows,
    seen_table,
    time_table,
    whole_table,
)

GIB = 2**30
WAS = frozenset({"dropout", "mask", "emptied", "zero", "norms", "attention", "int8"})
"""Keys of a row that say what was not as it is here."""


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
    """What the row's trainer, or a library of its time, did and this project does not."""
    with contextlib.ExitStack() as stack:
        if row.get("mask") == "square":
            stack.enter_context(mock.patch.dict(calls.CALLS, {"hunyuanvideo": squared}))
        if "dropout" in row:
            dropping = functools.partial(lora.inject, lora_dropout=row["dropout"])
            stack.enter_context(mock.patch.object(lora, "inject", dropping))
        if row.get("emptied") == "before training":
            stack.enter_context(mock.patch.object(setup, "prepare", _emptied(setup.prepare)))
        if "zero" in row:
            filled = _filled(config.fill, row["zero"])
            stack.enter_context(mock.patch.object(config, "fill", filled))
        if "norms" in row:
            stack.enter_context(norms_of(row["norms"]))
        if "attention" in row:
            stack.enter_context(krea2_then.ATTENTION[row["attention"]]())
        if "int8" in row:
            stack.enter_context(krea2_then.torchao_int8())
        yield


@contextlib.contextmanager
def norms_of(torch_then: str) -> Iterator[None]:
    """``torch.nn.RMSNorm`` as an older torch had it.

    ``uncast``: CUDA's kernel, whose operands autocast leaves as they are (torch 2.9 to 2.11).
    ``parts``: no kernel (torch before 2.9). Source: pull requests 153666 and 174824 of pytorch.
    """
    listed = cuda_calls.FLOAT32 - {"rms_norm"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cuda_calls, "FLOAT32", listed))
        if torch_then == "parts":
            stack.enter_context(mock.patch.object(cuda_calls, "rms_norm", cuda_calls.RMS_NORM))
        yield


def squared(*given: Any) -> Any:
    with _Square():
        return calls.hunyuanvideo(*given)


def _emptied(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """``prepare``, and what the pool has cached is given back."""

    def run(*given: Any, **more: Any) -> Any:
        made = prepare(*given, **more)
        torch.cuda.empty_cache()
        return made

    return run


def _filled(fill: Callable[..., None], asked: dict[str, Any]) -> Callable[..., None]:
    """``fill``, with the settings of the row's DeepSpeed file in place of this project's."""

    def run(block: dict[str, Any], values: dict[str, Any]) -> None:
        fill(block, {**values, **asked})

    return run


def told(resolved: Resolved, found: Prediction, row: dict[str, Any]) -> Found:
    """What is kept of a prediction, with seconds on the row's cards."""
    if found.method != "trace":
        return {"why": f"{found.reason} {found.fault}"}
    names, beside = row.get("seconds", ()), row.get("beside", 0.0)
    timed = {name: judge(resolved, found, cards.find(name)).seconds for name in names}
    return {
        "reserved": found.reserved / GIB + beside,
        "allocated": found.allocated / GIB + beside,
        "between": found.between / GIB + beside,
        "class": class_of(resolved.launch.traits, found),
        "operations": issued(found.work),
        "seconds": {name: [one.total, one.low, one.high] for name, one in timed.items()},
    }


def patched(row: dict[str, Any]) -> Found:
    """A row of which something was not as it is here, predicted in this process."""
    with as_it_was(row):
        refused(row)
        resolved = resolve(spec_of(row))
        return told(resolved, predict(resolved), row)


def refused(row: dict[str, Any]) -> None:
    """Raise if a plan refuses the row's recipe: the trace would predict another one.

    Raises:
        ValueError: the recipe is refused for this model.
    """
    resolved = resolve(spec_of(row))
    if why := resolved.recipe.refusal(resolved.launch):
        raise ValueError(f"{row['name']}: {why}")


def predicted(some: Sequence[dict[str, Any]], folder: Path) -> list[Found]:
    """What each row comes to; predictions are kept in ``folder``."""
    plain = [row for row in some if not WAS.intersection(row)]
    for row in plain:  # of the others each process of its own does: a model's facts are kept
        refused(row)
    resolved = [resolve(spec_of(row)) for row in plain]
    made = pool.predict_all(resolved, folder)
    named = {
        row["name"]: told(asked, one, row)
        for row, asked, one in zip(plain, resolved, made, strict=True)
    }
    others = [row for row in some if WAS.intersection(row)]
    named |= dict(zip([r["name"] for r in others], in_forks(patched, others), strict=True))
    return [named[row["name"]] for row in some]


def unpredicted() -> list[int]:
    """Return the numbers, counted from 1, of the rows that have no prediction yet."""
    known = kept()
    return [n for n, row in enumerate(rows(), 1) if row["name"] not in known]


def main(numbers: Sequence[int]) -> None:
    """Predict the rows of these numbers, of all where there is none; write record and page."""
    known = kept() if RECORD.exists() else {}
    some = [row for n, row in enumerate(rows(), 1) if not numbers or n in numbers]
    found = predicted(some, pool.default_folder())
    known |= {row["name"]: got for row, got in zip(some, found, strict=True)}
    ordered = {row["name"]: known[row["name"]] for row in rows() if row["name"] in known}
    write_json(RECORD, ordered)
    if len(ordered) == len(rows()):
        write_tables(ordered)


def write_tables(known: dict[str, Found]) -> None:
    """Write the ranges and all tables from the kept predictions."""
    left = public_rows.residuals(known)
    uncertainty.FILE.write_text(public_rows.residuals_text(left), encoding="utf-8")
    _written(PAGE, class_table(left), seen_table(known))
    made = (count_table, memory_table, near_table, whole_table)
    _written(ROWS_PAGE, *(table(known) for table in made))
    _written(TIMES_PAGE, time_table(known))


def _written(path: Path, *made: Iterable[str]) -> None:
    page = path.read_text(encoding="utf-8")
    for table in made:
        page = anew(page, list(table))
    path.write_text(page, encoding="utf-8")


def tested(out: Path) -> None:
    """Predict the rows with a test, from nothing that was kept."""
    with tempfile.TemporaryDirectory() as folder:
        out.write_text(json.dumps(predicted([r for r in rows() if r.get("test")], Path(folder))))


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["--test"]:
        tested(Path(words[1]))
    elif words == ["tables"]:
        write_tables(kept())
    elif words != ["new"]:
        main([int(word) for word in words])
    elif numbers := unpredicted():
        main(numbers)
