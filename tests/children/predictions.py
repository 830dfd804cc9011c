"""Whole predictions: ``python -m tests.children.predictions CASES.json OUT.json``.

CASES: a list of Spec's fields, with ``shortcuts: false`` for the long way through large worlds,
``remembered: false`` for one where torch answers every operation, and each is followed.
OUT: what each prediction says, in the same order, but for the seconds that it took.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from tests.children.peaks import in_forks  # isort: skip: it keeps GPUs and kernels away

from torch.overrides import BaseTorchFunctionMode

from harness.planner.tracing import simulate, trace
from harness.planner.worker import predict
from harness.resolve import resolve
from harness.spec import Spec


def predicted(fields: dict[str, Any]) -> dict[str, Any]:
    """The prediction of one case."""
    mode = simulate.Shortcuts if fields.pop("shortcuts", True) else BaseTorchFunctionMode
    remembered = fields.pop("remembered", True)
    kept = simulate.OpCache if remembered else lambda fake: None
    passed = trace.makes_view if remembered else lambda func: False
    with (
        mock.patch.object(simulate, "Shortcuts", mode),
        mock.patch.object(simulate, "OpCache", kept),
        mock.patch.object(trace, "makes_view", passed),
    ):
        found = predict(resolve(Spec(**fields)))
    return dataclasses.asdict(found)


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(in_forks(predicted, json.loads(cases.read_text()))))
