"""Rows that others measured on GPUs, as ``docs/public-peaks.yaml`` has them, predicted.

``python -m tests.made.published [NUMBER ...]`` predicts every row (or those, counted from 1), keeps
what came of it in ``docs/public-peaks.json`` and writes the tables of ``docs/models.md`` anew;
``--test OUT.json`` predicts those that have a "test".
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from tests.children.peaks import in_forks  # isort: skip: it keeps GPUs and kernels away

import torch
from torch.overrides import TorchFunctionMode

from harness import ROOT
from harness.predict import pool
from harness.predict.prediction import Prediction
from harness.predict.speed import cards
from harness.predict.verdict import judge
from harness.predict.worker import predict
from harness.resolve import Resolved, resolve
from harness.result import write_json
from harness.spec import Spec
from harness.subjects.library import calls

FILE = ROOT / "docs" / "public-peaks.yaml"
RECORD = ROOT / "docs" / "public-peaks.json"
PAGE = ROOT / "docs" / "models.md"
GIB = 2**30
MEMORY = ("run", "source", "settings", "reserved", "predicted", "", "between steps", "predicted", "")
TIME = ("run", "card", "seconds a step", "predicted", "plus or minus", "", "within")
Found = dict[str, Any]
"""Of a row: GiB ``reserved`` and ``between`` two steps, and ``seconds``, [predicted, plus or minus]
by card; or ``why`` nothing was predicted."""


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


def told(resolved: Resolved, found: Prediction, names: Sequence[str]) -> Found:
    """What is kept of a prediction, with seconds on these cards."""
    if found.method != "trace":
        return {"why": f"{found.reason} {found.fault}"}
    timed = {name: judge(resolved, found, cards.find(name)).seconds for name in names}
    return {
        "reserved": found.reserved / GIB,
        "between": found.between / GIB,
        "seconds": {name: [one.total, one.spread] for name, one in timed.items()},
    }


def masked(row: dict[str, Any]) -> Found:
    """A row whose library made another mask, predicted in this process."""
    with as_it_was(row):
        resolved = resolve(spec_of(row))
        return told(resolved, predict(resolved), row.get("seconds", ()))


def predicted(some: Sequence[dict[str, Any]], folder: Path) -> list[Found]:
    """What each row comes to; predictions are kept in ``folder``."""
    plain = [row for row in some if "mask" not in row]
    resolved = [resolve(spec_of(row)) for row in plain]
    made = pool.predict_all(resolved, folder)
    named = {
        row["name"]: told(asked, one, row.get("seconds", ()))
        for row, asked, one in zip(plain, resolved, made, strict=True)
    }
    others = [row for row in some if "mask" in row]
    named |= dict(zip([r["name"] for r in others], in_forks(masked, others), strict=True))
    return [named[row["name"]] for row in some]


# ---- the page ----


def memory_table(record: Mapping[str, Found]) -> Iterator[str]:
    yield _line(MEMORY)
    yield "|---|---|---|--:|--:|--:|--:|--:|--:|"
    for row in (r for r in rows() if {"reserved", "between"} & set(r)):
        first, got = (row["name"], row["source"], row["settings"]), record[row["name"]]
        if "why" in got:
            yield _line((*first, *_pair(row.get("reserved"), None), *_pair(row.get("between"), None)))
            continue
        pairs = (_pair(row.get(key), got[key]) for key in ("reserved", "between"))
        yield _line((*first, *(cell for pair in pairs for cell in pair)))


def _pair(known: float | None, got: float | None) -> tuple[str, str, str]:
    """Measured, predicted, error."""
    error = f"{100 * (got / known - 1):+.1f} %" if known and got else ""
    return f"{known:.3f}" if known else "-", f"{got:.3f}" if got else "not predicted", error


def time_table(record: Mapping[str, Found]) -> Iterator[str]:
    yield _line(TIME)
    yield "|---|---|--:|--:|--:|--:|---|"
    for name, card, known, (got, spread) in timed(record):
        numbers = [f"{known:.3f}", f"{got:.3f}", f"{spread:.3f}", f"{100 * (got / known - 1):+.0f} %"]
        yield _line((name, card, *numbers, "yes" if covered(known, got, spread) else "no"))


def timed(record: Mapping[str, Found]) -> Iterator[tuple[str, str, float, list[float]]]:
    """(row, card, measured seconds, [predicted, plus or minus]) of every row with a time."""
    for row in rows():
        for card, known in row.get("seconds", {}).items():
            if "why" not in record[row["name"]]:
                yield row["name"], card, known, record[row["name"]]["seconds"][card]


def covered(known: float, got: float, spread: float) -> bool:
    """Whether what was measured lies in the stated uncertainty."""
    return abs(known - got) <= spread


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def written(page: str, record: Mapping[str, Found]) -> str:
    """The page with both tables anew."""
    for made in (list(memory_table(record)), list(time_table(record))):
        before, head, rest = page.partition(made[0] + "\n")
        assert head, f"{PAGE.name} has no table {made[0]}"
        after = rest.splitlines(keepends=True)
        while after and after[0].startswith("|"):
            del after[0]
        page = before + "\n".join(made) + "\n" + "".join(after)
    return page


def main(numbers: Sequence[int]) -> None:
    """Predict the rows of these numbers, of all where there is none; write record and page."""
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    some = [row for n, row in enumerate(rows(), 1) if not numbers or n in numbers]
    found = predicted(some, pool.default_folder())
    record |= {row["name"]: got for row, got in zip(some, found, strict=True)}
    ordered = {row["name"]: record[row["name"]] for row in rows() if row["name"] in record}
    write_json(RECORD, ordered)
    if len(ordered) == len(rows()):
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), ordered), encoding="utf-8")


def tested(out: Path) -> None:
    """Predict the rows with a test, from nothing that was kept."""
    with tempfile.TemporaryDirectory() as folder:
        out.write_text(json.dumps(predicted([r for r in rows() if r.get("test")], Path(folder))))


if __name__ == "__main__":
    words = sys.argv[1:]
    tested(Path(words[1])) if words[:1] == ["--test"] else main([int(word) for word in words])
