"""Where an engine says that it keeps its tensors, against the devices that they would be on.

``python -m tests.children.placed CASES.json OUT.json``: each case in a fork, as a prediction. For
GPUs tensors have devices there, as they have not on a CPU. CASES: Spec's fields. OUT: for each case
the bytes of each category at the peak of a step, by place, and, for a GPU, how many tensors were
said to be in host memory, and which are elsewhere than was said: by the engine, and with its word
broken in each of two ways.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tests.children.peaks import in_forks  # isort: skip: it keeps GPUs and kernels away

from harness.memory.record import CATEGORIES, measured, peak
from harness.memory.tracer import Tracer
from harness.planner.tracing import trace
from harness.planner.tracing.simulate import trace_training
from harness.planner.tracing.world import GPU
from harness.resolve import resolve
from harness.spec import Spec
from strategies.engine import TrainingRun
from strategies.engines.zero import facts
from strategies.evidence.readings import stored

hosted = facts.hosted


def weights_too(trained: TrainingRun) -> Iterator[Any]:
    """Says of weights that are on the device that they are in host memory."""
    yield from hosted(trained)
    yield from (p.data for p in trained.module.parameters())


WORDS = {"engine": hosted, "weights too": weights_too, "nothing": lambda trained: iter(())}
"""Who says what is in host memory -> how."""


def told(trained: TrainingRun) -> tuple[list[Any], list[Any]]:
    """Tensors with bytes that are said to be in host memory, and all others that are held."""
    inventory, attached = trained.engine.held(trained), trained.attached.values()
    host = [*inventory.host, *(t for a in attached for t in a.hosted())]
    every = [t for some in inventory.tensors.values() for t in some]
    every += [t for a in attached for t in a.tensors()]
    host, every = ([p for t in some for p in stored(t) if p.nbytes] for some in (host, every))
    storages = {plain.untyped_storage()._cdata for plain in host}
    return host, [t for t in every if t.untyped_storage()._cdata not in storages]


def misplaced(trained: TrainingRun) -> tuple[int, list[str]]:
    """How many tensors are said to be in host memory, and which are elsewhere than was said."""
    host, rest = told(trained)
    wrong = [f"host: {list(t.shape)}" for t in host if t.device.type != "cpu"]
    # A count of steps, a number as a tensor, is on the CPU wherever its moments are.
    on_cpu = [t for t in rest if t.device.type != GPU and t.numel() > 1]
    return len(host), wrong + [f"device: {list(t.shape)}" for t in on_cpu]


def checked(case: dict[str, Any]) -> dict[str, Any]:
    """One case: what lived where at the peak of a step, and what was in the wrong place then."""
    resolved, found, know = resolve(Spec(**case)), {}, Tracer.know

    def look(tracer: Tracer, trained: TrainingRun) -> None:
        know(tracer, trained)
        for name, words in WORDS.items():
            with mock.patch.object(facts, "hosted", words):
                found[name] = misplaced(trained)

    # Bytes of tensors are compared, not the blocks in which a GPU's host memory is pinned.
    blocks = mock.patch.object(trace, "pinned_block", lambda size: size)
    with mock.patch.object(Tracer, "know", look), blocks:
        tracer, _, first = trace_training(resolved)
    buckets = resolved.launch.engine.buckets
    for pool in ("device", "host"):
        instant = peak(tracer.record, pool, first)
        found[pool] = measured(instant.categories or dict.fromkeys(CATEGORIES, 0), buckets) | {
            "total": instant.bytes
        }
    return found


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:])
    out.write_text(json.dumps(in_forks(checked, json.loads(cases.read_text()))))
