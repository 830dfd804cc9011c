"""Drawn cells at full depth held to every recipe, by a rule written apart from the search's.

``python -m tests.made.audit_cells`` traces lattices, draws cells and writes their answers to
``audit_cells.csv``. With ``--drawn`` the questions are those of ``audit_drawn.csv``, drawn by
another person. Unlike ``brute_force`` it demands the very recipe that the rule of
docs/how-to/plan.md names, and reads a recipe's rank from its name.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.planner import pool, verdict
from harness.planner.atlas.command import CARDS
from harness.planner.plan.candidates import Asked, asked_for
from harness.planner.plan.command import add_arguments
from harness.planner.plan.fastest import common, search
from harness.planner.verdict import Fit
from harness.planner.worker import none
from harness.resolve import Resolved

SEED = 0xBF1C1E56070E4958DDB64070EBFC71C8A535C537A1BC18AA698FE4053A15E790
"""SHA-256 of docs/atlas/atlas.csv in commit 6785de86, so that nobody chose it."""
CELLS = 60
KINDS = {"flash": CARDS[:-3], "cudnn": CARDS[-3:]}
"""Attention kernels -> the atlas's cards that take them and share traces."""
GROUPS = (("pixart-sigma", "cudnn", (True, False)), ("sana-1.6b", "flash", (True,)))
"""Model, kind of cards, and trainings: the first on one GPU of a list that the seed shuffled."""
HOSTS = ("", "", "16GiB", "32GiB", "64GiB", "128GiB")
DRAWN = Path(__file__).with_name("audit_drawn.csv")
"""A third sample: 24 published cells, and 36 drawn ones, by ``secrets`` before any was answered."""
ADAPTER = re.compile(r"\+q?lora:")


class Cell(NamedTuple):
    """A question to a plan. ``beside``: GiB of other models on a GPU. ``host``: its memory."""

    model: str
    kind: str
    card: str
    adapters: bool
    beside: int = 0
    host: str = ""
    gpus: int = 1

    def asked(self) -> Asked:
        parser, what = argparse.ArgumentParser(), "gpu-memory" if self.card[0].isdigit() else "gpu"
        add_arguments(parser)
        words = ["--model", self.model, "--gpus", str(self.gpus), f"--{what}", self.card]
        words += ["--also", f"{self.beside}GiB"] if self.beside else []
        words += ["--host-memory", self.host] if self.host else []
        return asked_for(parser.parse_args(words))

    def rows(self) -> list[Resolved]:
        every = self.asked().resolved
        return [row for row in every if bool(ADAPTER.search(str(row.recipe))) == self.adapters]


def cells() -> list[Cell]:
    """Return all cells of the groups that the atlas has, and drawn ones with less memory."""
    rng, found = random.Random(SEED), []
    for model, kind, trainings in GROUPS:
        found += [Cell(model, kind, card, some) for card in KINDS[kind] for some in trainings]
    while len(set(found)) < CELLS:
        model, kind, trainings = rng.choice(GROUPS)
        one = Cell(model, kind, rng.choice(KINDS[kind]), rng.choice(trainings))
        left = one.asked().gpu.memory_bytes / 2**30 - rng.uniform(2, 20)
        found.append(one._replace(beside=max(0, int(left)), host=rng.choice(HOSTS)))
    return list(dict.fromkeys(found))


def drawn() -> list[Cell]:
    """Return the questions of the third sample."""
    with DRAWN.open(newline="", encoding="utf-8") as file:
        return [
            Cell(*(row[name] for name in ("model", "kind", "card")), row["adapters"] == "True",
                 int(row["beside"]), row["host"], int(row["gpus"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip


def rank(fit: Fit) -> tuple[bool, int, bool]:
    """Sort key: does it wait for the host; then bits of frozen weights, or what it rounds; then an
    engine on one GPU."""
    words = fit.label.split("+")
    waits = any(re.match(r"block_swap|offload_activations|.*_offload$", word) for word in words)
    engine = words[0] not in ("single", "ddp") and fit.resolved.launch.processes == 1
    if ADAPTER.search(fit.label):
        bits = 4 if "qlora:rank=16" in words else 8 if "cast:to=fp8" in words else 16
        return waits, -bits, engine
    return waits, sum(word in ("bf16_pure", "adam8bit", "adam4bit") for word in words), engine


def ruled(every: Sequence[Fit]) -> Fit | None:
    """Return the answer among ``every`` recipe, traced or not; None if none may fit."""
    timed = [fit for fit in every if fit.seconds and fit.may_fit]
    sure = [fit for fit in timed if fit.most_bytes <= fit.gpu.memory_bytes
            and (fit.host_most or 0) <= fit.host_memory]  # fmt: skip
    able, tie = sure or timed, 0.03 if sure else 0.01
    if not able:
        return None
    quick, some = min(able, key=_seconds), [fit for fit in able if common(fit.resolved)]
    half = quick.seconds.spread / _seconds(quick) / 2
    least = min(map(_seconds, some), default=0.0)
    if some and least * (1 - half) <= _seconds(quick) * (1 + half):
        able = some
    least = min(map(_seconds, able))
    even = [fit for fit in able if _seconds(fit) <= 1.1 * least]
    first = [fit for fit in even if rank(fit) == min(map(rank, even))]
    least = min(map(_seconds, first))
    same = [fit for fit in first if (1 - tie) * _seconds(fit) <= least]
    return min(same, key=lambda fit: (fit.label.count("+"), _seconds(fit)))


def _seconds(fit: Fit) -> float:
    return fit.seconds.total


def even(answer: Fit | None, best: Fit | None) -> bool:
    """Return True if the rule does not tell two recipes apart: 1 % of time is none."""
    told = [(fit.verdict, rank(fit), fit.label.count("+")) for fit in (answer, best) if fit]
    return len(told) == 2 and told[0] == told[1] and _seconds(answer) <= 1.01 * _seconds(best)


def held(cell: Cell) -> dict[str, object]:
    """Return the plan's answer and the rule's, with their seconds."""
    rows, folder, gpu = cell.rows(), pool.default_folder(), cell.asked().gpu
    made = [pool.cached(row, folder, cell.kind) or none(row, "") for row in rows]
    every = [verdict.judge(row, one, gpu) for row, one in zip(rows, made, strict=True)]
    by_name = {fit.label: fit for fit in every}
    _, (proof,) = search(rows, gpu, lambda some: [by_name[str(row.recipe)] for row in some])
    found = {**cell._asdict(), "recipes": len(rows), "predicted": proof.predicted}
    found["traced"] = sum(one.method == "trace" for one in made)
    told = {"answer": proof.best, "rule": ruled(every)}
    for name, fit in told.items():
        found |= {name: fit.label if fit else "none fits", f"{name}_verdict": fit and fit.verdict}
        found[f"{name}_s"] = f"{_seconds(fit):.4f}" if fit else ""
    same = proof.best is told["rule"]
    return {**found, "state": "same" if same else "even" if even(*told.values()) else "wrong"}


def trace(some: Sequence[Cell]) -> None:
    """Trace each recipe of the cells' lattices, and print those that have no trace."""
    groups = {(one.model, one.kind, one.gpus, one.adapters): one for one in some}
    with pool.kept_workers():
        for (model, kind, gpus, _), one in groups.items():
            rows = one.rows()
            made = pool.predict_all(rows, pool.default_folder(), kind=kind, jobs=1)
            lost = [found.recipe for found in made if found.method != "trace"]
            print(f"{model} x {gpus}, {kind}: {len(rows)} recipes, without a trace:", *lost)


def main() -> None:
    """Trace the lattices, hold the cells, write them and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drawn", action="store_true")
    third = parser.parse_args().drawn
    some = drawn() if third else cells()
    trace(some)
    lines = [held(cell) for cell in some]
    path = DRAWN if third else Path(__file__).with_suffix(".csv")
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, lines[0], lineterminator="\n")
        out.writeheader()
        out.writerows(lines)
    print(Counter(str(line["state"]) for line in lines))


if __name__ == "__main__":
    main()
