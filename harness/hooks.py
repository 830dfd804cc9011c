"""Functions of the planner that other packages call by name, so that imports point one way.

The planner reads results and reports; they know it by this table alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

PLANNER = {
    "run_arguments": "harness.planner.hooks:add_run_arguments",
    "after_run": "harness.planner.hooks:after_run",
    "calibration_words": "harness.planner.hooks:calibration_words",
    "under_ceilings": "harness.planner.hooks:under_ceilings",
    "read_calibration": "harness.planner.comparison:read_calibration",
    "compare_with_predictions": "harness.planner.comparison:compare_with_predictions",
}
"""Name -> "module:function"."""


def load(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def planner(name: str) -> Callable[..., Any]:
    return load(PLANNER[name])
