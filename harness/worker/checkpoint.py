"""Training state, saved and resumed through accelerate for every engine.

accelerate writes the engine's part (ZeRO's shards included); beside it each rank writes what
strategies keep (the weight average), which accelerate would save from rank 0 alone, and where its
pieces lie in the parameters. An engine whose own part can be cut anew (``Engine.resumes_on_any``)
is resumed on another number of processes too: what strategies keep is then put together from the
files of all ranks (``Attachment.recut``).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from harness.json_files import write_json
from harness.launch.checkpoints import (
    DONE,
    check_own,
    check_same,
    facts_of,
    fault,
    finished,
    newest_whole,
    proof,
    sizes,
)
from strategies.engine import Trained
from strategies.holdings import Fragment

__all__ = ["latest", "restore", "save"]

PIECES = "fragments of the parameters"


def save(trained: Trained, folder: Path, facts: dict[str, Any], keep: int = 2) -> Path:
    """Write ``folder/step-N``; it counts only once its ``headroom.json`` is there.

    The newest ``keep`` checkpoints stay; older ones go after the new one is whole.
    """
    accelerator = trained.accelerator
    path = folder / f"step-{trained.optimizer_steps:08d}"
    if accelerator.is_main_process:
        (path / DONE).unlink(missing_ok=True)  # one that was damaged is written anew
    accelerator.wait_for_everyone()
    trained.engine.save(trained, path)
    state: dict[str, Any] = {name: a.state_dict() for name, a in trained.attached.items()}
    if trained.engine.resumes_on_any:
        state[PIECES] = [tuple(piece) for piece in trained.engine.fragments(trained)]
    torch.save(state, path / f"attached-{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        # Counted here: a spec's processes, which ``facts`` may have, are another number in a
        # simulated world.
        counts = {"step": trained.optimizer_steps, "processes": accelerator.num_processes}
        write_json(path / DONE, facts | counts | {"files": sizes(path)} | proof(path))
        whole = [step for step in finished(folder) if not fault(step)]
        for old in whole[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return path


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, or None."""
    return newest_whole(folder)[0]


def restore(
    trained: Trained, path: Path, wanted: dict[str, Any], *, trust: bool = False
) -> dict[str, Any]:
    """Load ``path`` into the prepared objects; the facts that were saved with it.

    Args:
        wanted: facts that must be as they were saved.
        trust: load what somebody else saved too, also if its load may run their code.

    Raises:
        Mismatch: saved with other facts (recipe, processes, model, ...): names the first.
        Foreign: the engine's load may run code, and the checkpoint is not the user's own.
    """
    accelerator = trained.accelerator
    saved = facts_of(path).get("processes", accelerator.num_processes)
    anew = trained.engine.resumes_on_any and saved != accelerator.num_processes
    facts = check_same(path, wanted | {"processes": saved if anew else accelerator.num_processes})
    if trained.engine.unpickles and not trust and accelerator.is_local_main_process:
        check_own(path)
    accelerator.wait_for_everyone()
    trained.engine.load(trained, path)
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
