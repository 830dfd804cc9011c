"""Result sets for tests of the report, recorded by hand in tests/golden/report: cpu and gpu.

``PYTHONPATH=. python tests/made/results.py`` writes the recorded results again with today's fields,
and the reports expected of them.
"""

from __future__ import annotations

from pathlib import Path

from harness.report import build, read_suite
from harness.report.rendering import pages
from harness.report.rendering.export import csv_text
from harness.result import Categories, LaunchRecord, Peak, Rank, Result, Status, load, load_all
from harness.spec import Spec

GOLDEN = Path(__file__).parents[1] / "golden" / "report"
MIB, GIB = 2**20, 2**30
CPU = {"model": "DiT-S/4", "data": "digits", "global_batch": 16, "steps": 8, "warmup": 2}
GPU = {**CPU, "model": "DiT-XL/2", "data": "synthetic", "global_batch": 64, "device": "cuda"}
PARTS = ("parameters", "gradients", "optimizer_state", "ema", "activations", "workspace")
FULL = (126, 126, 252, 126, 96, 40)
"""MiB of ``PARTS`` in the peak of plain ddp."""


def recorded(name: str) -> dict[str, Result]:
    """The results of a set, by run name."""
    paths = sorted((GOLDEN / name / "runs").glob("*/result.json"))
    return {path.parent.name: load(path) for path in paths}


def cpu_set() -> dict[str, Result]:
    """A suite on two CPU processes; every kind of ending is in it."""
    return recorded("cpu")


def gpu_set() -> dict[str, Result]:
    """A suite on two H100s, with a row that did not fit."""
    return recorded("gpu")


MACHINE = load(GOLDEN / "cpu/runs/ddp/result.json").environment


def categories(parts: tuple[float, ...], cpu: bool) -> Categories:
    """A traced peak, from MiB."""
    sizes = {name: int(part * MIB) for name, part in zip(PARTS, parts, strict=True)}
    beyond = sizes["activations"] + sizes["workspace"]
    found = Categories(**sizes, phase="backward", where="aten.mm", beyond_state=beyond)
    if cpu:
        found.everywhere = found.total
        found.placed_by = "the engine's placement; on a CPU both are host memory"
    return found


def done(
    recipe: str,
    step: float,
    parts: tuple[float, ...],
    *,
    shift: float = 1e-7,
    parity: str = "exact",
    **fields: object,
) -> Result:
    """A run that ended well: ``step`` seconds a step, ``parts`` MiB at the peak, and a loss curve
    a share ``shift`` away from the recorded ddp's."""
    spec = Spec(recipe=recipe, **{**CPU, "processes": 2, **fields})
    made = load(GOLDEN / ("gpu" if spec.device == "cuda" else "cpu") / "runs/ddp/result.json")
    made.spec, made.parity, made.identity = spec, parity, spec.key
    made.micro_batch = spec.global_batch // spec.processes
    made.losses = [loss * (1 + shift) for loss in made.losses]
    kind = "bfloat16" if "bf16" in recipe else "float32"
    types = {"parameters": "float32", "master": "float32", "moments": "float32"}
    exact = {} if kind == "bfloat16" else {"tf32": False}
    made.evidence = {"precision": {"compute_dtype": kind, **types, **exact}}
    made.ranks = made.ranks[: spec.processes]
    for rank in made.ranks:
        times = step / rank.step_seconds[0]
        rank.step_seconds = [times * seconds for seconds in rank.step_seconds]
        rank.categories = categories(parts, spec.device == "cpu")
        if used := rank.step_usage:
            used.cpu_seconds = [times * seconds for seconds in used.cpu_seconds]
            used.busy_seconds = [times * seconds for seconds in used.busy_seconds]
    return made


def gone(recipe: str, status: Status, reason: str, way_out: str | None, **fields: object) -> Result:
    """A run without a measurement."""
    spec = Spec(recipe=recipe, **{**CPU, "processes": 2, **fields})
    ended = LaunchRecord(exit_code=1, wall_seconds=9.4, tree_peak_bytes=None)
    told = {"reason": reason, "way_out": way_out, "environment": MACHINE}
    return Result(status=status, spec=spec, launch=ended, **told)


def ok(recipe: str) -> Result:
    """A run of three steps with little else."""
    rank = Rank(
        rank=0, device="cpu", baseline_bytes=0, phases={"steady": Peak(allocated=3 * GIB // 2)},
        categories=None, nvme_bytes=0, warmup_seconds=[9.0],
        step_seconds=[0.1, 0.3, 0.2], phase_seconds={},
    )  # fmt: skip
    return Result(status=Status.OK, spec=Spec(recipe=recipe), ranks=[rank])


def main() -> None:
    """Write both sets again, and the reports expected of them."""
    for name in ("cpu", "gpu"):
        folder = GOLDEN / name
        for run, result in recorded(name).items():
            result.write(folder / "runs" / run / "result.json")
        report = build(*load_all(folder), read_suite(folder))
        (folder / "report.md").write_text(pages.render_markdown(report), encoding="utf-8")
        (folder / "report.csv").write_text(csv_text(report), encoding="utf-8")


if __name__ == "__main__":
    main()
