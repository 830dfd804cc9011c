"""Training state, saved and resumed through accelerate for every engine.

accelerate writes the engine's part (ZeRO's shards included); beside it each rank writes what
strategies keep (the weight average), which accelerate would save from rank 0 alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from harness.launch.checkpoints import DONE, check_same, fault, finished, newest_whole, sizes
from harness.result import write_json
from strategies.engine import Trained

__all__ = ["latest", "restore", "save"]


def save(trained: Trained, folder: Path, facts: dict[str, Any], keep: int = 2) -> Path:
    """Write ``folder/step-N``; it counts only once its ``headroom.json`` is there.

    The newest ``keep`` checkpoints stay; older ones go after the new one is whole.
    """
    accelerator = trained.accelerator
    path = folder / f"step-{trained.optimizer_steps:08d}"
    if accelerator.is_main_process:
        (path / DONE).unlink(missing_ok=True)  # one that was damaged is written anew
    accelerator.wait_for_everyone()
    accelerator.save_state(str(path))
    state = {name: a.state_dict() for name, a in trained.attached.items()}
    torch.save(state, path / f"attached-{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # Counted here: a spec's processes, which ``facts`` may have, are another number in a
        # simulated world.
        counts = {"step": trained.optimizer_steps, "processes": accelerator.num_processes}
        write_json(path / DONE, facts | counts | {"files": sizes(path)})
        whole = [step for step in finished(folder) if not fault(step)]
        for old in whole[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return path


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, or None."""
    return newest_whole(folder)[0]


def restore(trained: Trained, path: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Load ``path`` into the prepared objects; the facts that were saved with it.

    Args:
        wanted: facts that must be as they were saved.

    Raises:
        Mismatch: saved with other facts (recipe, processes, model, ...): names the first.
    """
    accelerator = trained.accelerator
    facts = check_same(path, wanted | {"processes": accelerator.num_processes})
    accelerator.load_state(str(path))
    name = f"attached-{accelerator.process_index}.pt"
    state = torch.load(path / name, map_location="cpu", weights_only=True)
    for key, attachment in trained.attached.items():
        attachment.load_state_dict(state[key])
    trained.optimizer_steps = trained.resumed_steps = int(facts["step"])
    return facts
