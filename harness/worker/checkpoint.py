"""Training state, saved and resumed through accelerate for every engine.

accelerate writes the engine's part (ZeRO's shards included); beside it each rank writes what
strategies keep (the weight average), which accelerate would save from rank 0 alone, and where its
pieces lie in the parameters. An engine whose own part can be cut anew (``Engine.resumes_on_any``)
is resumed on another number of processes too: what strategies keep is then put together from the
files of all ranks (``Attachment.recut``).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from harness.result import write_json
from strategies.engine import Fragment, Trained

__all__ = ["latest", "restore", "save"]

DONE = "headroom.json"
PIECES = "fragments of the parameters"


def save(trained: Trained, folder: Path, facts: dict[str, Any], keep: int = 2) -> Path:
    """Write ``folder/step-N``; it counts only once its ``headroom.json`` is there.

    The newest ``keep`` checkpoints stay; older ones go after the new one is whole.
    """
    accelerator = trained.accelerator
    path = folder / f"step-{trained.optimizer_steps:08d}"
    accelerator.save_state(str(path))
    state: dict[str, Any] = {name: a.state_dict() for name, a in trained.attached.items()}
    if trained.engine.resumes_on_any:
        state[PIECES] = [tuple(piece) for piece in trained.engine.fragments(trained)]
    torch.save(state, path / f"attached-{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # Counted here: a spec's processes, which ``facts`` may have, are another number in a
        # simulated world.
        counts = {"step": trained.optimizer_steps, "processes": accelerator.num_processes}
        write_json(path / DONE, facts | counts)
        for old in _finished(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return path


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, or None."""
    whole = _finished(folder)
    return whole[-1] if whole else None


def restore(trained: Trained, path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Load ``path`` into the prepared objects; the facts that were saved with it.

    Args:
        wanted: facts that must be as they were saved.

    Raises:
        ValueError: saved with other facts (recipe, processes, model, ...): names the first.
    """
    facts = json.loads((path / DONE).read_text(encoding="utf-8"))
    accelerator = trained.accelerator
    anew = trained.engine.resumes_on_any and facts["processes"] != accelerator.num_processes
    for name, value in (wanted | {"processes": accelerator.num_processes}).items():
        if facts.get(name) != value and not (anew and name == "processes"):
            raise ValueError(
                f"{path} was saved with {name} {facts.get(name)}, not {value}; resume with the "
                "same, or start anew in another folder"
            )
    accelerator.load_state(str(path))
    if anew:
        _recut(trained, path, int(facts["processes"]))
    else:
        state = _attached(path, accelerator.process_index)
        for key, attachment in trained.attached.items():
            attachment.load_state_dict(state[key])
    trained.optimizer_steps = trained.resumed_steps = int(facts["step"])
    return facts


def _attached(path: Path, rank: int) -> dict[str, Any]:
    return torch.load(path / f"attached-{rank}.pt", map_location="cpu", weights_only=True)


def _recut(trained: Trained, path: Path, ranks: int) -> None:
    """What strategies kept on ``ranks`` ranks, given to as many as there are now."""
    saved = [_attached(path, rank) for rank in range(ranks)]
    pieces = [[Fragment(*piece) for piece in state[PIECES]] for state in saved]
    for key, attachment in trained.attached.items():
        attachment.recut([state[key] for state in saved], pieces)


def _finished(folder: Path) -> list[Path]:
    return sorted(p.parent for p in folder.glob(f"step-*/{DONE}"))
