"""``./run.sh plan``: which recipe is predicted to fit which GPUs, how fast, and what else would.

Needs no GPU, and this process no torch: each recipe is predicted in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import matrix, presets, suite_file, ways_out
from harness.options import check_file
from harness.plan_text import PlanProgress, print_explained, print_plan
from harness.predict import attention, fit, gpus, pool
from harness.predict.fit import Fit
from harness.predict.gpus import Gpu
from harness.predict.prediction import Prediction
from harness.progress import make_console
from harness.resolve import Resolved, resolve
from harness.result import write_json
from harness.search import Largest, largest_batch, largest_model
from harness.search_text import print_largest
from harness.spec import Spec, SpecError
from harness.ways_out import Ways
from strategies import parse
from strategies.base import BadInput

__all__ = ["Asked", "PlanError", "add_arguments", "plan"]

LATENT = 8
"""Pixels of a side that one element of a latent stands for (the VAE's factor)."""
DEFAULT_GPU_BATCH = 32
WIDE = 116
"""Columns of the table where there is no terminal to ask."""
CUSTOM = "depth=28,width=1152,heads=16,patch=2"


class PlanError(BadInput):
    """A plan that cannot be made: one line with the key, its value and the way out."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan is for: specs checked, and the recipes of a suite that cannot be, with why.

    ``processes``: the GPUs asked for, whatever a recipe of one process takes of them.
    """

    resolved: list[Resolved]
    refused: list[tuple[str, str]]
    gpu: Gpu
    processes: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``plan``."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--recipes", nargs="+", metavar="R", help="recipes to choose among")
    what.add_argument("--suite", metavar="NAME_OR_FILE", help="a suite's recipes (default)")
    add = parser.add_argument
    add("--model", default="DiT-XL/2", help=f"a preset, or a size as in {CUSTOM}")
    add("--gpus", "--processes", dest="processes", type=int, default=8, metavar="N",
        help="GPUs, one process each (default 8)")  # fmt: skip
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument("--gpu", metavar="NAME", help="a card of the table, as A100-80GB")
    card.add_argument("--gpu-memory", metavar="SIZE", help="or its memory alone, as 24GiB")
    add("--global-batch", type=int, metavar="B", help="samples a step (default 32 a GPU)")
    add("--resolution", type=int, default=256, metavar="PIXELS", help="of an image (default 256)")
    add("--largest", choices=("batch", "model"), help="largest micro batch (whatever B is), or DiT")
    add("--explain", action="store_true", help="say of each recipe what its peak is made of")
    add("--jobs", type=int, metavar="N", help="predictions at a time (default: a core each)")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON too")


def plan(options: argparse.Namespace) -> int:
    """Predict, print the table and the answer; the exit code."""
    asked, console = asked_for(options), make_console(WIDE)
    progress, jobs = PlanProgress(console), options.jobs or pool.default_jobs()
    if options.json:
        check_file(options.json, "json")
    if options.largest:
        seek = largest_batch if options.largest == "batch" else largest_model
        found = seek(asked.resolved, asked.gpu, pool.default_folder(), jobs, progress)
        print_largest(found, options.largest, asked, console)
        if options.json:
            write_json(options.json, largest_as_json(found, asked))
        return 0
    ask = functools.partial(fits_of, asked=asked, jobs=jobs, progress=progress)
    fits = ask(asked.resolved)
    ways = ways_out.seek(fits, asked.processes, ask)
    print_plan(fits, asked.refused, ways, console)
    if options.explain:
        print_explained(fits, console)
    if options.json:
        write_json(options.json, as_json(fits, ways, asked))
    return 0


def fits_of(
    rows: Sequence[Resolved], why: str = "", *, asked: Asked, jobs: int, progress: PlanProgress
) -> list[Fit]:
    """Each row against the card, predicted with its progress; ``why`` says what for. What the card
    cannot run is not predicted."""
    gpu, lacks = asked.gpu, [fit.lack_of(one, asked.gpu) for one in rows]
    able = [one for one, lack in zip(rows, lacks, strict=True) if not lack]
    found = iter(_predicted(able, why, asked, jobs, progress) if able else [])
    return [
        fit.cannot(one, gpu, lack) if lack else fit.judge(one, next(found), gpu)
        for one, lack in zip(rows, lacks, strict=True)
    ]


def _predicted(
    rows: Sequence[Resolved], why: str, asked: Asked, jobs: int, progress: PlanProgress
) -> list[Prediction]:
    usual = (1, asked.processes)
    ranks = [one.spec.processes for one in rows]
    where = [f" on {number} GPUs" if number not in usual else "" for number in ranks]
    progress.begin([f"{one.recipe}{on}" for one, on in zip(rows, where, strict=True)], jobs, why)
    kind, folder = attention.preferred(asked.gpu.capability), pool.default_folder()
    found = pool.predict_all(rows, folder, kind=kind, jobs=jobs, done=progress.done)
    progress.end()
    return found


def largest_as_json(found: Sequence[Largest], asked: Asked) -> dict[str, object]:
    """Each recipe's bracket: the size that fits and the one that does not, in bytes of a GPU."""

    def side(one: Fit | None) -> dict[str, object] | None:
        if one is None:
            return None
        size = {"model": one.resolved.spec.model, "micro_batch": one.resolved.micro_batch}
        return {**size, "verdict": one.verdict, "need_bytes": one.need_bytes,
                "method": one.prediction.method}  # fmt: skip

    rows = [{**vars(one), "fits": side(one.fits), "over": side(one.over)} for one in found]
    refused = [{"recipe": name, "reason": reason} for name, reason in asked.refused]
    given = {"gpu": dataclasses.asdict(asked.gpu), "assumed": fit.assumed(asked.gpu)}
    return {**given, "rows": rows, "refused": refused}


def as_json(fits: Sequence[Fit], ways: Ways | None, asked: Asked) -> dict[str, object]:
    """Everything that was derived, and the predictions it was derived from."""
    best = fit.fastest(fits)
    return {
        "gpu": dataclasses.asdict(asked.gpu),
        "assumed": fit.assumed(asked.gpu),
        "fastest": best.label if best else None,
        "rows": [_fit_as_json(one) for one in fits],
        "tried": [_fit_as_json(one) for one in ways.tried] if ways else [],
        "tried_on_more_gpus": [_fit_as_json(one) for one in ways.wider] if ways else [],
        "refused": [{"recipe": name, "reason": reason} for name, reason in asked.refused],
    }


def _fit_as_json(one: Fit) -> dict[str, Any]:
    return {
        "recipe": one.label,
        "processes": one.resolved.spec.processes,
        "global_batch": one.resolved.spec.global_batch,
        "verdict": one.verdict,
        "lack": one.lack,
        "need_bytes": one.need_bytes,
        "least_bytes": one.least_bytes,
        "margin_bytes": one.margin_bytes,
        "host_bytes_node": one.host_bytes,
        "step_seconds": one.seconds.total if one.seconds else None,
        "step_seconds_spread": one.seconds.spread if one.seconds else None,
        "prediction": dataclasses.asdict(one.prediction),
    }


# ---- what was asked ----


def asked_for(options: argparse.Namespace) -> Asked:
    """Every row checked.

    Raises:
        BadInput: one line. A recipe that was named must be possible; one of a suite
            that is not becomes a line of its own.
    """
    if options.processes < 1:
        raise PlanError(f"gpus is {options.processes}; give --gpus at least 1")
    if options.jobs is not None and options.jobs < 1:
        raise PlanError(f"jobs is {options.jobs}; give --jobs at least 1")
    if options.explain and options.largest:
        raise PlanError("--explain is of one size, and --largest searches many; leave one out")
    if options.gpu_memory:
        gpu = gpus.of_size(gpus.parse_bytes(options.gpu_memory))
    else:
        gpu = gpus.find(options.gpu)
    base = _base(options)
    rows, refused = [], []
    for recipe in _recipes(options):
        try:
            rows.append(_row(base, recipe, whole_batches=options.largest != "batch"))
        except BadInput as error:
            if options.recipes:
                raise
            refused.append((recipe, str(error)))
    if not rows:
        raise PlanError(f"no recipe can be planned: {refused[0][0]}: {refused[0][1]}")
    return Asked(resolved=rows, refused=refused, gpu=gpu, processes=options.processes)


def _base(options: argparse.Namespace) -> Spec:
    model = model_name(options.model)
    shape = presets.shape_of(model)
    step = LATENT * shape.patch_size
    if options.resolution < step or options.resolution % step:
        near = max(step, round(options.resolution / step) * step)
        raise PlanError(
            f"resolution is {options.resolution}; {options.model} takes multiples of {step} "
            f"({LATENT} pixels a latent x patch {shape.patch_size}), as {near}"
        )
    batch = options.global_batch
    if batch is None:
        batch = DEFAULT_GPU_BATCH * options.processes
    spec = Spec(
        recipe="ddp",
        model=model,
        data=f"synthetic:{options.resolution // LATENT}",
        global_batch=batch,
        processes=options.processes,
        device="cuda",
    )
    spec.check()
    if options.largest != "batch":
        spec.micro_batch(1)  # refuses a batch that no row could take
    return spec


def model_name(text: str) -> str:
    """A size alone, as ``CUSTOM``, as a model's name; what it leaves out is DiT-XL/2's."""
    if "=" not in text or ":" in text:
        return text
    return f"DiT-XL/2:{text}"


def _recipes(options: argparse.Namespace) -> list[str]:
    if options.recipes:
        return list(dict.fromkeys(options.recipes))
    suite = suite_file.load_suite(options.suite or "default", "cuda")
    return [row.recipe for row in suite.rows]


def _row(base: Spec, recipe: str, whole_batches: bool) -> Resolved:
    """A recipe under the plan's settings; a launch file of one process gets one.

    Where the batch is what is sought (not ``whole_batches``), the one asked for need not divide.
    """
    parsed = parse(recipe)
    processes = 1 if matrix.is_single(parsed, "cuda") else base.processes
    batch = base.global_batch if whole_batches else processes * parsed.accumulation
    spec = dataclasses.replace(base, recipe=parsed.text, processes=processes, global_batch=batch)
    resolved = resolve(spec)
    if resolved.refusal:
        raise SpecError(f"{recipe}: {resolved.refusal}")
    return resolved
