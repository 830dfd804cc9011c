"""Public rows (docs/public-rows.yaml): predictions of what others measured on their GPUs.

python -m docs.make.public_rows                  write the planner's ranges from the kept ones
python -m docs.make.public_rows predict [N ...]  predict rows (counted from 1) anew first
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from harness.planner import uncertainty
from harness.planner.uncertainty import Residual, Timed
from harness.system import cards

FILE = Path(__file__).parents[1] / "public-rows.yaml"
SAME = {"cogvideox-factory": "finetrainers", "huggingface/finetrainers": "finetrainers"}


def rows() -> list[dict[str, Any]]:
    return yaml.safe_load(FILE.read_text("utf-8"))


def figure(row: dict[str, Any]) -> str:
    """Return the peak that a row is compared by: what was reserved if its source states it."""
    return next((name for name in ("reserved", "allocated") if name in row), "")


def is_plain(row: dict[str, Any]) -> bool:
    """Return whether a row is the peak of a step of the very recipe (not near, not a whole run)."""
    return bool(figure(row)) and "near" not in row and row.get("figure") != "whole run"


def error(row: dict[str, Any]) -> float:
    """Return measured over predicted memory, less one; a corrected row keeps its first figure."""
    return round(row[figure(row)] / row.get("first", row["predicted"][figure(row)]) - 1, 4)


def source_of(row: dict[str, Any]) -> str:
    """Return the trainer or author of a row; repositories of one author are one (``SAME``)."""
    first = row["source"].split()[0].strip(",").removeprefix("github.com/")
    return SAME.get(first, first)


def residuals() -> list[Residual]:
    """Return the memory of all plain rows."""
    plain = [row for row in rows() if is_plain(row)]
    return [Residual(row["predicted"]["class"], source_of(row), error(row)) for row in plain]


def timed() -> list[Timed]:
    """Return the step times of all rows, by card."""
    gpus = json.loads(cards.TABLE.read_text("utf-8"))["gpus"]
    family, found = {card["name"]: card["family"] for card in gpus}, []
    for row in rows():
        for card, seconds in row.get("seconds", {}).items():
            predicted = row["predicted"]["seconds"][card][0]
            found.append(Timed(source_of(row), family[card], round(seconds / predicted, 4)))
    return found


def write() -> None:
    """Write the planner's ranges (``harness/planner/residuals.json``)."""
    lists = [
        f'"{name}": [\n' + ",\n".join(f" {json.dumps(one)}" for one in some) + "\n]"
        for name, some in (("memory", residuals()), ("time", timed()))
    ]
    uncertainty.FILE.write_text("{" + ",\n".join(lists) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["predict"]:
        from docs.make.predict_rows import predict_rows  # needs torch

        predict_rows([int(word) for word in sys.argv[2:]])
    write()
