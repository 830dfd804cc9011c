"""``plan --largest``: the inverse of a plan, of each recipe that has such a size."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from rich.console import Console

from harness.commands.console import OK
from harness.commands.planning.plan.asked import Asked
from harness.commands.planning.plan.asking import Asking
from harness.commands.planning.plan.largest_table import print_largest
from harness.json_files import write_json
from harness.predict import inverses, verdict
from harness.predict.search import Largest
from harness.predict.verdict import Fit

__all__ = ["largest_as_json", "plan_largest", "side_as_json"]


def plan_largest(options: argparse.Namespace, asking: Asking, console: Console) -> int:
    """Seek, print each recipe's answer; the exit code.

    Raises:
        BadInput: no recipe has such a size.
    """
    what, asked = options.largest, _able(options.largest, asking.asked)
    answers = asking.largest(what, asked.resolved)
    print_largest(answers, what, asked, console)
    if options.json:
        write_json(options.json, largest_as_json(answers, asked))
    return OK


def _able(what: str, asked: Asked) -> Asked:
    """Of the rows those whose largest ``what`` can be sought; the others are refused, with why."""
    inverses.refuse(what, asked.resolved)
    reasons = [(row, inverses.unable(what, row)) for row in asked.resolved]
    refused = [(str(row.recipe), why) for row, why in reasons if why]
    rows = [row for row, why in reasons if not why]
    return dataclasses.replace(asked, resolved=rows, refused=[*asked.refused, *refused])


def largest_as_json(answers: Sequence[Largest], asked: Asked) -> dict[str, object]:
    """Each recipe's bracket: the size that fits and the one that does not, in bytes of a GPU."""
    rows = [
        {**vars(a), "fits": side_as_json(a.fits), "over": side_as_json(a.over)} for a in answers
    ]
    refused = [{"recipe": name, "reason": reason} for name, reason in asked.refused]
    given = {"gpu": dataclasses.asdict(asked.gpu), "assumed": verdict.assumed(asked.gpu)}
    return {**given, "rows": rows, "refused": refused}


def side_as_json(fit: Fit | None) -> dict[str, object] | None:
    """One end of a bracket."""
    if fit is None:
        return None
    spec, sizes = fit.resolved.spec, ("model", "resolution", "frames", "data")
    return {
        **{name: getattr(spec, name) for name in sizes},
        "recipe": spec.recipe,
        "micro_batch": fit.resolved.micro_batch,
        "verdict": fit.verdict,
        "need_bytes": fit.need_bytes,
        "need_high_bytes": fit.most_bytes,
        "method": fit.prediction.method,
    }
