"""Predict public rows anew, each in a fork: patches and process groups are global to a process."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from docs.make import as_it_was
from docs.make.public_rows import FILE, rows
from harness.planner.speed.roofline import issued
from harness.planner.tracing.forks import in_forks
from harness.planner.uncertainty import class_of
from harness.planner.verdict import judge
from harness.planner.worker import predict
from harness.prediction import Prediction
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.system import cards

UNTOLD = frozenset({"attention", "int8"})
"""Keys of rows whose trainer's model differs from that of diffusers; their prediction is kept."""


def spec_of(row: dict[str, Any]) -> Spec:
    """Return the run that repeats a row: on one GPU, clipped at 1, without a weight average."""
    usual = {"data": "synthetic", "objective": "flow", "global_batch": 1, "device": "cuda"}
    return Spec(**usual | {"ema": 0.0, "grad_clip": 1.0} | row["run"])


def figures(resolved: Resolved, found: Prediction, row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that the file keeps: GiB, and seconds by card."""
    beside = row.get("beside", 0.0)
    kinds = ("reserved", "allocated", "between")
    sizes = {name: round(getattr(found, name) / 2**30 + beside, 4) for name in kinds}
    seconds = {}
    for name in row.get("seconds", ()):
        one = judge(resolved, found, cards.find(name)).seconds
        seconds[name] = [round(value, 4) for value in (one.total, one.low, one.high)]
    kind = class_of(resolved.launch.traits, found)
    return {**sizes, "class": kind, "operations": issued(found.work), "seconds": seconds}


def predicted(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one row, or ``why`` there are none."""
    with as_it_was.patches(row):
        resolved = resolve(spec_of(row))
        if why := resolved.recipe.refusal(resolved.launch):
            return {"why": why}
        found = predict(resolved)
        if found.method != "trace":
            return {"why": f"{found.reason} {found.fault}"}
        return figures(resolved, found, row)


def anew(some: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what ``predicted`` gives for each of these rows."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    functions = [functools.partial(predicted, row) for row in some]
    return [one.made for one in in_forks(functions, jobs=1, limit=3600.0)]


def predict_rows(numbers: Sequence[int]) -> None:
    """Predict the rows of these numbers, or all, and replace their predictions in the file."""
    chosen = (row for n, row in enumerate(rows(), 1) if not numbers or n in numbers)
    some = [row for row in chosen if not UNTOLD & row.keys()]
    for row, got in zip(some, anew(some), strict=True):
        if "why" in got:
            print(f"{row['name']}: not predicted: {got['why']}")
            continue
        start = rf"(^- name: {re.escape(row['name'])}\n(?:  .*\n)*?)  predicted: .*\n"
        text, line = FILE.read_text("utf-8"), f"  predicted: {json.dumps(got)}\n"
        found = re.sub(start, lambda m, line=line: m[1] + line, text, count=1, flags=re.M)
        FILE.write_text(found, "utf-8")
