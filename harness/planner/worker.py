"""Worker process that predicts: ``python -m harness.planner.worker ASKED TOLD``.
ASKED and TOLD are file descriptors, for requests and for finished rows. Each trace runs in a fork,
because its process group, accelerator and patches are global to a process. A failure becomes a
prediction with a reason."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.planner import eager, overhead
from harness.planner.adapters import adapter_of
from harness.planner.overhead import USUAL
from harness.prediction import Prediction, read
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.system.process import die_with_parent
from strategies.base import BadInput
from strategies.strategy import Strategy

FOREVER = 3600.0
"""Seconds that one trace may take without a given limit."""
DONE = "done\n"
"""Line that a worker writes after the rows of a request."""


def none(resolved: Resolved, reason: str, fault: str = "") -> Prediction:
    """Return a result without a prediction: ``reason`` is for a person, ``fault`` was raised or
    printed."""
    return Prediction(
        recipe=str(resolved.recipe),
        device=resolved.spec.device,
        method="none",
        reason=reason,
        fault=fault,
    )


def predict(resolved: Resolved, kind: str = USUAL, rank: int = 0) -> Prediction:
    """Return the traced prediction of ``rank`` for a card of that ``kind``, or the reason why there
    is none."""
    if (plain := eager.of(resolved)) is not resolved:
        return eager.told(resolved, predict(plain, kind, rank))
    if untraced := _untraced(resolved):
        return none(resolved, untraced)
    return _or_none(resolved, resolved.recipe.strategies, _traced, kind, rank)


def _traced(row: Resolved, kind: str, rank: int) -> Prediction:
    from harness.planner.tracing import extend, simulate

    if extend.shallow(row):
        ((_, found),) = predict_each([row], [kind], 1, FOREVER)
        return found
    return with_asides(row, kind, simulate.simulate(row, kind, rank))


def _untraced(resolved: Resolved) -> str:
    """Return why the kernels of a row are not traced; empty if they are."""
    own = next((one for one in resolved.recipe.strategies if "compiled" in one.traits()), None)
    return f"{own} has compiled kernels of its own, which are not traced" if own else ""


def with_asides(row: Resolved, kind: str, found: Prediction) -> Prediction:
    """Return ``found`` with the encoders and the VAE of the phases that the row counts."""
    if not row.spec.phases or found.asides or found.method != "trace":
        return found
    from harness.planner.tracing import phases

    return dataclasses.replace(found, asides=phases.of(row, kind))


def predict_each(
    rows: Sequence[Resolved],
    kinds: Sequence[str],
    jobs: int,
    limit: float,
    steps: Sequence[Prediction | None] = (),
) -> Iterator[tuple[int, Prediction]]:
    """Yield (index, prediction) of each row when it ends.
    ``jobs`` traces run at a time, each for at most ``limit`` seconds. ``steps``: for each row, the
    known prediction of the same training without phases, or None; its step is not traced again."""
    left = list(range(len(rows)))
    for index, step in enumerate(steps):
        if not step:
            continue
        from harness.planner.tracing import phases

        # None if the row must be traced
        if made := _or_none(rows[index], (), phases.beside_step, kinds[index], step):
            left.remove(index)
            yield index, made
    traced = _traced_each([rows[i] for i in left], [kinds[i] for i in left], jobs, limit)
    yield from ((left[place], made) for place, made in traced)


def _traced_each(
    rows: Sequence[Resolved], kinds: Sequence[str], jobs: int, limit: float
) -> Iterator[tuple[int, Prediction]]:
    """Yield (index, prediction) of each row when its trace ends."""
    from harness.planner.tracing import extend, forks

    pieces = [_pieces(row, kind) for row, kind in zip(rows, kinds, strict=True)]
    extend.load(rows)
    asked = [(i, part) for i, row in enumerate(pieces) for part in range(len(row))]
    found: list[dict[int, forks.Ended]] = [{} for _ in rows]
    for ended in forks.in_forks([pieces[i][part] for i, part in asked], jobs, limit):
        index, part = asked[ended.index]
        found[index][part] = ended
        if len(found[index]) == len(pieces[index]):
            made = _joined(rows[index], [found[index][n] for n in sorted(found[index])])
            yield index, _or_none(rows[index], (), with_asides, kinds[index], made)


def _pieces(row: Resolved, kind: str) -> list[Callable[[], dict[str, Any]]]:
    """Return the functions that trace one row, each for a fork of its own."""
    from harness.planner.tracing import extend

    def part(piece: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = _or_none(row, row.recipe.strategies, lambda _: piece())
        return found if isinstance(found, dict) else {"why": found.reason, "fault": found.fault}

    def whole(rank: int) -> dict[str, Any]:
        return {"prediction": dataclasses.asdict(predict(row, kind, rank))}

    shallow = [] if _untraced(row) else extend.pieces(row, kind)
    parts = [functools.partial(part, piece) for piece in shallow]
    return parts or [functools.partial(whole, rank) for rank in _ranks(row)]


def _ranks(row: Resolved) -> Sequence[int]:
    return adapter_of(row.launch.engine).distinct_ranks(row.launch)


def _or_none(row: Resolved, parts: Sequence[Strategy], act: Callable[..., Any], *given: Any) -> Any:
    """Return what ``act`` returns, or why the row has no prediction, and the exception.
    Bad input and ``NoTrace`` have messages of their own; other errors get the known limits of
    ``parts``."""
    try:
        return act(row, *given)
    except Exception as error:  # any library may stumble over tensors without storage
        traceback.print_exc()
        known = isinstance(error, (BadInput, overhead.NoTrace))
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        why = str(error) if known else overhead.why(parts, type(error).__name__)
        return none(row, why, f"{type(error).__name__}: {first}"[:200])


def _joined(row: Resolved, ended: Sequence[Any]) -> Prediction:
    """Return one row's prediction from the results of its forks."""
    from harness.planner.tracing import extend

    made = [one.made for one in ended]
    lost = next((one for one in made if "why" in one), None)
    if lost:
        return none(row, lost["why"], lost.get("fault", ""))
    if "parts" in made[0]:
        return extend.joined(row, made)
    return _fullest(row, [read(one["prediction"]) for one in made])


def _fullest(row: Resolved, each: Sequence[Prediction]) -> Prediction:
    """Return the prediction of the rank with the highest peak in a step, or one that has no
    trace."""
    if len(each) == 1:
        return each[0]
    untraced = [one for one in each if one.steady is None]
    if untraced:
        return untraced[0]
    by_rank = dict(zip(_ranks(row), each, strict=True))
    rank, most = max(by_rank.items(), key=lambda item: item[1].steady.bytes)
    steady = {str(number): one.steady.bytes for number, one in by_rank.items()}
    return dataclasses.replace(most, rank=rank, steady_of_ranks=steady)


def main(argv: list[str]) -> int:
    """Read requests, predict, and write each prediction, until the requests end.
    Each line of ASKED is a request: specs, their kinds of card, known steps, the parallel jobs and
    the time limit. TOLD gets the index and the prediction of each row, and ``DONE`` after the
    last."""
    die_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here may touch a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with os.fdopen(int(argv[0])) as requests, os.fdopen(int(argv[1]), "w", buffering=1) as tell:
        for line in requests:
            asked = json.loads(line)
            rows = [resolve(Spec(**fields)) for fields in asked["specs"]]
            import torch

            torch.set_num_threads(1)
            steps = [read(step) if step else None for step in asked["steps"]]
            given = asked["kinds"], asked["jobs"], asked["limit"], steps
            for index, found in predict_each(rows, *given):
                print(json.dumps([index, dataclasses.asdict(found)]), file=tell)
            print(DONE, end="", file=tell)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
