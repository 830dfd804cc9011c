"""Predictions from shallow models beside whole traces; of the first, the shallow model's own peak.

``python -m tests.children.extended CASES.json OUT.json``: CASES is a list of Spec's fields.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from tests.children.peaks import in_forks  # isort: skip: it keeps GPUs and kernels away

from harness.planner.tracing import extend, simulate
from harness.prediction import Prediction
from harness.resolve import resolve
from harness.spec import Spec


def plain(found: Prediction) -> dict[str, Any]:
    return dataclasses.asdict(found)


def made(fields: dict[str, Any]) -> dict[str, Any]:
    return plain(extend.extended(resolve(Spec(**fields)), "flash"))


def whole(fields: dict[str, Any]) -> dict[str, Any]:
    return plain(simulate.simulate(resolve(Spec(**fields)), "flash"))


def shallow(fields: dict[str, Any]) -> int:
    resolved = resolve(Spec(**fields))
    subject = resolved.subject.deep(extend.shallow(resolved)[0][0])
    launch = dataclasses.replace(resolved.launch, subject=subject)
    return simulate.simulate(
        dataclasses.replace(resolved, subject=subject, launch=launch)
    ).allocated


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:])
    asked = json.loads(cases.read_text())
    each = zip(*(in_forks(function, asked) for function in (made, whole)), strict=True)
    rows = [dict(zip(("extended", "whole"), row, strict=True)) for row in each]
    rows[0] |= {"shallow": in_forks(shallow, asked[:1])[0]}
    out.write_text(json.dumps(rows))
