"""Searches of a plan, and direct plans of what they found: ``python -m tests.children.searched D``.

D/asked.json: name of a search -> words of the plan that it belongs to. D/found.json: for each
the search's answer, and a plan of the size that fits and of the one that does not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}

import torch

from harness import cli
from harness.planner import edits, pool, worker


def plan(words: list[str], folder: Path, own: str) -> dict[str, Any]:
    """The one row of a plan whose predictions are kept in a folder of its ``own``, and what the
    command ``said``."""
    pool.default_folder = lambda: folder / own
    out = folder / "out.json"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main(["plan", *words, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    return {**row, "said": said.getvalue()}


def size_of(what: str, side: dict[str, Any]) -> list[str]:
    """Words of a plan that ask for one side of what was found; a batch is of two GPUs that
    accumulate two micro batches."""
    if what == "batch":
        return ["--global-batch", str(4 * side["micro_batch"])]
    return ["--resolution", side["resolution"], "--frames", str(side["frames"])]


def found(what: str, words: list[str], folder: Path) -> dict[str, Any]:
    """The search's answer, and the plans of its two sizes."""
    row = plan([*words, "--largest", what], folder, "searched")
    direct = []
    for side in (row["fits"], row["over"]):
        own = [*size_of(what, side), "--recipes", side["recipe"]]
        direct.append(plan([*words, *own], folder, "direct"))
    return {"searched": row, "direct": direct}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    pool._each = lambda rows, kinds, jobs, limit, _: worker.predict_each(rows, kinds, 1, limit)
    edits.seek = lambda *given: None
    asked = json.loads((folder / "asked.json").read_text())
    made = {what: found(what, words, folder) for what, words in asked.items()}
    (folder / "found.json").write_text(json.dumps(made))
