"""Optimizer steps of a foreign training loop: their order, their clock, and the result.

The loop belongs to the script, so this module runs no step. ``Bench.boundary`` is called between
two steps. The order of the steps is a generator: each ``yield`` is one step of the script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import torch

from harness.memory.record import RESIDENT
from harness.memory.traced_step import categories_of, tracing
from harness.result import Check, Result
from harness.script.model import REPLACED, Census, census
from harness.script.parts import OPTIMIZERS, settings_of
from harness.script.row import ScriptRow
from harness.script.settle import Finished
from harness.worker import passes, samples
from harness.worker.audit import collect_evidence, gather
from harness.worker.loop import Run
from harness.worker.measure import measured_rank, result_of
from strategies.engines.fsdp.engine import whole
from strategies.evidence import states
from strategies.evidence.watching import in_phase, observing

INPUTS = "inputs"
"""Phase from the start of a step to the trained model's forward: batches, VAE, text encoders."""


def steps_needed(row: ScriptRow, check: bool = False) -> int:
    """Return the optimizer steps that a run takes before it ends the script."""
    if check:
        return 2
    traced = 0 if "compiled" in row.launch.traits else 1 + (row.spec.device == "cuda")
    return row.spec.warmup + passes.READ + passes.SETTLING + row.spec.steps + traced + 1


class Bench:
    """One rank's measurement of a script's steps, from the first one on.

    ``watch`` observes the script (``harness.script.watch.Watch``).
    """

    def __init__(self, watch: Any, run: Run) -> None:
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.watch, self.row, self.run, self.log = watch, watch.row, run, run.log
        self.categories: dict[str, Any] = {}
        self.losses: list[torch.Tensor] = []
        self.micro: list[int] = []
        self.norm: Any = None
        self.types: list[str] = []
        self.inputs, self.in_inputs = contextlib.ExitStack(), False
        self.clocked = True
        self.validated: set[int] = set()
        self.census = self.beside()
        self.order = self._checked() if watch.check else self._measured()
        next(self.order)
        self._start_clock()

    # ---- events of a step ----

    def forward(self) -> None:
        """Receive the start of the trained model's forward pass."""
        self.inputs.close()
        if self.in_inputs:
            self.in_inputs = False
            self.run.meter.enter("forward")

    def without_gradients(self) -> None:
        """Receive a forward pass of the trained model outside of training, as of a validation."""
        if self.clocked:
            self.validated.add(len(self.log.seconds))

    def loss(self, loss: Any) -> None:
        """Receive the loss of a backward pass that begins."""
        self.losses.append(loss.detach().float().mean())
        self.run.micro_steps += 1

    def boundary(self) -> None:
        """Receive the end of one optimizer step, and begin the next."""
        self.run.meter.synchronize()
        if self.clocked:
            self.log.seconds.append(time.perf_counter() - self.began)
            self.log.used.append(samples.now() - self.before)
        self.inputs.close()
        self.run.optimizer_steps += 1
        losses = self.losses or [torch.full((), math.nan, device=self.run.accelerator.device)]
        self.log.losses.append(torch.stack(losses).mean())
        self.micro.append(len(self.losses))
        self.log.norms.append(self.norm)
        self.losses, self.norm = [], None
        for attachment in self.run.attached.values():
            attachment.after_step()
        if next(self.order, "end") == "end":
            self.finish()
            raise Finished
        self._start_clock()

    def _start_clock(self) -> None:
        if self.clocked:
            self.run.accelerator.wait_for_everyone()
        self.run.meter.synchronize()
        self.before, self.began = samples.now(), time.perf_counter()

    # ---- order of the steps ----

    def _measured(self) -> Iterator[None]:
        """Take the steps of a measured run, the traced ones, and one that added strategies
        watch."""
        for clocked in passes.measured_steps(self.run):
            self.clocked = clocked
            if clocked:
                yield
            else:
                yield from self._cut()
        self.clocked = False
        yield from self._traced()
        self.run.reporter.enter("evidence")
        with observing(self.run, self.row.recipe.strategies[1:]):
            self.inputs.enter_context(in_phase(INPUTS))
            yield

    def _checked(self) -> Iterator[None]:
        """Take one step metered as a whole, and a traced one."""
        self.run.reporter.enter("warmup", 1)
        for _ in passes.steps(self.run, 1, passes.WARMUP_PEAKS):
            yield
        self.run.meter.close()
        self.log.timed_from = 1
        yield from self._traced(once=True)

    def _cut(self) -> Iterator[None]:
        """Take the step with a peak for each of its phases, of which inputs are one more."""
        self.run.meter.enter(INPUTS)
        self.in_inputs = True
        yield
        self.in_inputs = False

    def _traced(self, once: bool = False) -> Iterator[None]:
        """Take one step for each kind of memory, and keep the tensors alive at its peak."""
        if "compiled" in self.run.launch.traits:
            note = "not traced by category: compiled graphs allocate unseen"
            self.run.meter.notes.append(note)
            return
        self.run.reporter.enter("anatomy")
        kinds = dict.fromkeys((self.run.accelerator.device.type, "cpu"))
        for kind in list(kinds)[:1] if once else kinds:
            now = self.beside()
            known = {"ema": now.averages, RESIDENT: now.tensors}
            with tracing(self.run, kind, known=known) as tracer:
                del now, known
                yield
            self.categories[kind] = categories_of(tracer, self.run)

    # ---- result ----

    def finish(self) -> Result | None:
        """Collect the evidence of all ranks; on rank 0 write the result and return it."""
        run, log, here = self.run, self.log, self.run.accelerator
        self.run.reporter.enter("evidence")
        losses = here.reduce(torch.stack(log.losses), reduction="mean").tolist()
        log.norms = [None if norm is None else float(whole(norm)) for norm in log.norms]
        if any(part.name in OPTIMIZERS for part in self.row.recipe.strategies):
            run.settings = settings_of(run.inner_optimizer)  # as its schedule has changed them
        evidence, checks = collect_evidence(run)
        types = {"compute_dtype": self.types[0]} if self.types and self.types[0] else {}
        types |= states.stored_dtypes(run)
        evidence |= {"precision": types, "script": self.watch.facts()}
        checks += self._audit(losses)
        self.run.reporter.enter("save")
        accumulation, notes = max(1, self._accumulation()), self._notes()
        batch = self.watch.global_batch() * accumulation
        if not batch:
            notes.append(
                "batch unknown: the script prepares no DataLoader with a batch size, so that one "
                "sample stands for one step in samples per second"
            )
        # The row with the batch that was read off the run.
        spec = dataclasses.replace(self.row.spec, global_batch=batch or 1)
        micro = batch // (self.row.launch.layout.data * accumulation)
        self.run.resolved = dataclasses.replace(self.row, spec=spec, micro_batch=micro)
        self.run.meter.notes += notes
        mine = measured_rank(run, self.categories)
        mine.resident = self.census.by_owner
        ranks = gather(run, mine)
        if not here.is_main_process:
            return None
        facts = {"started": self.started, "projections": None}
        result = result_of(run, ranks, losses, checks, {**facts, "evidence": evidence})
        result.accumulation = accumulation
        result.write(self.run.folder / "result.json")
        return result

    def beside(self) -> Census:
        """Return the tensors beside the trained model."""
        return census([self.run.module], self.watch.before_prepare)

    def _notes(self) -> list[str]:
        """Return remarks for the reader of the row."""
        skipped = (f"{name} was left out {n} times" for name, n in self.watch.skipped.items())
        way_out = {REPLACED: "; delete the script's list of them after prepare"}
        census = (
            f"beside the trained model: {name}, {size / 2**20:.0f} MiB{way_out.get(name, '')}"
            for name, size in self.census.by_owner.items()
            if size >= 2**20
        )
        notes = [*self.watch.notes, *skipped, *census]
        timed = dict(enumerate(self.log.seconds[self.log.timed_from :], self.log.timed_from))
        within = [seconds for index, seconds in timed.items() if index in self.validated]
        others = [seconds for index, seconds in timed.items() if index not in self.validated]
        if within:
            text = f"{1e3 * statistics.median(within):.0f} ms"
            text += f" against {1e3 * statistics.median(others):.0f} ms" if others else ""
            notes.append(
                f"the model also ran without gradients inside {len(within)} of {len(timed)} timed "
                f"steps ({text}), as a validation does; leave it out, or make it rarer than the "
                "steps"
            )
        return notes

    def _accumulation(self) -> int:
        """Return the usual number of backward passes of a step."""
        return Counter(self.micro).most_common(1)[0][0] if self.micro else 0

    def _audit(self, losses: list[float]) -> list[Check]:
        """Return the checks that hold for every script."""
        run, here = self.run, self.run.accelerator
        engine_report = run.engine.report(run)
        variants = len(set(gather(run, tuple(self.micro))))
        rows = [
            ("processes", self.row.spec.processes, here.num_processes),
            ("device", self.row.spec.device, here.device.type),
            ("engine", self.row.launch.engine.file.kind, here.distributed_type.value),
            ("losses finite", True, all(map(math.isfinite, losses))),
            ("variants of the ranks' backward passes", 1, variants),
        ]
        steps = engine_report.steps if engine_report.steps is not None else states.counted(run)
        if steps is not None:
            rows.append(("optimizer stepped", True, steps > 0))
        return [Check(name=n, asked=a, found=f, ok=a == f) for n, a, f in rows]
