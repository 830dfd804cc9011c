"""A measured run of one rank: prepare, warm up, time, dissect, prove, audit, and write it down."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness import anatomy, environment, record, setup
from harness.audit import audit, collect_evidence
from harness.fit import Fit
from harness.loop import Log, Run, optimizer_step, timed_step
from harness.memory_limit import hold
from harness.meter import Meter, make_meter, pinned_bytes, resident_peak_bytes
from harness.resolve import Resolved
from harness.result import Check, Rank, Result, Status
from harness.status import Reporter
from strategies import frozen, zero

__all__ = ["measure"]


def train_steps(
    run: Run, log: Log, meter: Meter, reporter: Reporter, resolved: Resolved, fit: Fit | None
) -> None:
    """Warm-up, then the timed steps: one loop, in several chapters of the books."""
    warmup, first = resolved.spec.warmup, run.trained.optimizer_steps
    total = max(warmup + 1, warmup + resolved.spec.steps - first)
    chapters = {0: "first_step", 1: "warmup", warmup: "steady"}
    for index in range(total):
        if index in (0, warmup):
            timed = index == warmup
            reporter.enter("measure" if timed else "warmup", total - warmup if timed else warmup)
        if index in chapters:
            meter.enter(chapters[index])
        timed_step(run, first + index, log, meter)
        more = {} if fit is None else {"loss": float(log.losses[-1])}
        reporter.at(index + 1 - (warmup if index >= warmup else 0), **more)
        if fit is not None:
            fit.after_step(run, resolved, log, last=index + 1 == total)
    meter.close()


def dissect(run: Run, log: Log, meter: Meter, device_type: str) -> dict[str, Any]:
    """Two or three more steps, untimed: the peak of each phase, and what lived at the peak."""
    step = run.trained.optimizer_steps
    with anatomy.phase_marks(run.trained, meter.enter):
        optimizer_step(run, step, log)
        meter.synchronize()
    meter.close()
    found = {}
    if "compiled" in run.trained.launch.traits:
        # A trace would run compiled graphs uncompiled, and cannot see what they allocate.
        meter.notes.append("not traced by category: compiled graphs allocate unseen")
        return found
    for kind in dict.fromkeys((device_type, "cpu")):
        # Data opened before a CPU's baseline is in it; a GPU's allocator counts it.
        held = () if device_type == "cuda" else vars(run.feed.dataset).values()
        found[kind] = anatomy.trace_step(
            run.trained, kind, lambda: optimizer_step(run, run.trained.optimizer_steps, log), held
        )
    return found


def measure(
    resolved: Resolved,
    folder: Path,
    reporter: Reporter,
    fit: Fit | None = None,
    memory_limit: int | None = None,
    *,
    portrait: bool = False,
) -> Result | None:
    """A measured run; the result on rank 0, None elsewhere. ``fit`` makes it a training run,
    ``memory_limit`` (bytes, 0 for none) a trial whether it fits, in which no step is traced.
    ``portrait`` leaves ``anatomy.json`` in its folder as well."""
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    accelerator = setup.make_accelerator(resolved)
    feed = setup.build_feed(resolved, accelerator)
    setup.rehearse(resolved, accelerator)
    meter = make_meter(accelerator.device)
    if memory_limit:
        hold(accelerator.device, memory_limit)
    reporter.peak = meter.peak_bytes

    def enter(phase: str) -> None:
        reporter.enter(phase)
        meter.enter(phase)

    run, log = setup.prepare(resolved, feed, accelerator, folder / "nvme", enter), Log()
    if fit is not None:
        fit.begin(run, resolved, log)
    train_steps(run, log, meter, reporter, resolved, fit)
    averages = _record(resolved, run, log, folder, reporter)
    warmup, timed = np.split(np.array(log.seconds), [resolved.spec.warmup])
    reporter.enter("anatomy")
    plain = fit is not None or memory_limit is not None
    categories = {} if plain else dissect(run, log, meter, accelerator.device.type)
    if portrait:
        _portray(resolved, run, log, meter, folder)
    reporter.enter("evidence")
    evidence, checks = collect_evidence(resolved, run.trained)
    losses = log.all_losses(run)
    checks = audit(resolved, run.trained, log.positions, losses, run.digest) + checks
    reporter.enter("save")
    if fit is not None:
        fit.finish(run, resolved)
    mine = Rank(
        rank=accelerator.process_index,
        device=setup.to_device_note(accelerator.device),
        baseline_bytes=meter.baseline_bytes,
        phases=meter.phases,
        categories=categories.get(accelerator.device.type),
        host_categories=categories.get("cpu") if accelerator.device.type == "cuda" else None,
        host_peak_bytes=_host_peak(meter),
        pinned_bytes=pinned_bytes(),
        nvme_bytes=_nvme_bytes(run),
        warmup_seconds=warmup.tolist(),
        step_seconds=timed.tolist(),
        phase_seconds=dict(reporter.phase_seconds),
    )
    ranks = _gather(accelerator, mine, resolved.launch.simulated)
    if not accelerator.is_main_process:
        return None
    facts = {"started": started, "meter": meter.kind, "meter_notes": meter.notes}
    facts |= {"key_averages": averages}
    return _result(resolved, run, log, ranks, losses, evidence, checks, facts)


def _record(
    resolved: Resolved, run: Run, log: Log, folder: Path, reporter: Reporter
) -> list[dict[str, Any]]:
    """A profiler's key averages of steps after the timed ones, if asked for."""
    if not resolved.spec.profile:
        return []
    reporter.enter("profile")
    trained = run.trained
    return record.profiled_steps(
        lambda: optimizer_step(run, trained.optimizer_steps, log),
        folder,
        trained.accelerator.process_index,
        trained.accelerator.device,
    )


def _portray(resolved: Resolved, run: Run, log: Log, meter: Meter, folder: Path) -> None:
    from harness.dissect import take

    taken = take(resolved, run, log, meter)
    if run.trained.accelerator.is_main_process:
        taken.write(folder / "anatomy.json")


def _result(
    resolved: Resolved,
    run: Run,
    log: Log,
    ranks: list[Rank],
    losses: list[float],
    evidence: dict[str, Any],
    checks: list[Check],
    facts: dict[str, Any],
) -> Result:
    failed = next((c for c in checks if not c.ok), None)
    reason = f"{failed.name}: asked {failed.asked}, found {failed.found}" if failed else None
    return Result(
        status=Status.VOID if failed else Status.OK,
        reason=reason,
        way_out="not ranked: fix the cause named here, or the recipe" if failed else None,
        spec=resolved.spec,
        parity=resolved.recipe.parity.value,
        phase="done",
        flops_per_step=float(resolved.flops_per_step),
        parameters=frozen.count(run.trained.module.parameters()),
        micro_batch=resolved.micro_batch,
        accumulation=resolved.recipe.accumulation,
        # Of a simulated world both are of one rank's own samples: no curve to compare.
        losses=[] if resolved.spec.world else losses,
        grad_norms=[] if resolved.spec.world else log.all_norms(),
        ranks=ranks,
        audit=checks,
        evidence=evidence,
        configs=_configs(resolved, run),
        environment=environment.describe(run.trained.accelerator.device),
        **facts,
    )


def _configs(resolved: Resolved, run: Run) -> dict[str, Any]:
    engine = run.trained.engine
    return {
        "launch_file": f"launch_configs/{resolved.file.path.name}",
        "accelerate": resolved.file.path.read_text(encoding="utf-8"),
        "deepspeed": engine.config if engine is not None else None,
        "initial_weights": run.digest,
    }


def _host_peak(meter: Meter) -> int:
    """The resident meter resets the kernel's mark, so the highest of its phases is the peak."""
    marks = [p.process or 0 for p in meter.phases.values()] if meter.kind == "resident" else []
    return max([*marks, resident_peak_bytes()])


def _nvme_bytes(run: Run) -> int:
    if run.trained.engine is None:
        return 0
    return sum(size for _, size in zero.swap_files(run.trained.engine))


def _gather(accelerator: Any, mine: Rank, simulated: bool) -> list[Rank]:
    if accelerator.num_processes == 1 or simulated:
        return [mine]
    everyone: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(everyone, mine)
    return everyone
