"""One prediction in a process of its own: ``python -m harness.predict.worker SPEC OUT KIND``.

The process group, the accelerator and the patches of a prediction are global to a process, so
each recipe has one. Whatever fails becomes a prediction that says so.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from harness.predict import limits
from harness.predict.attention import USUAL
from harness.predict.prediction import Prediction, none
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.system.process import die_with_parent
from strategies.base import BadInput
from strategies.strategy import Strategy

__all__ = ["main", "predict"]


def predict(resolved: Resolved, kind: str = USUAL) -> Prediction:
    """A prediction for a card of that ``kind`` by trace; where that fails, why."""
    if "compiled" in resolved.launch.traits:
        # The compiler decides anew what is kept for backward and what is fused away.
        return none(resolved, "compiled graphs keep other tensors than eager ones")
    try:
        from harness.predict.tracing import extend, simulate

        if extend.shallow(resolved):
            return extend.extended(resolved, kind)
        return simulate.simulate(resolved, kind)
    except Exception as error:  # any library may stumble over tensors without storage
        traceback.print_exc()
        reason = _reason(resolved.recipe.strategies, error)
        return none(resolved, reason, _fault(error))


def _reason(parts: Sequence[Strategy], error: Exception) -> str:
    """Why there is no trace, for a person: bad input and a trace given up say it."""
    if isinstance(error, (BadInput, limits.NoTrace)):
        return str(error)
    return limits.why(parts, type(error).__name__)


def _fault(error: Exception) -> str:
    """What was raised, in a library's words."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


def main(argv: list[str]) -> int:
    """Read a spec, predict for a kind of card, write."""
    die_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here may touch a GPU
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    spec = Spec(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    if spec.world:  # a run of one rank for many: predicted as the rank that it stands for
        spec = dataclasses.replace(spec, processes=spec.world, world=0)
    import torch

    torch.set_num_threads(1)
    predict(resolve(spec), argv[2]).write(Path(argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
