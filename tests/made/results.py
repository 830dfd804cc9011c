"""The result sets that the report's tests read, built by hand: one without a GPU, one with.

Their files lie in tests/golden/report/{cpu,gpu}. Build them again, with the reports expected of
them, from the repository's root:

    PYTHONPATH=. python tests/made/results.py
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.json_files import write_json
from harness.report import build, read_suite
from harness.report.rendering import pages
from harness.report.rendering.export import csv_text
from harness.result import (
    Categories,
    Check,
    LaunchRecord,
    Peak,
    Rank,
    Result,
    Status,
    StepUsage,
    load_all,
)
from harness.spec import Spec
from strategies import parse
from strategies.evidence.rules import label

GOLDEN = Path(__file__).parents[1] / "golden" / "report"
MIB, GIB = 2**20, 2**30
CPU = {"model": "DiT-S/4", "data": "digits", "global_batch": 16, "steps": 8, "warmup": 2}
GPU = {**CPU, "model": "DiT-XL/2", "data": "synthetic", "global_batch": 64, "device": "cuda"}
VERSIONS = {"torch": "2.9.0", "accelerate": "1.12.0", "deepspeed": "0.18.2", "numpy": "2.2.6"}
MACHINE = {
    "platform": "Linux-6.8.0-x86_64-with-glibc2.39",
    "python": "3.12.7",
    "cpu": "AMD EPYC 7B13",
    "cores": 8,
    "threads": 4,
    "memory_bytes": 33_554_432_000,
    "commit": "3f2a91c0d7be",
    "changed_files": 0,
    "versions": VERSIONS,
    "device": "cpu",
}
H100 = {
    **MACHINE,
    "device": "NVIDIA H100 80GB HBM3",
    "device_bytes": 85_029_158_912,
    "capability": [9, 0],
    "cuda": "12.8",
    "driver": "570.124.06",
    "allocator": "default",
}
SHARDINGS = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
# Parts of the peak in MiB: parameters, gradients, optimizer state, EMA, activations, workspace.
FULL = (126, 126, 252, 126, 96, 40)


def categories(parts: tuple[float, ...]) -> Categories:
    """The traced peak, from MiB."""
    sizes = [int(part * MIB) for part in parts]
    return Categories(
        parameters=sizes[0],
        gradients=sizes[1],
        optimizer_state=sizes[2],
        ema=sizes[3],
        activations=sizes[4],
        workspace=sizes[5],
        phase="backward",
        where="aten.mm",
        beyond_state=sizes[4] + sizes[5],
    )


def placed(parts: tuple[float, ...], hosted: tuple[float, ...] = ()) -> Categories:
    """The traced peak on a CPU, from MiB on the device and in host memory."""
    found = categories(parts)
    found.host = categories(hosted) if hosted else None
    found.everywhere = found.total + (found.host.total if found.host else 0)
    found.placed_by = "the engine's placement; on a CPU both are host memory"
    return found


def peaks(parts: tuple[float, ...], gpu: bool, skew: float) -> dict[str, Peak]:
    """The peaks of the phases that these parts make likely."""
    full = sum(parts) * 1.06 * skew
    states = sum(parts[:4]) * skew
    shares = {
        "load": parts[0] * 1.1,
        "prepare": parts[0] * 2 + parts[3],
        "first_step": full * 0.985,
        "steady": full,
        "forward": states - parts[1] + parts[4],
        "backward": full * 0.99,
        "optimizer": states + parts[5],
    }
    found = {}
    for phase, mib in shares.items():
        size = int(mib * MIB)
        more = {"process": size + 310 * MIB}
        if gpu:
            more = {
                "reserved": int(size * 1.12),
                "active": int(size * 1.01),
                "process": int(size * 1.12) + 620 * MIB,
            }
        found[phase] = Peak(allocated=size, **more)
    return found


def rank(
    index: int, step: float, parts: tuple[float, ...], spread: float, gpu: bool, of: int
) -> Rank:
    """One rank ``of`` so many; the second is a little slower and a little fuller than the first."""
    dice = random.Random(f"{index} {step} {parts}")
    seconds = [round(step * (1 + spread * dice.uniform(-1, 1)), 6) for _ in range(8)]
    return Rank(
        rank=index,
        device=f"cuda:{index}" if gpu else "cpu",
        baseline_bytes=(512 if gpu else 302) * MIB,
        phases=peaks(parts, gpu, 1 + 0.01 * index),
        categories=categories(parts) if gpu else placed(parts),
        host_peak_bytes=int((302 + sum(parts) * (0.3 if gpu else 1.08)) * MIB),
        pinned_bytes=0,
        nvme_bytes=0,
        warmup_seconds=[round(step * 2.4, 6), round(step * 1.1, 6)],
        step_seconds=seconds,
        phase_seconds={
            "start": 7.3,
            "load": 0.8,
            "prepare": 0.9,
            "warmup": step * 3.5,
            "measure": step * 8,
            "anatomy": step * 4,
        },
        step_usage=None if gpu else usage(step, seconds, of),
    )


def usage(step: float, seconds: list[float], ranks: int) -> StepUsage:
    """What the kernel counted for one of so many ``ranks`` on two cores that nobody else uses: the
    same work in each step, however long it took."""
    count = len(seconds)
    return StepUsage(
        cpu_seconds=[round(0.9 * step, 6)] * count,
        voluntary_switches=[40] * count,
        forced_switches=[20] * count,
        minor_faults=[30] * count,
        busy_seconds=[round(0.9 * ranks * step, 2)] * count,
        cores=2,
    )


def curves(shift: float) -> tuple[list[float], list[float]]:
    """Ten losses and gradient norms, moved by about ``shift`` relative to the reference's."""
    losses, norms = [], []
    for i in range(10):
        loss = 1.02 * math.exp(-0.09 * i) + 0.03 * math.sin(2.1 * i)
        norm = 2.4 * math.exp(-0.05 * i) + 0.2 * math.cos(1.3 * i)
        wave = shift * (0.55 + 0.45 * math.sin(1.7 * i + 1))
        losses.append(round(loss * (1 + wave), 9))
        norms.append(round(norm * (1 + 0.6 * wave), 9))
    return losses, norms


def zero_config(stage: int) -> dict:
    """The block of the engine's JSON that sizes its buffers."""
    sizes = {"stage": stage, "reduce_bucket_size": 2_064_384, "allgather_bucket_size": 2_064_384}
    if stage > 2:
        sizes |= {
            "stage3_prefetch_bucket_size": 1_331_136,
            "stage3_max_live_parameters": 5_324_544,
            "stage3_param_persistence_threshold": 2304,
            "sub_group_size": 4_128_768,
        }
    return {"zero_optimization": sizes}


def audit(spec: Spec) -> list[Check]:
    """Checks that hold."""
    pairs = {
        "processes": spec.processes,
        "global batch": [spec.global_batch],
        "optimizer steps": spec.steps + spec.warmup,
        "losses finite": True,
        f"evidence: {spec.recipe.split('+')[0]}": "shown",
    }
    return [Check(name=k, asked=v, found=v, ok=True) for k, v in pairs.items()]


def done(
    recipe: str,
    step: float,
    parts: tuple[float, ...],
    *,
    shift: float = 1e-7,
    parity: str = "exact",
    spread: float = 0.04,
    stage: int = 0,
    **spec_fields: object,
) -> Result:
    """A run that ended well: ``step`` seconds a step, ``parts`` MiB at the peak."""
    spec = Spec(recipe=recipe, **{**CPU, "processes": 2, **spec_fields})
    gpu = spec.device == "cuda"
    losses, norms = curves(shift)
    kind = "bfloat16" if "bf16" in recipe else "float32"
    stored = kind if stage else "float32"
    precise = {
        **{"compute_dtype": kind, "parameters": stored, "master": "float32", "moments": "float32"},
        **({} if kind == "bfloat16" else {"tf32": False}),
    }
    engine = "DEEPSPEED" if stage else "MULTI_GPU" if gpu else "MULTI_CPU"
    sharding = recipe.partition("+")[0]
    return Result(
        status=Status.OK,
        spec=spec,
        parity=parity,
        phase="done",
        command=command(spec),
        identity=spec.key,
        started="2026-03-02T09:30:00+00:00",
        meter="cuda" if gpu else "resident",
        flops_per_step=4.5e13 if gpu else 5.9e11,
        parameters=675_129_632 if gpu else 32_577_184,
        micro_batch=spec.global_batch // spec.processes,
        losses=losses,
        grad_norms=norms,
        ranks=[
            rank(i, step * (1 + 0.01 * i), parts, spread, gpu, spec.processes)
            for i in range(spec.processes)
        ],
        audit=audit(spec),
        evidence={
            sharding: label({"distributed_type": engine, "stage": stage}, "distributed_type"),
            "bf16" if kind == "bfloat16" else "fp32": precise,
        },
        configs={
            "launch_file": f"launch_configs/{sharding}.yaml",
            "deepspeed": zero_config(stage) if stage else None,
            "initial_weights": "5d1f0c22b09e7a41",
        },
        environment=H100 if gpu else MACHINE,
        launch=LaunchRecord(
            exit_code=0, wall_seconds=21.5 + 14 * step, tree_peak_bytes=int(sum(parts) * 2.9) * MIB
        ),
    )


def command(spec: Spec) -> str:
    """The command line of a spec."""
    return (
        f"accelerate launch --config_file launch_configs/{spec.recipe.split('+')[0]}.yaml "
        f"--num_processes {spec.processes} -m harness.train {spec} "
        f"--out results/demo/runs/{spec.key}"
    )


def gone(recipe: str, status: Status, reason: str, way_out: str | None, **more: object) -> Result:
    """A run without a measurement."""
    fields = {k: more.pop(k) for k in list(more) if k in GPU or k == "processes"}
    spec = Spec(recipe=recipe, **{**CPU, "processes": 2, **fields})
    return Result(
        status=status,
        spec=spec,
        reason=reason,
        way_out=way_out,
        command=command(spec),
        environment=MACHINE,
        launch=LaunchRecord(exit_code=1, wall_seconds=9.4, tree_peak_bytes=None),
        **more,
    )


def cpu_set() -> dict[str, Result]:
    """A suite on two CPU processes, by run name; every kind of ending is in it."""
    half = (126, 126, 126, 126, 96, 52)
    void = done("zero1", 0.41, half, stage=1)
    void.audit.append(Check(name="micro batch", asked=[8], found=[4], ok=False))
    offload = done("zero3_offload", 0.842, (66, 63, 130, 63, 97, 88), stage=3)
    for one in offload.ranks:
        one.categories = placed((66, 12, 0, 63, 97, 40), (0, 51, 130, 0, 0, 48))
    return {
        "ddp": done("ddp", 0.402, FULL, shift=0.0),
        "ddp-r1": done("ddp", 0.398, FULL, shift=0.0, repeat=1),
        "ddp-r2": done("ddp", 0.409, FULL, shift=0.0, repeat=2),
        "ddp-bf16": done("ddp+bf16", 0.661, (126, 126, 252, 126, 50, 62), **design(4.1e-3)),
        "ddp-checkpoint": done("ddp+checkpoint", 0.497, (126, 126, 252, 126, 22, 41)),
        "ddp-ema": done("ddp+ema:place=cpu", 0.411, FULL),
        "single": done("single", 0.733, (126, 126, 252, 126, 182, 36), processes=1, shift=2e-7),
        "zero1": void,
        "zero2-r0": done("zero2", 0.431, (126, 63, 126, 126, 96, 58), stage=2, shift=3e-7),
        "zero2-r1": done("zero2", 0.436, (126, 63, 126, 126, 96, 58), stage=2, repeat=1),
        "zero2-checkpoint": done(
            "zero2+checkpoint", 0.552, (126, 63, 126, 126, 23, 59), stage=2, spread=0.45
        ),
        "zero3": done("zero3", 0.604, (66, 63, 126, 63, 96, 61), stage=3, shift=6e-7),
        "zero3-checkpoint": done("zero3+checkpoint", 0.703, (66, 63, 126, 63, 24, 60), stage=3),
        "zero3-offload": offload,
        "ddp-accumulate": done("ddp+accumulate:steps=4", 0.455, FULL, shift=0.021),
        "zero3-nvme": gone(
            "zero3_nvme",
            Status.UNSUPPORTED,
            "async_io cannot be built: libaio headers are missing",
            "apt-get install libaio-dev",
        ),
        "zero2-huge": gone(
            "zero2+accumulate:steps=32",
            Status.REFUSED,
            "global_batch 16 does not divide by 2 processes x 32 accumulation steps",
            "use --global-batch 64",
        ),
    }


def large_set(count: int) -> Iterator[tuple[str, Result]]:
    """Yield ``count`` measured rows of one group by run name, ddp first; their memory and time
    differ."""
    dice = random.Random(7)
    yield "ddp", done("ddp", 0.4, FULL, shift=0.0)
    for index in range(1, count):
        recipe = f"{dice.choice(SHARDINGS)}+checkpoint:every={index}"
        parts = tuple(part * dice.uniform(0.3, 1.5) for part in FULL)
        yield f"row-{index}", done(recipe, dice.uniform(0.3, 2.0), parts)


def design(shift: float) -> dict:
    """The keywords of a row that computes something else by design."""
    return {"parity": "by design", "shift": shift}


def gpu_set() -> dict[str, Result]:
    """A suite on two H100s, with a row that did not fit."""
    full = (2575, 2575, 5151, 2575, 21800, 900)
    slim = (2575, 2575, 5151, 2575, 2600, 1100)
    found = {
        "ddp": done("ddp", 0.602, full, shift=0.0, spread=0.008, processes=2, **GPU),
        "ddp-bf16": done(
            "ddp+bf16", 0.213, (*full[:4], 12400, 1400), spread=0.01, **GPU, **design(3e-3)
        ),
        "ddp-checkpoint": done("ddp+checkpoint", 0.784, slim, spread=0.006, **GPU),
        "zero2-bf16": done(
            "zero2+bf16",
            0.226,
            (1288, 644, 3863, 2575, 12400, 1700),
            stage=2,
            **GPU,
            **design(4e-3),
        ),
        "zero3-bf16-checkpoint": done(
            "zero3+bf16+checkpoint",
            0.341,
            (644, 644, 3863, 1288, 1400, 1500),
            stage=3,
            **GPU,
            **design(4e-3),
        ),
        "zero3-offload-bf16": done(
            "zero3_offload+bf16",
            1.94,
            (644, 644, 90, 60, 12400, 2200),
            stage=3,
            **GPU,
            **design(4e-3),
        ),
        "single": gone(
            "single",
            Status.GPU_OOM,
            "CUDA out of memory: tried to allocate 1.13 GiB, 0.41 GiB free of 79.19 GiB",
            "try +checkpoint, +bf16, or a smaller --global-batch",
            phase="first_step",
            step=0,
            peak_so_far_bytes=78_310_000_000,
            log_tail='  File "harness/loop.py", line 61, in optimizer_step\n'
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.13 GiB.",
            **{**GPU, "processes": 1},
        ),
    }
    for one in found["zero3-offload-bf16"].ranks:
        one.host_categories = categories((0, 0, 3773, 1228, 0, 310))
        one.pinned_bytes = 4096 * MIB
    return found


def ok(recipe: str) -> Result:
    rank = Rank(
        rank=0,
        device="cpu",
        baseline_bytes=0,
        phases={"steady": Peak(allocated=3 * GIB // 2)},
        categories=None,
        host_peak_bytes=0,
        pinned_bytes=0,
        nvme_bytes=0,
        warmup_seconds=[9.0],
        step_seconds=[0.1, 0.3, 0.2],
        phase_seconds={},
    )
    return Result(status=Status.OK, spec=Spec(recipe=recipe), ranks=[rank])


STATE = 120.0
"""MiB of parameters, gradients, optimizer state and average, in the rows built here."""


def row(recipe: str, beyond: float, *, state: float = STATE, evidence: dict | None = None, **spec):
    """A measured row of so many MiB of state, and MiB beyond it."""
    parts = (state * 0.2, state * 0.2, state * 0.4, state * 0.2, beyond, 0.0)
    spec = {"global_batch": 32, "processes": 1, **spec}
    result = done(parse(recipe).text, 1.0, parts, **spec)
    result.evidence |= evidence or {}
    return result


def write_set(
    folder: Path,
    results: Mapping[str, Result] | Iterable[tuple[str, Result]],
    suite: dict[str, str],
) -> None:
    """Write a set as a run leaves it."""
    shutil.rmtree(folder, ignore_errors=True)
    write_json(folder / "suite.json", suite)
    for name, result in dict(results).items():
        result.write(folder / "runs" / name / "result.json")


def main() -> None:
    """Write both sets and the reports expected of them."""
    started = "2026-03-02T09:30:00+00:00"
    for name, built in (("cpu", cpu_set()), ("gpu", gpu_set())):
        folder = GOLDEN / name
        write_set(folder, built, {"name": f"demo-{name}", "reference": "ddp", "started": started})
        report = build(*load_all(folder), read_suite(folder))
        (folder / "report.md").write_text(pages.render_markdown(report), encoding="utf-8")
        (folder / "report.csv").write_text(csv_text(report), encoding="utf-8")


if __name__ == "__main__":
    main()
