"""Rows of suite ``check`` on rehearsed cards, and their predictions beside torch's allocator.

    HEADROOM_REHEARSAL_PYTHON=... python -m tests.rehearsal.rows FOLDER

It writes docs/reference/rehearsal.md.

FOLDER keeps the rows: a repeated command trains what is missing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness import ROOT
from harness.planner import pool
from harness.prediction import Prediction
from harness.resolve import resolve
from harness.spec import Spec
from harness.suite.file import known_suites
from strategies import parse
from tests.rehearsal import build

__all__ = ["MISSES", "Rehearsed", "absent", "every", "name", "rehearsed"]

MIB = 2**20
BATCH = 8
SMALL = {"model": "DiT-T/4", "data": "synthetic", "steps": 2, "warmup": 2}
BRIEF = {"sampler_steps": 2, "steps": 1, "warmup": 1}
"""The same of rows that draw samples: a step of theirs is many forward passes."""
MORE = [
    *("ddp+bf16", "zero3_offload+bf16", "fsdp2_offload", "fsdp2+bf16+checkpoint"),
    *("fsdp2:reshard=off", {"recipe": "ddp", "processes": 4}, {"recipe": "fsdp2", "processes": 4}),
    {"recipe": "zero2+bf16", "processes": 4},
]
"""Rows beside those of ``check``."""
TRITON = "Triton's and inductor's kernels need a driver"
BITSANDBYTES = "bitsandbytes' kernels have no CPU code for CUDA tensors"
ABSENT = {
    "adam8bit": BITSANDBYTES,
    "paged_adam8bit": BITSANDBYTES,
    "qlora": BITSANDBYTES,
    "nf4": BITSANDBYTES,
    "adam4bit": TRITON,
    "adam16bit": TRITON,
    "compile": TRITON,
    "attend:kernel=flex": TRITON,
    "adam8bit:lib=torchao": TRITON,
    "int8": "not ended: 8-bit products take minutes on a CPU",
    "float8": "not tried: float8 products are a card's own",
    "single+fp8": "not tried: float8 products are a card's own",
    "sparse24": "not tried: cuSPARSELt's products are a card's own",
    "sparse_embedding": "CUB sorts the indices of a sparse gradient in a kernel",
    "zero3_nvme": "DeepSpeed's async_io did not link against the driver's library",
    "tf32": "CPU kernels do not round to TF32, so that its evidence is void",
}
"""A recipe, or a part of it -> why it is not rehearsed; a part with options comes before others."""
MISSES = {
    "1 single+cross_entropy:kind=fused": "torch's fused loss is one operation in the trace: the "
    "order of the buffers inside it is not simulated",
}
"""Row -> why its reserve is further off than the limit."""
PAGE = ROOT / "docs/reference/rehearsal.md"
TITLE = """# Predictions beside torch's allocator, rehearsed without a GPU

For whoever wants to know how far a prediction of memory may be trusted. **These rows are no
measurement**; [an H100's](h100.md) are.
A CUDA build of torch trained these rows on devices whose memory is host memory
([how, and what it cannot show](../how-to/first-gpu.md)). Torch's caching allocator counted the
bytes, and it shares no code with the predictions.

DiT-T/4 (a DiT-T/8 over tokens for the loss over a vocabulary), synthetic data, global batch 8 if no
other is named, an H100's kernels. *Allocated* and *reserved* are the highest counts of one rank
over set-up and four steps, in MiB. The test allows 0.5 % of allocated, and 2 % or 2 MiB of
reserved (`tests/rehearsal`).

Made by `python -m tests.rehearsal.rows FOLDER`; a test holds the same rows.
"""
TWICE = """*Old buckets of DDP.* In the second step DDP makes its gradient buckets anew.
ProcessGroupNCCL holds the old ones until its watchdog has seen the end of the collective and
another collective begins. The watchdog looks every 100 ms. `tests/rehearsal/buckets.py` trains a
small model 20 times, and a test holds what it shows. With 0, 50, 150 and 300 ms between the steps
the old buckets lived on in 5, 2, 0 and 0 of 5 trainings.

A prediction counts the old buckets in *allocated* and *reserved*, and in no later step. A row of
`ddp` may so hold up to one set of gradients less than predicted.
"""


def absent(recipe: str) -> str:
    """Return why a recipe is not rehearsed; empty if it is."""
    parts = recipe.split("+")
    names = [recipe, *parts, *(part.partition(":")[0] for part in parts)]
    return next((ABSENT[part] for part in names if part in ABSENT), "")


# ---- the rows ----


def every(*, present: bool = True) -> dict[str, dict[str, Any]]:
    """Return name -> row, as a suite file has it: the rows of ``check`` for a CPU and a GPU that
    are rehearsed, or those that are not."""
    items = {name(**item): item for item in _items()}
    return {key: row for key, row in items.items() if bool(absent(row["recipe"])) != present}


def _items() -> Iterator[dict[str, Any]]:
    check = yaml.safe_load(known_suites()["check"].read_text())
    for item in [*check["recipes"], *check["cpu_recipes"], *check["gpu_recipes"], *MORE]:
        item = dict(item) if isinstance(item, dict) else {"recipe": item}
        item.setdefault("processes", 1 if item["recipe"].startswith("single") else 2)
        brief = BRIEF if item.get("workload") == "sample" else {}
        yield {"global_batch": BATCH, **brief, **item}


def name(
    *, processes: int, recipe: str, global_batch: int, workload: str = "train", **more: Any
) -> str:
    """Return what a row is called: its cards, its recipe, and in what it differs from others."""
    text = parse(recipe, ema=True, workload=workload).text
    batch = "" if global_batch == BATCH else f", batch {global_batch}"
    return f"{processes} {text}{batch}{', drawn' if workload == 'sample' else ''}"


# ---- what they gave ----


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """A row's result, as JSON has it, and its prediction."""

    result: dict[str, Any]
    prediction: Prediction

    def highest(self, count: str) -> int:
        """Return the highest ``count`` of torch's allocator on the predicted rank, in bytes."""
        phases = self.result["ranks"][self.prediction.rank]["phases"].values()
        return max(phase[count] for phase in phases)

    @property
    def old_buckets(self) -> int:
        """Bytes that the prediction counts and that may be gone: DDP's of the first step."""
        twice = self.prediction.recipe.startswith("ddp")
        return max(0, self.prediction.allocated - self.prediction.peak.bytes) if twice else 0

    @property
    def off(self) -> float:
        """The error of predicted allocated bytes, as a share of them; 0 if DDP's old
        buckets explain all of it."""
        found, predicted = self.highest("allocated"), self.prediction.allocated
        nearest = min(max(found, predicted - self.old_buckets), predicted)
        return nearest / found - 1

    @property
    def off_reserved(self) -> int:
        """The error of predicted reserved bytes, in bytes."""
        return self.prediction.reserved - self.highest("reserved")


def rehearsed(folder: Path) -> dict[str, Rehearsed]:
    """Train the rows that ``folder`` lacks; return all by name, those that failed too."""
    for cards in (1, 2, 4):
        _train(cards, [row for row in every().values() if row["processes"] == cards], folder)
    return read(sorted(folder.glob("cards*/runs/*/result.json")), folder / "predictions")


def read(paths: Sequence[Path], folder: Path) -> dict[str, Rehearsed]:
    """Return the rows of these results, with their predictions, which ``folder`` keeps."""
    results = [json.loads(path.read_text()) for path in paths]
    specs = [resolve(Spec(**result["spec"])) for result in results]
    found = pool.predict_all(specs, folder, kind="cudnn", jobs=1)
    pairs = zip(results, found, strict=True)
    return {name(**result["spec"]): Rehearsed(result, one) for result, one in pairs}


def _train(cards: int, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """``./run.sh run`` of these rows on so many rehearsed cards."""
    shared, suite = folder / f"shared{cards}", folder / f"cards{cards}.yaml"
    shared.mkdir(parents=True, exist_ok=True)
    settings = {"noise_floor": 1, "timeout_seconds": 400, "gpu": SMALL}
    suite.write_text(yaml.safe_dump({**settings, "recipes": rows}))
    env = {**os.environ, **build.environment([build.H100] * cards, shared)}
    line = ["./run.sh", "run", "--suite", str(suite), "--device", "cuda", "--no-predictions"]
    with (folder / f"cards{cards}.log").open("a") as log:
        line += ["--out", str(folder / f"cards{cards}")]
        subprocess.run(line, cwd=ROOT, env=env, stdout=log, stderr=log, check=False)


# ---- the page ----


def page(rows: Mapping[str, Rehearsed]) -> str:
    """Return the page of these rows in Markdown."""
    head = "| cards | recipe | allocated | predicted | off % | reserved | predicted | note |"
    lines = [TITLE, head, "|--:|---|--:|--:|--:|--:|--:|---|"]
    trained = [key for key in every() if key not in _failed(rows)]
    lines += [_line(key, rows[key]) for key in trained]
    lines += ["", TWICE, "## Rows of suite `check` that are not rehearsed", ""]
    lines += [f"- {_code(key)}: {absent(row['recipe'])}" for key, row in _left_out().items()]
    lines += [f"- {_code(key)}: not run: {_why(rows, key)}" for key in _failed(rows)]
    return "\n".join([*lines, ""])


def _left_out() -> dict[str, dict[str, Any]]:
    return every(present=False)


def _failed(rows: Mapping[str, Rehearsed]) -> list[str]:
    return [key for key in every() if key not in rows or rows[key].result["status"] != "ok"]


def _why(rows: Mapping[str, Rehearsed], key: str) -> str:
    return rows[key].result["reason"].splitlines()[0][:160] if key in rows else "not ended in time"


def _code(key: str) -> str:
    return f"`{key.partition(' ')[2]}`"


def _line(key: str, row: Rehearsed) -> str:
    cells = [key.partition(" ")[0], _code(key), f"{row.highest('allocated') / MIB:.2f}"]
    if row.prediction.allocated is None:
        cells += ["-", "-", f"{row.highest('reserved') / MIB:.0f}", "-", row.prediction.reason]
        return f"| {' | '.join(cells)} |"
    note = MISSES.get(key, "")
    if (
        row.old_buckets > MIB
        and abs(row.prediction.allocated / row.highest("allocated") - 1) > 0.005
    ):
        note = "without DDP's old buckets"
    cells += [f"{row.prediction.allocated / MIB:.2f}", f"{100 * row.off:+.2f}"]
    cells += [f"{row.highest('reserved') / MIB:.0f}", f"{row.prediction.reserved / MIB:.0f}", note]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(rehearsed(Path(sys.argv[1]).resolve())))
