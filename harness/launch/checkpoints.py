"""The files of a training's checkpoints: which are whole, and of what training. No torch: the
process that launches refuses what could not go on before anything starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.resolve import Resolved
from harness.spec import Spec
from strategies.base import BadInput

__all__ = [
    "DONE",
    "Mismatch",
    "check_same",
    "facts_of",
    "fault",
    "finished",
    "newest_whole",
    "sizes",
    "terms",
]

DONE = "headroom.json"
"""Written last: a folder without it is half a checkpoint. It has the sizes of all other files."""
FREE = ("steps", "warmup", "repeat", "device", "recipe")
"""Fields of a spec that may change when a training goes on; the recipe is compared as it reads."""


class Mismatch(BadInput):
    """A checkpoint of another training than the one that is to go on."""


def terms(resolved: Resolved) -> dict[str, Any]:
    """What must be the same when the training goes on; how long it is, and where, may differ."""
    fields = resolved.spec.told
    free = (*FREE, "processes") if resolved.launch.engine.resumes_on_any else FREE
    return {"recipe": str(resolved.recipe), **{k: v for k, v in fields.items() if k not in free}}


def sizes(path: Path) -> dict[str, int]:
    """Bytes of every file of the checkpoint at ``path`` but ``DONE``, by name within it."""
    files = (p for p in sorted(path.rglob("*")) if p.is_file() and p.name != DONE)
    return {str(p.relative_to(path)): p.stat().st_size for p in files}


def finished(folder: Path) -> list[Path]:
    """The checkpoints in ``folder`` that were written to their end, the newest last."""
    return sorted(path.parent for path in folder.glob(f"step-[0-9]*[0-9]/{DONE}"))


def facts_of(path: Path) -> dict[str, Any]:
    """What was saved about a checkpoint.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        facts = json.loads((path / DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{DONE} is not readable ({error})") from None
    if not isinstance(facts, dict):
        raise ValueError(f"{DONE} has no facts")
    return facts


def fault(path: Path) -> str:
    """Why the checkpoint at ``path`` is not whole; empty where it is, as far as sizes show. Those
    of older versions have none to compare."""
    try:
        wanted = facts_of(path).get("files", {})
    except ValueError as error:
        return str(error)
    found = sizes(path)
    for name, size in wanted.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]} of {size} bytes"
    return ""


def newest_whole(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a line for each newer one that is not."""
    skipped = []
    for path in reversed(finished(folder)):
        why = fault(path)
        if not why:
            return path, skipped
        skipped.append(f"{path.name} is not whole: {why}")
    return None, skipped


def check_same(path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the checkpoint at ``path``, if it was saved under the ``wanted`` terms.

    Raises:
        Mismatch: names the first that is another.
    """
    facts = facts_of(path)
    usual = {f.name: f.default for f in dataclasses.fields(Spec)}
    for name, value in wanted.items():
        saved = facts.get(name, usual.get(name))  # a field that is younger than the checkpoint
        if saved != value:
            raise Mismatch(
                f"{path} was saved with {name} {saved}, not {value}; resume with the same, or "
                "start anew in another folder"
            )
    return facts
