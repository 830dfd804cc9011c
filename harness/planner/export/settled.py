"""An export: launch files with every number resolved, the values that the user must fill in, and
the command that starts it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness import ROOT
from harness.launch import command
from harness.planner.adapters import adapter_of
from harness.planner.adapters.base import ResolvedConfig
from harness.planner.export import trainers as pages
from harness.planner.export.trainers import Translation, translated
from harness.planner.plan.request import techniques
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from strategies.base import BadInput, Sizes, Slot
from strategies.engine import Workload

YAML = "accelerate.yaml"


def mixed_precision(resolved: Resolved) -> str:
    """Return accelerate's word for the recipe's precision: no, bf16 or fp16."""
    part = resolved.recipe.in_slot(Slot.PRECISION)
    if part.name == "fp16":  # its own words need torch, for the loss scale
        return "fp16"
    return part.accelerator_kwargs(resolved.launch).get("mixed_precision", "no")


EDITED = {"frozen_weights", "replaced_layers", "quantized_weights", "other_products"}
"""Traits of recipes that do not train all of the model's own weights."""
TIMEOUT = 600.0


def trained_sizes(resolved: Resolved) -> Sizes:
    """Return the sizes, in elements, of all weights with a gradient: an engine's buffers follow.

    If a strategy freezes, adds or replaces weights, the model is edited on tensors without storage,
    in its own process (``python -m harness.planner.export.settled``).

    Raises:
        BadInput: the model could not be edited without storage; has the last line of the error.
    """
    if not EDITED & resolved.launch.traits:
        return resolved.subject.survey.sizes
    words = [sys.executable, "-m", "harness.planner.export.settled"]
    words.append(json.dumps(dataclasses.asdict(resolved.spec)))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = command.inherited() | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        raise BadInput(
            f"{resolved.recipe}: the trained parameters of {resolved.spec.model} could "
            f"not be counted ({said[-1] if said else 'no message'}); take a recipe "
            "without an adapter, or another --model"
        )
    found = json.loads(ended.stdout.splitlines()[-1])
    return Sizes(**found | {"weights": tuple(found["weights"])})


def main(argv: Sequence[str]) -> int:
    """Edit a spec's model without storage and print its sizes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.planner.tracing.shortcuts import storageless
    from harness.worker.setup import edited_model

    resolved = resolve(Spec(**json.loads(argv[0])))
    with storageless(), FakeTensorMode(allow_non_fake_inputs=True):
        module, *_ = edited_model(resolved)
        print(json.dumps(resolved.subject.sizes_of(module)._asdict()))
    return 0


def settle(resolved: Resolved, folder: Path) -> ResolvedConfig:
    """Return the engine's resolved launch file; the files will be in ``folder``."""
    recipe, launch = resolved.recipe, resolved.launch
    precision = recipe.in_slot(Slot.PRECISION)

    def work(scratch: Path) -> Workload:
        return Workload(
            micro_batch=resolved.micro_batch,
            clip=resolved.settings.grad_clip,
            sizes=trained_sizes(resolved),
            scratch=scratch,
            layout=launch.layout,
        )

    def configure(accelerator: Any) -> None:
        precision.configure(accelerator, None, launch)  # by the launch alone, without a model

    word = mixed_precision(resolved)
    adapter = adapter_of(launch.engine)
    return adapter.resolved_config(launch, work, word, configure, folder)


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
    head = "".join(f"# {line}\n" for line in (file.title, f"Source: {file.source}") if line)
    files = {YAML: head + yaml.safe_dump(content, sort_keys=False)}
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
    sentences = (text.partition(". ")[0].rstrip(".") for text in texts)
    return [(str(part), text) for part, text in zip(parts, sentences, strict=True)]


def _title(resolved: Resolved) -> str:
    spec, many = resolved.spec, resolved.launch.processes
    where = "GPU" if spec.device == "cuda" else "process"
    plural = "" if many == 1 else "s" if where == "GPU" else "es"
    on = f"{many} {where}{plural}"
    each = f" ({resolved.micro_batch} a {where} at a time)" * (many > 1)
    return f"{resolved.recipe} for {spec.model} on {on}, global batch {spec.global_batch}{each}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
