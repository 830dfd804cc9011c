"""An export: its files, the values that the user must fill in, and the command that starts it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.planner.export import trainers as pages
from harness.planner.export.settled import YAML, as_yaml, settle
from harness.planner.export.trainers import Translation, translated
from harness.planner.plan.request import techniques
from harness.resolve import Resolved

PAGE, OWN = "trainers.md", "YOUR_TRAINER.py"
LAUNCHED = ("fp32", "bf16", "fp16", "accumulate")
"""Strategies that the launch file sets, or an argument of ``Accelerator``."""
HEAD_BLANK, PORT = "FILL.IN.THE.FIRST.MACHINE", 29500


@dataclass(frozen=True)
class Bundle:
    """The files and texts of an export.
    ``files``: name -> text. ``blanks``: "file: key" -> the value that only the user can fill in.
    ``own``: strategies that no launch file has, with what each does."""

    folder: Path
    title: str
    files: Mapping[str, str]
    blanks: Mapping[str, str]
    translations: Sequence[Translation]
    own: Sequence[tuple[str, str]]
    command: str


def bundle(
    resolved: Resolved,
    folder: Path,
    trainers: Sequence[str],
    machines: int = 1,
    nearest: Callable[[str], str] = lambda name: "",
) -> Bundle:
    """Return the whole export as text, without writing files.

    Args:
        folder: absolute path of the export, because the launch file names other files by it.
        trainers: those to translate options for (``harness.planner.export.trainers.exported``).
        machines: number of machines that share the GPUs equally.
        nearest: says what a trainer can do that cannot express the recipe.

    Raises:
        BadInput: the recipe's numbers cannot be resolved, or a trainer is unknown.
    """
    made = [translated(name, resolved, str(folder / YAML)) for name in trainers]
    for one in made:
        one.nearest = nearest(one.trainer["name"]) if one.unplanned and not one.no_model else ""
    found, file = settle(resolved, folder), resolved.launch.engine.file
    content, blanks = dict(found.content), dict(found.blanks)
    if machines > 1:
        content |= {"num_machines": machines, "machine_rank": 0}
        content |= {"main_process_ip": HEAD_BLANK, "main_process_port": PORT}
        blanks[f"{YAML}: machine_rank"] = "0 on the first machine, 1 on the next, and so on"
        blanks[f"{YAML}: main_process_ip"] = "the address of the first machine, on every machine"
    fsdp = content.get("fsdp_config", {})
    if fsdp.get("fsdp_auto_wrap_policy") == "TRANSFORMER_BASED_WRAP":
        # accelerate wraps no block, without a word, if it knows no class (utils/fsdp_utils.py)
        blanks[WRAPPED] = "the class of your blocks, if your model has no _no_split_modules "
        blanks[WRAPPED] += "(those of diffusers have)"
    files = {YAML: as_yaml(content, file.title, file.source)}
    files |= {name: json.dumps(held, indent=2) + "\n" for name, held in found.files.items()}
    title = _title(resolved)
    if made:
        files[PAGE] = pages.page(title, made)
    here = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
    added = resolved.launch.engine.environment(resolved.spec.device).items()
    lead = ["env", *(f"{key}={value}" for key, value in added)] if added else []
    words = [*lead, "accelerate", "launch", "--config_file", str(here / YAML), OWN]
    return Bundle(folder, title, files, blanks, made, _own(resolved), shlex.join(words))


WRAPPED = f"{YAML}: fsdp_config.fsdp_transformer_layer_cls_to_wrap"


def _own(resolved: Resolved) -> list[tuple[str, str]]:
    """Return the strategies that accelerate's files do not set, with their first sentences."""
    parts = [part for part in techniques(resolved) if part.name not in LAUNCHED]
    parts = [part for part in parts if getattr(part, "place", "") != "none"]  # no average
    texts = (" ".join((type(part).__doc__ or "").replace("``", "").split()) for part in parts)
    told = (text.partition(". ")[0].rstrip(".") for text in texts)
    return [(str(part), text) for part, text in zip(parts, told, strict=True)]


def _title(resolved: Resolved) -> str:
    spec, many = resolved.spec, resolved.launch.processes
    where = "GPU" if spec.device == "cuda" else "process"
    plural = "" if many == 1 else "s" if where == "GPU" else "es"
    on = f"{many} {where}{plural}"
    each = f" ({resolved.micro_batch} a {where} at a time)" * (many > 1)
    return f"{resolved.recipe} for {spec.model} on {on}, global batch {spec.global_batch}{each}"
