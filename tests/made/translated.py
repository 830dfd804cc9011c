"""Recipes and models to translate into trainers' options and to read back.

``tests/made/trainers`` has a file a trainer: the options of its parser, and what its table must
say.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from harness.planner.export import trainers
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects.library import families
from strategies.files import own_table

REAL = {p.stem: own_table(p) for p in Path(__file__).with_name("trainers").glob("*.yaml")}
"""Trainer -> what its file in ``tests/made/trainers`` says."""
USUAL = "flux-dev"
FEW = [
    *(f"{text}+lora" for text in ("ddp+bf16", "ddp+bf16_pure", "zero2+bf16", "zero3+fp32", "ddp")),
    "ddp+bf16+lora+checkpoint+compile+attend:kernel=flash+adam8bit+accumulate",
    "single+cast:to=int8+lora+block_swap:blocks=3",
    "single+cast:to=fp8+bf16+lora+adam8bit:lib=torchao",
]


@functools.cache
def asked(recipe: str, model: str) -> Resolved | None:
    """A recipe of a public model, if it can be."""
    many = 1 if recipe.startswith("single") else 8
    objective = families.table()[model].family.objectives[0]
    spec = dict(recipe=recipe, model=model, data="synthetic", objective=objective, device="cuda")
    found = resolve(Spec(**spec, processes=many, global_batch=8 * many, grad_clip=0.5))
    return None if found.refusal else found


def models(name: str) -> list[str]:
    """One for each script, or for each word, of those that a trainer knows; the usual one first."""
    table = trainers.table(name)["models"]
    pairs = sorted(table.items(), key=lambda pair: pair[0] == USUAL)
    words = {json.dumps(scripts, sort_keys=True): model for model, scripts in pairs}
    return sorted(words.values(), key=lambda model: (model != USUAL, model))


def trained_whole(name: str) -> str:
    """The first of them of which the trainer trains all weights."""
    table = trainers.table(name)["models"]
    return next(model for model in models(name) if {"any", "full"} & set(table[model]))
