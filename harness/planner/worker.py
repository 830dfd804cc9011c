"""Predictions in a process of their own: ``python -m harness.planner.worker ASKED TOLD``.

Both are descriptors. Each line of ASKED names a request, a file: specs, each with the file that its
prediction goes to and its kind of card, how many run at a time and how long each may take. The
process group, the accelerator and the patches of a prediction are global to a process, so each
trace has a fork; what they share is loaded once. TOLD is told the index of each prediction when it
is written, and when all of a request are. Whatever fails becomes a prediction that says so.
"""

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
from pathlib import Path
from typing import Any

from harness.planner import overhead
from harness.planner.overhead import USUAL
from harness.planner.pool import DONE
from harness.planner.prediction import Prediction, none, read
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.system.process import die_with_parent
from strategies.base import BadInput
from strategies.strategy import Strategy

COMPILED = "compiled graphs keep other tensors than eager ones"
CAPTURED = "captured graphs hold the memory of their calls, each size of them, for good"


def predict(resolved: Resolved, kind: str = USUAL) -> Prediction:
    """A prediction for a card of that ``kind`` by trace; where that fails, why."""
    if "compiled" in resolved.launch.traits:
        # The compiler decides anew what is kept for backward and what is fused away.
        return none(resolved, COMPILED)
    if "captured" in resolved.launch.traits:
        return none(resolved, CAPTURED)
    try:
        from harness.planner.tracing import extend, simulate

        if extend.shallow(resolved):
            return with_asides(resolved, kind, extend.extended(resolved, kind))
        return with_asides(resolved, kind, simulate.simulate(resolved, kind))
    except Exception as error:  # any library may stumble over tensors without storage
        traceback.print_exc()
        return none(resolved, **_told(resolved.recipe.strategies, error))


def with_asides(row: Resolved, kind: str, found: Prediction) -> Prediction:
    """``found`` with the encoders and the VAE of the phases that the row asks for, once."""
    if not row.spec.phases or found.asides or found.method != "trace":
        return found
    from harness.planner.tracing import phases

    return dataclasses.replace(found, asides=phases.of(row, kind))


def _told(parts: Sequence[Strategy], error: Exception) -> dict[str, str]:
    """Why there is no trace, for a person: bad input and a trace given up say it; and what was
    raised, in a library's words."""
    known = isinstance(error, (BadInput, overhead.NoTrace))
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return {
        "reason": str(error) if known else overhead.why(parts, type(error).__name__),
        "fault": f"{type(error).__name__}: {first}"[:200],
    }


# ---- many ----


def predict_each(
    rows: Sequence[Resolved], kinds: Sequence[str], jobs: int, limit: float
) -> Iterator[tuple[int, Prediction]]:
    """(index, prediction) of each row, for a card of its kind, as it ends; ``jobs`` traces run at a
    time, each for at most ``limit`` seconds."""
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
            yield index, _whole_or_why(rows[index], kinds[index], made)


def _pieces(row: Resolved, kind: str) -> list[Callable[[], dict[str, Any]]]:
    """What is traced of one row, each in a fork."""
    from harness.planner.tracing import extend

    untraced = {"compiled", "captured"} & row.launch.traits
    shallow = [] if untraced else extend.pieces(row, kind)
    if shallow:
        return [functools.partial(_or_why, row, piece) for piece in shallow]
    return [functools.partial(_whole, one, kind) for one in _ranks(row)]


def _ranks(row: Resolved) -> list[Resolved]:
    """The row as each rank that is unlike the others."""
    engine = row.launch.engine
    as_ranks = (engine.standing_for(rank) for rank in engine.unlike(row.launch))
    launches = (dataclasses.replace(row.launch, engine=one) for one in as_ranks)
    return [dataclasses.replace(row, launch=launch) for launch in launches]


def _whole(row: Resolved, kind: str) -> dict[str, Any]:
    return {"prediction": dataclasses.asdict(predict(row, kind))}


def _whole_or_why(row: Resolved, kind: str, made: Prediction) -> Prediction:
    try:
        return with_asides(row, kind, made)
    except Exception as error:  # as in predict
        traceback.print_exc()
        return none(row, **_told((), error))


def _or_why(row: Resolved, piece: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return piece()
    except Exception as error:  # as in predict
        traceback.print_exc()
        told = _told(row.recipe.strategies, error)
        return {"why": told["reason"], "fault": told["fault"]}


def _joined(row: Resolved, ended: Sequence[Any]) -> Prediction:
    """One row's prediction from what its forks returned."""
    from harness.planner.tracing import extend

    made = [one.made for one in ended]
    lost = next((one for one in made if "why" in one), None)
    if lost:
        return none(row, lost["why"], lost.get("fault", ""))
    if "parts" in made[0]:
        found = extend.joined(row, made)
    else:
        found = _fullest(row, [read(one["prediction"]) for one in made])
    return dataclasses.replace(found, seconds_taken=sum(one.seconds for one in ended))


def _fullest(row: Resolved, each: Sequence[Prediction]) -> Prediction:
    """The prediction of the rank that holds the most in a step; of one that has none, why."""
    if len(each) == 1:
        return each[0]
    untraced = [one for one in each if one.steady is None]
    if untraced:
        return untraced[0]
    by_rank = dict(zip(row.launch.engine.unlike(row.launch), each, strict=True))
    rank, most = max(by_rank.items(), key=lambda item: item[1].steady.bytes)
    steady = {str(number): one.steady.bytes for number, one in by_rank.items()}
    return dataclasses.replace(most, rank=rank, steady_of_ranks=steady)


def main(argv: list[str]) -> int:
    """Read what is asked, predict, write each, tell of each; until nothing more is asked."""
    die_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here may touch a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    asked, told = map(int, argv)
    with os.fdopen(asked) as requests, os.fdopen(told, "w", buffering=1) as tell:
        for line in requests:
            for index in _answered(json.loads(Path(line.strip()).read_text(encoding="utf-8"))):
                print(index, file=tell)
            print(DONE, file=tell)
    return 0


def _answered(asked: dict[str, Any]) -> Iterator[int]:
    """The index of each row of a request whose prediction is written."""
    rows = [resolve(_spec(fields)) for fields in asked["specs"]]
    import torch

    torch.set_num_threads(1)
    for index, found in predict_each(rows, asked["kinds"], asked["jobs"], asked["limit"]):
        found.write(Path(asked["out"][index]))
        yield index


def _spec(fields: dict[str, Any]) -> Spec:
    """A run of one rank for many is predicted as the rank that it stands for."""
    spec = Spec(**fields)
    return dataclasses.replace(spec, processes=spec.world, world=0) if spec.world else spec


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
