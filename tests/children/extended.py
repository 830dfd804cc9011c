"""Predictions from shallow models beside whole traces, and each first shallow model's own peak.

``python -m tests.children.extended CASES.json OUT.json``: CASES is a list of Spec's fields.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.children.peaks import in_forks  # isort: skip: it keeps GPUs and kernels away

from harness.planner.tracing import extend, simulate
from harness.planner.worker import predict
from harness.prediction import Prediction
from harness.resolve import resolve
from harness.spec import Spec


def plain(found: Prediction) -> dict[str, Any]:
    return dataclasses.asdict(found)


def made(fields: dict[str, Any]) -> list[Any]:
    """The prediction, and the peak of the shallow model that it begins with."""
    with mock.patch.object(extend, "joined", wraps=extend.joined) as joined:
        found = predict(resolve(Spec(**fields)), "flash")
    _, pieces = joined.call_args.args
    return [plain(found), pieces[0]["prediction"]["allocated"]]


def whole(fields: dict[str, Any]) -> dict[str, Any]:
    return plain(simulate.simulate(resolve(Spec(**fields)), "flash"))


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:])
    asked = json.loads(cases.read_text())
    each = zip(*(in_forks(function, asked) for function in (made, whole)), strict=True)
    rows = [{"extended": deep, "shallow": low, "whole": true} for (deep, low), true in each]
    out.write_text(json.dumps(rows))
