"""Training state, saved and resumed through accelerate for every engine.

accelerate writes the engine's part (ZeRO's shards included); beside it each rank writes what
strategies keep (the weight average), which accelerate would save from rank 0 alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from harness.result import write_json
from strategies.engine import Trained

__all__ = ["latest", "restore", "save"]

DONE = "headroom.json"


def save(trained: Trained, folder: Path, facts: dict[str, Any], keep: int = 2) -> Path:
    """Write ``folder/step-N``; it counts only once its ``headroom.json`` is there.

    The newest ``keep`` checkpoints stay; older ones go after the new one is whole.
    """
    accelerator = trained.accelerator
    path = folder / f"step-{trained.optimizer_steps:08d}"
    accelerator.save_state(str(path))
    state = {name: a.state_dict() for name, a in trained.attached.items()}
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
    for name, value in (wanted | {"processes": accelerator.num_processes}).items():
        if facts.get(name) != value:
            raise ValueError(
                f"{path} was saved with {name} {facts.get(name)}, not {value}; resume with the "
                "same, or start anew in another folder"
            )
    accelerator.load_state(str(path))
    name = f"attached-{accelerator.process_index}.pt"
    state = torch.load(path / name, map_location="cpu", weights_only=True)
    for key, attachment in trained.attached.items():
        attachment.load_state_dict(state[key])
    trained.optimizer_steps = trained.resumed_steps = int(facts["step"])
    return facts


def _finished(folder: Path) -> list[Path]:
    return sorted(p.parent for p in folder.glob(f"step-*/{DONE}"))
