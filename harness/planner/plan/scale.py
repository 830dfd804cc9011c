"""``plan --scale``: the same training on growing numbers of GPUs, by weak or strong scaling; and
``plan --claims``: the claims suite predicted for one card.

Both results are forecasts, which can be stored beside the results of their suite.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from harness import extensions
from harness.commands import listing
from harness.commands.console import OK
from harness.commands.progress import Predictions
from harness.commands.reports import report
from harness.json_files import write_json
from harness.planner import pool, verdict
from harness.planner.plan.candidates import (
    DEFAULT_GPU_BATCH,
    Asked,
    PlanError,
    asked_for,
    card_of,
    for_card,
)
from harness.planner.plan.lattice import beside
from harness.planner.plan.request import MODEL
from harness.planner.plan.tracing import Asking, judged
from harness.planner.speed import rates
from harness.planner.speed.roofline import sent
from harness.planner.verdict import Fit, at_the_ends
from harness.prediction import Forecast, ForecastRow, Work
from harness.report import read_suite
from harness.report.figures.numbers import REGIMES, plain
from harness.report.rendering.narrow import print_grid
from harness.resolve import Resolved, resolve
from harness.spec import Spec, model_name
from harness.subjects import kind_of
from harness.suite import matrix
from harness.suite.file import Suite
from harness.system.cards import NODE, Card
from harness.system.probe import version
from strategies import parse
from strategies.base import BadInput
from strategies.workloads import TRAIN

SUITE = "scale"
BOTH = "both"
UNSET = dict.fromkeys(("nodes", "largest"))
UNSET |= dict.fromkeys(("cpu", "check", "advise", "explain", "notes"), False)
FIXED = {**UNSET, "suite": None, "processes": None, "workload": TRAIN, "data": ""}
"""Options of a plan that ``--scale`` does not take -> their default values."""
LIBRARIES = ("torch", "accelerate", "deepspeed")
LEAST_WORTH = ("In node GiB", "Between GiB", "Img/s a GPU", "Batch a GPU")


@dataclass(frozen=True)
class Cell:
    """A requested row: a recipe, GPUs and a global batch; its plan, or why it has none."""

    recipe: str
    count: int
    batch: int
    asked: Asked | None = None
    reason: str = ""


def plan_scale(options: argparse.Namespace, console: Console) -> int:
    """Predict each recipe on each number of GPUs, print the tables, and return the exit code."""
    if absent := extensions.missing("--scale"):
        raise PlanError(absent)
    (tables,), (note,) = map(extensions.hooks, ("scale_tables", "scale_note"))
    folder = _checked(options)
    recipes = options.recipes or usual(options, console)
    cells = _possible([_asked(cell, options) for cell in cells_of(options, recipes)])
    made = _forecast(cells, options, console)
    for grid in tables(made):
        console.print(escape(grid.title), highlight=False)
        print_grid(grid, console, least_worth=LEAST_WORTH)
        console.print()
    for text in [note(made), *_refused(cells)]:
        console.print(escape(text), style="dim", highlight=False)
    if options.json:
        write_json(options.json, dataclasses.asdict(made))
    if folder:
        console.print(str(made.write(folder)), highlight=False, soft_wrap=True)
        report(argparse.Namespace(folder=folder))
    return OK


def _checked(options: argparse.Namespace) -> Path | None:
    """Check the options and return the folder to keep the forecast in, if any."""
    why = "--scale predicts named recipes on several numbers of GPUs, eight on a node"
    _refuse(vars(options), FIXED, why)
    low = min(options.scale)
    if low < 1:
        raise PlanError(f"scale is {low}; give --scale numbers of GPUs from 1")
    odd = next((n for n in options.scale if n > NODE and n % NODE), None)
    if odd:
        near = odd // NODE * NODE
        raise PlanError(
            f"scale is {odd}, and nodes have {NODE}; give --scale {near} or {near + NODE}"
        )
    if len(set(options.scale)) < 2:
        raise PlanError(f"scale is {low}; give --scale at least two numbers, as 1 8 64")
    alone = next((r for r in options.recipes or () if parse(r).alone("cuda")), None)
    if alone:
        raise PlanError(
            f"{alone} always trains on one GPU; name recipes for several, such as ddp. "
            "Plain training on one GPU is added to the table."
        )
    return _folder(options.keep)


def _refuse(given: Mapping[str, object], fixed: Mapping[str, object], why: str) -> None:
    for name, usual in fixed.items():
        if given[name] != usual:
            word = {"processes": "gpus"}.get(name, name.replace("_", "-"))
            raise PlanError(f"{word} is {given[name]}; {why}: leave --{word} out")


def _folder(folder: Path | None) -> Path | None:
    if folder and read_suite(folder).story != SUITE:
        raise PlanError(
            f"keep is {folder}, which has no results of the suite {SUITE}; give a results "
            f"folder of ./run.sh run --suite {SUITE} (--out)"
        )
    return folder


# ---- rows ----


def usual(options: argparse.Namespace, console: Console) -> list[str]:
    """Return the recipes that are compared if none are named.

    They are a plan's answers on the most GPUs of one node, under each sharding. Forecasts that are
    kept beside results have the suite's recipes.
    """
    if options.keep:
        recipes = [row.recipe for row in listing.load(SUITE, "cuda").rows]
        several = [text for text in recipes if not parse(text).alone("cuda")]
        return for_card(list(dict.fromkeys(several)), card_of(options))
    counts = sorted(set(options.scale))
    count = max((n for n in counts if 1 < n <= NODE), default=NODE)
    batch = _batch(options, _regimes(options)[0], count, min(counts))
    words = {"processes": count, "global_batch": batch}
    asked = asked_for(argparse.Namespace(**{**vars(options), **words}))
    jobs = options.jobs or pool.default_jobs()
    _, proofs = Asking(asked, jobs, Predictions(console)).search(asked.resolved)
    best = [proof.best or proof.nearest for proof in proofs]
    return [text for fit in best if fit for text in beside(fit.resolved, asked.resolved)]


def cells_of(options: argparse.Namespace, named: Sequence[str]) -> list[Cell]:
    """Return each recipe of ``named`` on each number of GPUs in each regime.

    One GPU also has plain training, and has no replica recipes.
    """
    recipes = [parse(text).text for text in named]
    regimes, counts = _regimes(options), sorted(set(options.scale))
    batches = [(n, _batch(options, regime, n, counts[0])) for regime in regimes for n in counts]
    alone = [Cell(plain(recipe), n, b) for recipe in recipes for n, b in batches if n == 1]
    found = [Cell(recipe, *at) for recipe in recipes for at in batches]
    return list(dict.fromkeys([*alone, *(c for c in found if c.count > 1 or not _replicates(c))]))


def _regimes(options: argparse.Namespace) -> Sequence[str]:
    return REGIMES if options.regime == BOTH else (options.regime,)


def _replicates(cell: Cell) -> bool:
    return "replicas" in parse(cell.recipe).sharding.engine("cuda").traits


def _possible(cells: Sequence[Cell]) -> list[Cell]:
    """Remove recipes that cannot run on one GPU; refuse if no row is left."""
    kept = [c for c in cells if c.asked or c.count > 1 or c.recipe == plain(c.recipe)]
    if not any(cell.asked for cell in kept):
        raise PlanError(f"no recipe can be planned: {cells[0].recipe}: {cells[0].reason}")
    return kept


def _batch(options: argparse.Namespace, regime: str, count: int, fewest: int) -> int:
    """Return samples per step. A requested batch is for the fewest GPUs."""
    brings = kind_of(model_name(options.model)).brings_samples
    of_gpu = 1 if brings else DEFAULT_GPU_BATCH
    asked = options.global_batch
    if regime == "strong":
        return asked or NODE * of_gpu
    if asked is None:
        return count * of_gpu
    if asked % fewest:
        raise PlanError(
            f"global_batch is {asked}, which does not divide by {fewest} GPUs; give a "
            f"multiple of {fewest}"
        )
    return asked // fewest * count


def _asked(cell: Cell, options: argparse.Namespace) -> Cell:
    """Check a cell; bad input becomes its reason."""
    words = {"recipes": [of_nodes(cell.recipe, cell.count)], "processes": cell.count}
    words |= {"global_batch": cell.batch}
    try:
        found = asked_for(argparse.Namespace(**{**vars(options), **words}))
    except BadInput as error:
        return Cell(cell.recipe, cell.count, cell.batch, reason=str(error))
    return Cell(cell.recipe, cell.count, cell.batch, asked=found)


def of_nodes(recipe: str, count: int) -> str:
    """Return ``recipe`` for ``count`` GPUs: groups of a sharding are nodes by default."""
    sharding = parse(recipe).sharding
    groups, usual = count // NODE, sharding.engine("cuda").choices.get("replicate")
    if usual is None or sharding.choices["replicate"] != usual or groups < 2:
        return recipe
    words = recipe.split("+")
    at = next(i for i, word in enumerate(words) if word.partition(":")[0] == sharding.name)
    name, _, given = words[at].partition(":")
    words[at] = f"{name}:{given + ',' if given else ''}replicate={groups}"
    return parse("+".join(words)).text


# ---- forecast ----


def _forecast(cells: Sequence[Cell], options: argparse.Namespace, console: Console) -> Forecast:
    able = [cell for cell in cells if cell.asked]
    asked = able[0].asked
    asking = Asking(asked, options.jobs or pool.default_jobs(), Predictions(console))
    fits = iter(asking.fits([cell.asked.resolved[0] for cell in able]))
    rows = [
        forecast_row(next(fits), cell.recipe) if cell.asked else _impossible(cell, options)
        for cell in cells
    ]
    return forecast_of(SUITE, asked.resolved[0].spec.model, asked.gpu, rows, asked.gpu.linked)


def _impossible(cell: Cell, options: argparse.Namespace) -> ForecastRow:
    spec = Spec(recipe=cell.recipe, model=model_name(options.model), data="synthetic",
                processes=cell.count, global_batch=cell.batch, device="cuda")  # fmt: skip
    return ForecastRow(spec=spec, verdict="refused", reason=cell.reason, asked=cell.recipe)


def _refused(cells: Sequence[Cell]) -> list[str]:
    """Return each reason once, with the recipes and numbers of GPUs that it applies to."""
    of_reason: dict[str, list[str]] = {}
    for cell in cells:
        if cell.reason:
            text = f"{cell.recipe} on {cell.count}"
            of_reason.setdefault(cell.reason, []).append(text)
    return [f"Refused: {', '.join(names)}: {reason}" for reason, names in of_reason.items()]


# ---- claims ----
# ``plan --claims DIR`` predicts the suite's rows for one card at full size, and writes the forecast
# into DIR. The reports there are then written again with a column of verdicts.


CLAIMS_SUITE = "claims"
CLAIMS_FIXED = {
    **UNSET,
    **dict.fromkeys(("processes", "network", "global_batch", "scale", "keep", "json")),
    **dict.fromkeys(("resolution", "config", "set"), ""),
    **dict.fromkeys(("frames", "text"), 0),
    **{name: [] for name in ("also", "before", "phases")},
    "model": MODEL,
}
"""Options of a plan that ``--claims`` does not take -> their default values; the suite sets them.
"""
REPLICAS = 2
"""Cards for rows that need several: the smallest number that communicates."""


def plan_claims(options: argparse.Namespace, console: Console) -> int:
    """Predict each row, write the forecast into ``options.claims``, and report."""
    folder = checked(options)
    suite, card = listing.load(CLAIMS_SUITE, "cuda"), card_of(options)
    jobs, progress = options.jobs or pool.default_jobs(), Predictions(console)
    pairs = [(row, card) for row in rows_of(suite, card)]
    kept = [forecast_row(fit) for fit in judged(pairs, _name, jobs=jobs, told=progress)]
    made = forecast_of(suite.name, str(suite.settings["model"]), card, kept)
    console.print(str(made.write(folder)), highlight=False, soft_wrap=True)
    report(argparse.Namespace(folder=folder))
    return OK


def checked(options: argparse.Namespace) -> Path:
    """Check the options and return the folder of results.

    Raises:
        PlanError: options that do not apply, with a hint.
    """
    one = {"processes": None} if options.processes == 1 else {}
    why = "--claims predicts the suite's own rows for one card"
    _refuse({**vars(options), **one}, CLAIMS_FIXED, why)
    if options.jobs is not None and options.jobs < 1:
        raise PlanError(f"jobs is {options.jobs}; give --jobs at least 1")
    story = read_suite(options.claims).story
    if story != CLAIMS_SUITE:
        raise PlanError(
            f"{options.claims}: its suite.json tells the story {story!r}, not {CLAIMS_SUITE!r}; "
            f"give a folder that ./run.sh run --suite {CLAIMS_SUITE} made (--out)"
        )
    return options.claims


def rows_of(suite: Suite, card: Card) -> list[Resolved]:
    """Return the suite's rows as they would run on GPUs like ``card``."""
    specs = matrix.specs(suite, {}, gpus=REPLICAS, gpu_bytes=card.memory_bytes)
    return [resolve(spec) for spec in specs]


def _name(row: Resolved, _: Card) -> str:
    return f"{row.spec.recipe}, {row.spec.model}, batch {row.spec.global_batch}"


# ---- forecasts ----


def forecast_of(
    suite: str, model: str, card: Card, rows: list[ForecastRow], node: int = NODE
) -> Forecast:
    """Return the forecast of a suite's rows on a card, ``node`` of them in each machine."""
    return Forecast(
        suite=suite,
        model=model,
        gpu=card.name,
        gpu_bytes=card.memory_bytes,
        assumed=f"{verdict.assumed(card)} {rates.words(card)}",
        made_with={name: str(version(name)) for name in LIBRARIES} | {"code": pool.code()},
        rows=rows,
        node=node,
    )


def forecast_row(fit: Fit, asked: str = "") -> ForecastRow:
    """Return the record of a prediction that was judged against a card."""
    found, steady = fit.prediction, fit.prediction.steady
    if steady is None or fit.seconds is None:
        fields = {"verdict": fit.verdict, "reason": found.reason, "asked": asked}
        return ForecastRow(spec=fit.resolved.spec, **fields)
    travels = sent(found.work, fit.resolved.spec.processes, fit.gpu.linked)
    slow_links, slow_card = at_the_ends(fit)
    return ForecastRow(
        spec=fit.resolved.spec,
        verdict=fit.verdict,
        need_bytes=fit.need_bytes,
        peak_bytes=steady.bytes,
        peak_phase=steady.phase,
        categories=steady.categories,
        buckets=found.buckets,
        beyond_state_bytes=found.beyond_state,
        step_seconds=fit.seconds.total,
        low_seconds=fit.seconds.low,
        high_seconds=fit.seconds.high,
        spread_seconds=fit.seconds.spread,
        block_forwards=block_forwards(found.work),
        asked=asked,
        exposed_seconds=fit.seconds.communication,
        within_bytes=travels.within,
        across_bytes=travels.across,
        slow_links_seconds=slow_links,
        slow_card_seconds=slow_card,
    )


def block_forwards(work: Sequence[Work]) -> float | None:
    """Return how often a block's forward runs in one step, or None if it cannot be counted.

    Attention kernels are counted: each forward of a block runs one, and the backward kernels have
    other FLOPs. There is no count if plain matrix products compute the attention, or if blocks
    differ in it.
    """
    kernels = [w for w in work if w.kind == "attention"]
    first = {w.flops for w in kernels if w.phase == "forward"}
    if len(first) != 1:
        return None
    ran = {phase: sum(w.count for w in kernels if w.phase == phase and w.flops in first)
           for phase in ("forward", "backward")}  # fmt: skip
    return 1 + ran["backward"] / ran["forward"]
