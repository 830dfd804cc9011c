"""A report of the files that can be used: one whose content breaks it is named and left out."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.predict.prediction import Prediction
from harness.report.data.grouping import build
from harness.report.data.rows import Report, SuiteHead
from harness.resolve import run_name
from harness.result import Result

__all__ = ["of_usable"]

Made = TypeVar("Made")
FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
MOST = 20
"""Files that are left out before the fault counts as the report's own."""


class Part(NamedTuple):
    """A file that a report is made of, as it was read."""

    name: str
    content: Any
    key: str = ""


def of_usable(
    results: Sequence[Result],
    skipped: Sequence[str],
    suite: SuiteHead,
    predictions: Mapping[str, Prediction],
    render: Callable[[Report], Made],
) -> Made:
    """Return what ``render`` makes of the report of all that can be used.

    Files pass the typed reader first (``harness.json_files.build``); this is for values of the
    right type that nothing can be derived from. Each that is left out has a line in
    ``Report.skipped``.

    Raises:
        Exception: what ``render`` raised, where no single file explains it.
    """
    parts, left_out = _parts(results, suite, predictions), list(skipped)

    def made(kept: Sequence[Part]) -> Made:
        found = [part.content for part in kept if isinstance(part.content, Result)]
        named = {part.key: part.content for part in kept if part.key and part.content}
        beside = {name: named.pop(name, None) for name in ("calibration", "forecast")}
        head = dataclasses.replace(suite, **beside)
        return render(build(found, left_out, head, named))

    def works(kept: Sequence[Part]) -> bool:
        try:
            made(kept)
        except FAULTS:
            return False
        return True

    for _ in range(MOST):
        try:
            return made(parts)
        except FAULTS as error:
            culprit = _culprit(parts, works)
            if culprit is None:
                raise
            parts.remove(culprit)
            left_out.append(f"{culprit.name}: {_words(error)}")
    return made(parts)


def _parts(
    results: Sequence[Result], suite: SuiteHead, predictions: Mapping[str, Prediction]
) -> list[Part]:
    beside = [
        Part(f"{name}.json", getattr(suite, name), name) for name in ("calibration", "forecast")
    ]
    foretold = [Part(f"prediction.json of {key}", one, key) for key, one in predictions.items()]
    return [*beside, *foretold, *(Part(f"runs/{run_name(r.spec)}", r) for r in results)]


def _culprit(parts: Sequence[Part], works: Callable[[Sequence[Part]], bool]) -> Part | None:
    """Return the part without which the others work: found by halves if it breaks a report alone,
    and one after the other if it breaks one beside another part."""
    some = list(parts)
    while len(some) > 1:
        first, second = some[: len(some) // 2], some[len(some) // 2 :]
        if not works(first):
            some = first
        elif not works(second):
            some = second
        else:
            rests = ([other for other in parts if other is not part] for part in some)
            return next((p for p, rest in zip(some, rests, strict=True) if works(rest)), None)
    return some[0]


def _words(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}, line {last.lineno}"
    return f"{type(error).__name__}: {error} ({where})"
