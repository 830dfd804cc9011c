"""Observations of a script in one process: its objects, its steps, and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from harness.script import settle
from harness.script.model import Found, Joined, blocks_of, frozen_linears, unwrapped
from harness.script.parts import Cannot, Swapped, settings_of, swap
from harness.script.row import CLIPPING, ScriptRow
from harness.script.settle import Refused, Void
from harness.script.steps import Bench, Finished
from harness.worker.loop import Run
from harness.worker.meter import cards_before, make_meter
from harness.worker.samples import GpuWatch
from harness.worker.status import Reporter
from strategies.subject import DataFacts

GIVE_UP = 3
"""Times that a script may swallow its end before its process exits."""


NONE_CLIPPED = (
    "clip_grad_norm_ got no parameters (an iterator that the optimizer emptied?), so nothing is "
    "clipped; give it a list, or model.parameters()"
)
NO_BACKWARD = (
    "the script steps its optimizer without accelerator.backward; call "
    "accelerator.backward(loss) instead of loss.backward()"
)
MADE_BEFORE = (
    "nothing was clipped: make the list that clip_grad_norm_ gets after accelerator.prepare, which "
    "replaces the parameters under FSDP2"
)


class Watch:
    """Observations of a script in one rank's process, and their measurement.

    Its methods end the script by Refused, Void (another training than was asked for) or Finished.
    """

    def __init__(
        self, row: ScriptRow, folder: Path, reporter: Reporter, *, check: bool = False
    ) -> None:
        self.row, self.folder, self.reporter, self.check = row, folder, reporter, check
        self.before = cards_before(row.spec.device)
        self.accelerator: Any = None
        self.meter: Any = None
        self.bench: Bench | None = None
        self.models: list[nn.Module] = []
        self.wrapped: list[nn.Module] = []
        self.blocks: list[nn.Module] = []
        self.linears: tuple[str, ...] = ()
        self.loaders: list[Any] = []
        self.seen_optimizers = Joined([])
        self.stepped: Counter[int] = Counter()
        self.backwards = self.swallowed = 0
        self.in_accumulate = self.ever_stepped = False
        self.ended: BaseException | None = None
        self.before_prepare: list[weakref.ref[Any]] = []
        self.clip: float | None = None
        self.notes: list[str] = []
        self.skipped: Counter[str] = Counter()
        self.given: dict[str, str] = {}

    # ---- the Accelerator ----

    def make(self, accelerator: Any, given: dict[str, Any], init: Callable[..., None]) -> None:
        """Run ``Accelerator.__init__`` with the arguments that this launch needs."""
        self.end_again()
        settle.check_variables(self.row)
        arguments, notes = settle.accelerator_arguments(self.row, given)
        for note in notes:
            self.note(note)
        init(accelerator, **arguments)
        if accelerator.num_processes == self.row.spec.processes:
            self.row.launch.engine.adopt(accelerator, self.row.launch.layout)
        settle.check_ranks(accelerator, self.row)
        shown = ("mixed_precision", "gradient_accumulation_steps", "log_with")
        self.given |= {name: str(given[name]) for name in shown if given.get(name) is not None}
        self.adopt(accelerator)

    def adopt(self, accelerator: Any) -> None:
        """Take this ``Accelerator`` as the script's; start the meter with the first one."""
        self.accelerator = accelerator
        if self.meter is None:
            self.meter = make_meter(accelerator.device, self.before)
            self.reporter.peak = self.meter.peak_bytes
            self.reporter.enter("load")
            self.meter.enter("load")

    # ---- prepare ----

    def preparing(self, accelerator: Any, given: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Return the arguments of ``prepare`` with the added strategies applied."""
        self.end_again()
        given = list(given)
        models = [m for m in given if isinstance(m, nn.Module) and trains(m)]
        optimizers = [o for o in given if isinstance(o, torch.optim.Optimizer)]
        if models and not self.models:
            self.reporter.enter("prepare")
            self.meter.enter("prepare")
        frozen = [m for m in given if isinstance(m, nn.Module) and not trains(m)]
        placed = named.get("device_placement") is not None
        settle.check_objects(self.row, models, frozen, optimizers, len(self.models), placed)
        try:
            for model in models:
                self._edit(model)
            given = self._swap_optimizers(given)
        except Cannot as error:
            raise Refused(str(error)) from None
        micro = next((batch_of(x) for x in given if isinstance(x, DataLoader)), None)
        scratch = self.reporter.own / "nvme"
        settle.settle_prepare(accelerator, self.row, models, micro, scratch)
        self.models += models
        self.before_prepare += [weakref.ref(p) for m in models for p in m.parameters()]
        return given

    def _edit(self, model: nn.Module) -> None:
        """Find the model's blocks, and apply the added strategies."""
        blocks = blocks_of(model)
        linears = frozen_linears(model, blocks)
        found = self._subject(blocks, linears)
        for part in self.row.recipe.strategies[1:]:
            part.edit_model(model, found)
        self.blocks += blocks
        self.linears += linears

    def _subject(self, blocks: list[nn.Module], linears: tuple[str, ...]) -> Found:
        return Found(
            model=self.row.spec.model,
            data=DataFacts(1, 1, 1, 1),
            script=self.row.script,
            members=blocks,
            own_linears=linears,
        )

    def _swap_optimizers(self, given: list[Any]) -> list[Any]:
        """Replace the optimizers by that of an added strategy, also in their schedulers."""
        part = next((p for p in self.row.recipe.strategies if isinstance(p, Swapped)), None)
        if part is None:
            return given
        kind, new = torch.optim.lr_scheduler.LRScheduler, list(given)
        for place, optimizer in enumerate(given):
            if isinstance(optimizer, torch.optim.Optimizer):
                new[place] = swap(part, optimizer, self.row.launch)
                for one in [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]:
                    if getattr(one, "optimizer", None) is optimizer:
                        one.optimizer = new[place]
        return new

    def prepared(self, accelerator: Any, result: Any) -> None:
        """Record the prepared objects, and watch the forward passes of the models."""
        self.accelerator = accelerator
        members = list(result) if isinstance(result, (tuple, list)) else [result]
        self.loaders += [m for m in members if hasattr(m, "total_batch_size")]
        self.watch_models([m for m in members if isinstance(m, nn.Module)])

    def watch_models(self, models: Sequence[nn.Module]) -> None:
        """Register a hook on each of these prepared models that has trained weights."""
        for model in models:
            if trains(model) and not any(model is known for known in self.wrapped):
                self.wrapped.append(model)
                model.register_forward_pre_hook(self.guarded(self._called), prepend=True)

    def _called(self, model: nn.Module, _: Any) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward:
            return
        if model.training and torch.is_grad_enabled():
            self.begin()
            self.bench.forward()
        elif self.bench is not None:
            self.bench.without_gradients()

    # ---- steps ----

    def begin(self) -> None:
        """Begin a step if the one before is complete; before the first, build the run's objects."""
        self.end_again()
        if self.bench is not None:
            if not self.in_accumulate and self.complete():
                self.boundary()
            return
        if not self.wrapped:
            raise Refused(
                "the script prepares no model with trained weights; pass its model to "
                "accelerator.prepare"
            )
        models, optimizers = self.wrapped, self.accelerator._optimizers
        modules = [unwrapped(m) for m in models]
        blocks = self.blocks or [b for m in modules for b in blocks_of(m)]
        module = nn.ModuleList(modules) if len(models) > 1 else modules[0]
        inner = [_innermost(o) for o in optimizers]
        joined = Joined(inner) if inner else self.seen_optimizers
        subject = self._subject(blocks, self.linears)
        run = Run(
            resolved=self.row,
            accelerator=self.accelerator,
            model=module if "one_process" in self.row.launch.traits else models[0],
            module=module,
            optimizer=optimizers[0] if len(optimizers) == 1 else joined,
            launch=dataclasses.replace(self.row.launch, subject=subject),
            settings=settings_of(inner[0]) if inner else self.row.settings,
            folder=self.folder,
            reporter=self.reporter,
            meter=self.meter,
        )
        if self.accelerator.device.type == "cuda" and self.accelerator.is_main_process:
            run.gpus = GpuWatch(self.row.spec.local_processes)
        self.bench = Bench(self, run)
        for part in self.row.recipe.strategies:
            attachment = part.attach(run)
            if attachment is not None:
                run.attached[part.name] = attachment
        self._note_type(module)

    def _note_type(self, module: nn.Module) -> None:
        """Record the type of the output of the first layer with a matrix product."""
        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        inside = [m for b in self.blocks for m in b.modules() if isinstance(m, kinds)]
        layers = inside or [m for m in module.modules() if isinstance(m, kinds)]
        if not layers:
            return

        def note(_: Any, __: Any, out: Any) -> None:
            self.bench.types.append(str(getattr(out, "dtype", "")).removeprefix("torch."))
            handle.remove()

        handle = layers[0].register_forward_hook(note)

    def backward_begins(self, loss: Any) -> None:
        """Receive the start of ``Accelerator.backward``."""
        self.begin()
        self.backwards += 1
        self.bench.loss(loss)

    def backward_ended(self) -> None:
        """Receive the end of ``Accelerator.backward``, within which DeepSpeed steps."""
        if "own_step" in self.row.launch.traits and self.accelerator.sync_gradients:
            self.stepped[0] += 1
            self.ever_stepped = True

    def asked_to_step(self, optimizer: Any) -> None:
        """Receive the script's call of a prepared optimizer's ``step``, which DeepSpeed ignores."""
        if self.bench is not None and self.backwards == 0 and self.ended is None:
            self.steps_begin(_innermost(optimizer))

    def steps_begin(self, optimizer: Any) -> None:
        """Receive the start of an optimizer's step."""
        if self.bench is None and not self.models:
            return
        if self.backwards == 0 and self._is_ours(optimizer):
            raise Refused(NO_BACKWARD)

    def steps_end(self, optimizer: Any) -> None:
        """Receive the end of an optimizer's step."""
        if "own_step" in self.row.launch.traits or not self._is_ours(optimizer):
            return
        if not any(optimizer is member for member in self.seen_optimizers.members):
            self.seen_optimizers.members.append(optimizer)
        self.stepped[id(optimizer)] += 1
        self.ever_stepped = True

    def _is_ours(self, optimizer: Any) -> bool:
        prepared = [_innermost(o) for o in self.accelerator._optimizers] if self.accelerator else []
        if prepared:
            return any(optimizer is one for one in prepared)
        own = {id(p) for model in self.models for p in model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def complete(self) -> bool:
        """Return whether every optimizer has stepped since the last boundary."""
        if not self.stepped:
            return False
        count = 1 if "own_step" in self.row.launch.traits else len(self.accelerator._optimizers)
        return len(self.stepped) >= count or max(self.stepped.values()) > 1

    def accumulates(self, models: Sequence[Any]) -> None:
        """Receive the start of ``Accelerator.accumulate``."""
        self.end_again()
        self.in_accumulate = True
        listed = any(isinstance(m, (list, tuple)) for m in models)
        if not listed or self.accelerator.gradient_accumulation_steps == 1:
            return
        text = "the script passes a list to accumulate, which accelerate does not unpack"
        if "dtensor_weights" in self.row.launch.traits:
            raise Refused(f"{text}; write accumulate(*models), or take ddp")
        self.note(f"{text}: gradients are sent in every micro-batch")

    def left_accumulate(self) -> None:
        """Receive the end of ``Accelerator.accumulate``."""
        self.in_accumulate = False
        fused = self.backwards > 0 and not self.ever_stepped and self.accelerator.sync_gradients
        if self.bench is not None and (self.complete() or fused):
            self.boundary()

    def boundary(self) -> None:
        """End one step; after the last one end the script."""
        self.stepped.clear()
        self.backwards = 0
        try:
            self.bench.boundary()
        except Finished as stop:
            self.ended = stop
            if threading.current_thread() is not threading.main_thread():
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()
                os._exit(0)
            raise

    def end_again(self) -> None:
        """Raise again if the script swallowed its end; exit after some times."""
        if self.ended is None:
            return
        self.swallowed += 1
        if self.swallowed >= GIVE_UP and self.finished:
            sys.stdout.flush()
            os._exit(0)
        raise self.ended

    def guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, whose ``Refused``, ``Void`` or ``Finished`` ends the script for good."""

        @functools.wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            try:
                return call(*given, **named)
            except (Refused, Void, Finished) as stop:
                self.ended = stop
                raise

        return run

    @property
    def finished(self) -> bool:
        """Return whether the last measured step has ended."""
        return isinstance(self.ended, Finished)

    # ---- facts ----

    def clipped(self, limit: Any, norm: Any, parameters: Any) -> None:
        """Receive the limit and norm of the gradients of ``parameters``, which the script clips.

        The norm of no parameters is none of the training's.
        """
        limit, engine_clips = float(limit), "own_clipping" in self.row.launch.traits
        given = [parameters] if torch.is_tensor(parameters) else parameters
        if not given:
            self.note(NONE_CLIPPED)
            return  # no engine may clip at this limit: the others would train something else
        if self.bench is not None and not engine_clips and all(p.grad is None for p in given):
            if self.backwards == 0:
                raise Refused(NO_BACKWARD)
            raise Void(CLIPPING, limit, "parameters without gradients", MADE_BEFORE)
        if self.bench is not None:
            self.bench.norm = norm
        if self.clip == limit:
            return
        self.clip = limit
        if engine_clips and (self.row.clip or 0.0) != limit:
            raise Void(CLIPPING, limit, self.row.clip or 0.0, f"give --clip {limit:g}")

    def note(self, text: str) -> None:
        """Keep a remark for the reader of the row."""
        if text not in self.notes:
            self.notes.append(text)

    def global_batch(self) -> int:
        """Return the samples of one backward pass on all ranks; 0 if unknown."""
        for loader in self.loaders:
            with contextlib.suppress(AttributeError, TypeError):
                return int(loader.total_batch_size)
        return 0

    def facts(self) -> dict[str, Any]:
        """Return what the script's run has shown, as plain data."""
        here = self.accelerator
        modules = [unwrapped(m) for m in self.wrapped]
        engine, bench = self.row.launch.engine, self.bench
        counted = [p for m in modules for p in m.parameters()]
        sizes = [engine.part(p).shape.numel() for p in counted]
        free = sum(n for n, p in zip(sizes, counted, strict=True) if p.requires_grad)
        optimizers = [type(_innermost(o)).__name__ for o in here._optimizers]
        return {
            "models": [type(m).__name__.removeprefix("FSDP") for m in modules],
            "blocks": len(bench.run.blocks()) if bench else 0,
            "parameters": sum(sizes),
            "trained_parameters": free,
            "optimizers": optimizers or [type(o).__name__ for o in self.seen_optimizers.members],
            "mixed_precision": here.mixed_precision,
            "batch_of_all_ranks": self.global_batch(),
            "accumulation": bench._accumulation() if bench else 1,
            "clip": self.clip,
            "resident_models": bench.census.by_owner if bench else {},
            "averages": bool(bench and bench.census.averages),
            "skipped": dict(self.skipped),
            "given": self.given,
        }


# ---- helpers ----


def trains(model: nn.Module) -> bool:
    """Return whether a model has trained weights."""
    return any(p.requires_grad for p in model.parameters())


def batch_of(loader: Any) -> int | None:
    """Return the batch size of a loader before it is prepared; None if it names none."""
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return int(size) if isinstance(size, int) else None


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer
