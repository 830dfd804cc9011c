"""Traces in a process of their own, for process groups and patches are global to one.

``python -m tests.children.traced KIND CASE.json OUT.json``: KIND is a function below, a case Spec's
fields.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

from torch.overrides import BaseTorchFunctionMode

from harness.memory.record import CATEGORIES, measured, peak
from harness.memory.tracer import Tracer
from harness.planner.tracing import extend, simulate, trace
from harness.planner.tracing.simulate import trace_training
from harness.planner.tracing.world import GPU
from harness.planner.worker import predict
from harness.resolve import resolve
from harness.spec import Spec
from strategies.engine import TrainingRun
from strategies.engines.zero import facts
from strategies.evidence.readings import stored


def predicted(fields: dict[str, Any]) -> dict[str, Any]:
    """A prediction. ``shortcuts: false`` takes the long way through large worlds; with
    ``remembered: false`` torch answers every operation, and each is followed."""
    mode = simulate.Shortcuts if fields.pop("shortcuts", True) else BaseTorchFunctionMode
    remembered = fields.pop("remembered", True)
    kept = simulate.OpCache if remembered else lambda fake: None
    passed = trace.makes_view if remembered else lambda func: False
    with (
        mock.patch.object(simulate, "Shortcuts", mode),
        mock.patch.object(simulate, "OpCache", kept),
        mock.patch.object(trace, "makes_view", passed),
    ):
        return dataclasses.asdict(predict(resolve(Spec(**fields))))


def extended(fields: dict[str, Any]) -> dict[str, Any]:
    """A prediction from shallow models, and the peak of the first of these."""
    with mock.patch.object(extend, "joined", wraps=extend.joined) as joined:
        found = predict(resolve(Spec(**fields)), "flash")
    _, pieces = joined.call_args.args
    return dataclasses.asdict(found) | {"shallow": pieces[0]["prediction"]["allocated"]}


def whole(fields: dict[str, Any]) -> dict[str, Any]:
    """A prediction from all blocks."""
    return dataclasses.asdict(simulate.simulate(resolve(Spec(**fields)), "flash"))


# ---- where an engine says that it keeps its tensors ----

hosted = facts.hosted


def weights_too(run: TrainingRun) -> Iterator[Any]:
    """Says of weights that are on the device that they are in host memory."""
    yield from hosted(run)
    yield from (p.data for p in run.module.parameters())


WORDS = {"engine": hosted, "weights too": weights_too, "nothing": lambda run: iter(())}
"""Who says what is in host memory -> how."""


def misplaced(run: TrainingRun) -> tuple[int, list[str]]:
    """How many tensors are said to be in host memory, and which are elsewhere than was said."""
    inventory, attached = run.engine.held(run), run.attached.values()
    host = [*inventory.host, *(t for a in attached for t in a.hosted())]
    every = [t for some in inventory.tensors.values() for t in some]
    every += [t for a in attached for t in a.tensors()]
    host, every = ([p for t in some for p in stored(t) if p.nbytes] for some in (host, every))
    storages = {plain.untyped_storage()._cdata for plain in host}
    wrong = [f"host: {list(t.shape)}" for t in host if t.device.type != "cpu"]
    rest = [t for t in every if t.untyped_storage()._cdata not in storages]
    # A count of steps, a number as a tensor, is on the CPU wherever its moments are.
    on_cpu = [t for t in rest if t.device.type != GPU and t.numel() > 1]
    return len(host), wrong + [f"device: {list(t.shape)}" for t in on_cpu]


def placed(fields: dict[str, Any]) -> dict[str, Any]:
    """Bytes of each category at the peak of a step, by place; and ``misplaced`` by the engine's
    word, and with its word broken in each of two ways. For GPUs tensors have devices here, as they
    have not on a CPU."""
    resolved, found, know = resolve(Spec(**fields)), {}, Tracer.know

    def look(tracer: Tracer, run: TrainingRun) -> None:
        know(tracer, run)
        for name, words in WORDS.items():
            with mock.patch.object(facts, "hosted", words):
                found[name] = misplaced(run)

    # Bytes of tensors are compared, not the blocks in which a GPU's host memory is pinned.
    blocks = mock.patch.object(trace, "pinned_block", lambda size: size)
    with mock.patch.object(Tracer, "know", look), blocks:
        tracer, _, first = trace_training(resolved)
    for pool in ("device", "host"):
        instant = peak(tracer.record, pool, first)
        sums = instant.categories or dict.fromkeys(CATEGORIES, 0)
        found[pool] = measured(sums, resolved.launch.engine.buckets) | {"total": instant.bytes}
    return found


if __name__ == "__main__":
    kind, case, out = sys.argv[1:]
    Path(out).write_text(json.dumps(globals()[kind](json.loads(Path(case).read_text()))))
