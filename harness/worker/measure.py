"""Measured run of one rank: prepare, run steps, trace memory, audit, and build the result."""

from __future__ import annotations

import importlib
import os
import resource
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from harness.memory import dissect
from harness.memory.traced_step import trace_step
from harness.resolve import Resolved
from harness.result import Check, Rank, Result, Status
from harness.void import settle
from harness.worker import environment, loop, passes, setup
from harness.worker.audit import audit, collect_evidence, gather
from harness.worker.loop import Run
from harness.worker.meter import cards_before, make_meter
from harness.worker.projections import Watch, in_blocks
from harness.worker.samples import GpuWatch, as_usage
from harness.worker.status import Reporter
from harness.worker.training import Training
from strategies.evidence import states
from strategies.evidence.watching import observing


def altered(run: Run) -> list[Check]:
    """Change ``run`` as a test asks, and return the check that makes its result void.

    HEADROOM_ALTER is "module:name"; the module has a table ``ALL`` of functions of a run.
    """
    place = os.environ.get("HEADROOM_ALTER")
    if not place:
        return []
    module, _, name = place.partition(":")
    importlib.import_module(module).ALL[name](run)
    return [Check(name="untouched", asked="yes", found=f"altered: {name}", ok=False)]


def measure(
    resolved: Resolved,
    folder: Path,
    reporter: Reporter,
    training: Training | None = None,
    memory_limit: int | None = None,
    breakdown: bool = False,
) -> Result | None:
    """Run and measure one rank; return the result on rank 0, None on the others.

    Args:
        training: makes it a training run.
        memory_limit: bytes, 0 for none; makes it a trial that tests whether a batch fits, without a
            traced step.
        breakdown: also write ``anatomy.json`` to the folder.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    run = begin(resolved, folder, reporter, memory_limit)
    traced = training is None and memory_limit is None
    if training is not None:
        training.begin(run)
    touched, watch = altered(run), watched(run) if traced else None
    if training is not None:
        order = passes.training_steps(run, training)
    else:
        order = passes.measured_steps(run) if traced else passes.trial_steps(run)
    passes.take(run, order)
    did = watch.end(gather) if watch else None
    if resolved.spec.profile:
        reporter.enter("profile")
        here = run.accelerator
        loop.profiled_steps(run.step, folder, here.process_index, here.device)
    reporter.enter("anatomy")
    categories = traced_steps(run) if traced else {}
    if breakdown:
        taken = dissect.take(run)
        if run.accelerator.is_main_process:
            taken.write(folder / "anatomy.json")
    if traced:
        with observing(run, resolved.recipe.strategies, run.feed.dataset):
            run.step()
    reporter.enter("evidence")
    evidence, checks = collect_evidence(run)
    losses = run.all_losses()
    checks = audit(run, losses, did) + checks
    reporter.enter("save")
    if training is not None:
        training.finish(run)
    ranks = gather(run, measured_rank(run, categories))
    if not run.accelerator.is_main_process:
        return None
    facts = {"started": started, "evidence": evidence, "projections": in_blocks(did)}
    return result_of(run, ranks, losses, touched + checks, facts)


def begin(
    resolved: Resolved,
    folder: Path,
    reporter: Reporter,
    memory_limit: int | None = None,
    kind: type[Run] = Run,
) -> Run:
    """Prepare everything up to the first step, with a peak for each phase."""
    before = cards_before(resolved.spec.device)
    accelerator = setup.make_accelerator(resolved)
    feed = None if resolved.spec.sampling else setup.build_feed(resolved, accelerator)
    setup.rehearse(resolved, accelerator)
    meter = make_meter(accelerator.device, before)
    if memory_limit:
        hold(accelerator.device, memory_limit)
    reporter.peak = meter.peak_bytes

    def enter(phase: str) -> None:
        reporter.enter(phase)
        meter.enter(phase)

    run = setup.prepare(resolved, feed, accelerator, reporter.own / "nvme", enter, kind)
    meter.notes += run.notes
    run.folder, run.reporter, run.meter = folder, reporter, meter
    if accelerator.device.type == "cuda" and accelerator.is_main_process:
        run.gpus = GpuWatch(resolved.spec.local_processes)
    return run


def hold(device: torch.device, limit_bytes: int) -> None:
    """Let this process allocate at most ``limit_bytes`` more; beyond that it runs out of memory.

    On a GPU torch's allocator enforces the limit. Without one the kernel does: RLIMIT_DATA counts
    private mappings, so an allocation fails as on a machine without free memory.
    """
    if device.type == "cuda":
        # accelerate's device of a single process is "cuda", without an index.
        device = torch.device("cuda", torch.cuda.current_device())
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    used = psutil.Process().memory_info().data  # private writable memory, touched or not
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, hard))


def watched(run: Run) -> Watch:
    """Record the compared steps from now on; the table of signs is in no metered phase."""
    run.meter.close()
    watch = Watch(run, run.feed)
    run.log.inputs = watch.inputs
    return watch


def traced_steps(run: Run) -> dict[str, Any]:
    """Run one or two untimed steps; return the tensors that were alive at the peak, by device."""
    if "compiled" in run.launch.traits:
        # A trace would run compiled graphs uncompiled, and cannot see their allocations.
        run.meter.notes.append("not traced by category: compiled graphs allocate unseen")
        return {}
    kinds = dict.fromkeys((run.accelerator.device.type, "cpu"))
    return {kind: trace_step(run, kind, run.step, run.baseline) for kind in kinds}


def measured_rank(run: Run, categories: dict[str, Any]) -> Rank:
    """Return the measurements of this rank."""
    meter, here, log = run.meter, run.accelerator, run.log
    warmup = min(run.resolved.spec.warmup, log.timed_from)  # a training may end without one
    return Rank(
        rank=here.process_index,
        device="cpu" if here.device.type != "cuda" else torch.cuda.get_device_name(here.device),
        baseline_bytes=meter.baseline_bytes,
        phases=meter.phases,
        categories=categories.get(here.device.type),
        host_categories=categories.get("cpu") if here.device.type == "cuda" else None,
        nvme_bytes=run.engine.report(run).swapped_bytes,
        warmup_seconds=log.seconds[:warmup],
        step_seconds=log.seconds[log.timed_from :],
        step_usage=as_usage(log.used[log.timed_from :]),
        phase_seconds=dict(run.reporter.phase_seconds),
    )


def result_of(
    run: Run,
    ranks: list[Rank],
    losses: list[float],
    checks: list[Check],
    facts: dict[str, Any],
) -> Result:
    """Return the result of all ranks; ``facts`` are further fields of it."""
    resolved, meter = run.resolved, run.meter
    file = resolved.launch.engine.file
    whole = run.engine.global_parameters(run)
    result = Result(
        status=Status.OK,
        spec=resolved.spec,
        parity=resolved.recipe.parity,
        phase="done",
        meter=meter.kind,
        meter_notes=meter.notes,
        flops_per_step=float(resolved.flops_per_step),
        parameters=states.count(whole.values(), run.engine),
        micro_batch=resolved.micro_batch,
        accumulation=resolved.recipe.accumulation,
        losses=losses,
        grad_norms=run.all_norms(),
        ranks=ranks,
        audit=checks,
        configs={
            "launch_file": f"launch_configs/{file.path.name}" if file.own else str(file.path),
            "accelerate": file.path.read_text(encoding="utf-8"),
            "deepspeed": run.engine.report(run).config,
            "initial_weights": run.digest,
        },
        environment=environment.describe(run.accelerator.device),
        gpu_samples=run.gpus.samples(),
        **facts,
    )
    return settle(result)
