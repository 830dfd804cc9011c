"""A script in one process: patches of ``Accelerator``'s calls, its objects, its steps, its end.

Attributes of classes are patched before the script runs, so its imports do not matter. A patch
calls the original with the script's own arguments, except for what ``harness.script.settle`` adds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedOptimizerWrapper
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader

from harness.script import settle
from harness.script.model import Joined, blocks_of, frozen_linears, unwrapped
from harness.script.parts import OPTIMIZERS, Cannot, settings_of, swap
from harness.script.row import CLIPPING, ScriptRow
from harness.script.settle import Finished, Refused, Stop, Void
from harness.script.steps import Bench
from harness.worker.loop import Run
from harness.worker.meter import cards_before, make_meter
from harness.worker.samples import GpuWatch
from harness.worker.status import Reporter

GIVE_UP = 3
"""Times that a script may swallow its end before its process exits."""
SKIPPED = ("save_state", "save_model", "init_trackers")
"""Calls that a measured run leaves out. A collective save under ``is_main_process`` would hang, and
a tracker's package may be missing."""
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


class LeftOut:
    """Tracker of a measured run: every call and attribute of it is accepted and does nothing.

    A mock would keep the tensors of each call alive.
    """

    def __getattr__(self, name: str) -> LeftOut:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> LeftOut:
        return self

    __getitem__ = __enter__ = __call__

    def __setitem__(self, *_: Any) -> None:
        """Keep nothing."""

    __exit__ = __setitem__

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        return iter(())


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

    @contextlib.contextmanager
    def patching(self) -> Iterator[None]:
        """Within this context, this object receives the calls of every ``Accelerator``."""
        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (Accelerator, "__init__", self.make),
            (Accelerator, "prepare", self.prepare),
            (Accelerator, "accumulate", self.accumulate),
            (Accelerator, "backward", self.backward),
            (Accelerator, "clip_grad_norm_", self.clip_gradients),
            (nn.utils, "clip_grad_norm_", self.clip_gradients),  # some scripts call torch's own
            (Accelerator, "get_tracker", self.get_tracker),
            (DeepSpeedOptimizerWrapper, "step", self.step_of_wrapper),
            *((Accelerator, name, self.skip) for name in SKIPPED),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, method in patches:
                patched = self.guarded(method, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, patched))
            before, after = self.guarded(self.step_begins), self.step_ended
            for handle in (
                torch_optimizer.register_optimizer_step_pre_hook(before),
                torch_optimizer.register_optimizer_step_post_hook(after),
            ):
                stack.callback(handle.remove)
            yield

    def guarded(
        self, call: Callable[..., Any], original: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return ``call``, given the ``original`` that it patches first, if any.

        A Stop that it raises ends the script for good.
        """
        first = () if original is None else (original,)

        @functools.wraps(original or call)
        def run(*given: Any, **named: Any) -> Any:
            try:
                return call(*first, *given, **named)
            except Stop as stop:
                self.ended = self.ended or stop  # the first, if the script caught it
                raise

        return run

    def skip(self, original: Callable[..., Any], *_: Any, **__: Any) -> None:
        """Patch of a call of SKIPPED."""
        self.skipped[original.__name__] += 1

    def get_tracker(self, original: Any, accelerator: Any, name: str, unwrap: bool = False) -> Any:
        """Patch of ``Accelerator.get_tracker``: no tracker was initialized."""
        if accelerator.trackers:
            return original(accelerator, name, unwrap)
        self.skipped["get_tracker"] += 1
        return LeftOut()

    # ---- the Accelerator ----

    def make(self, original: Any, *given: Any, **named: Any) -> None:
        """Patch of ``Accelerator.__init__``, with the arguments that this launch needs."""
        arguments = inspect.signature(original).bind(*given, **named).arguments
        accelerator = arguments.pop("self")
        self.end_again()
        settle.check_variables(self.row)
        settled, notes = settle.accelerator_arguments(self.row, arguments)
        for note in notes:
            self.note(note)
        original(accelerator, **settled)
        if accelerator.num_processes == self.row.spec.processes:
            self.row.launch.engine.adopt(accelerator, self.row.launch.layout)
        settle.check_ranks(accelerator, self.row)
        shown = ("mixed_precision", "gradient_accumulation_steps", "log_with")
        self.given |= {n: str(arguments[n]) for n in shown if arguments.get(n) is not None}
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

    def prepare(self, original: Any, accelerator: Any, *given: Any, **named: Any) -> Any:
        """Patch of ``Accelerator.prepare``: apply the added strategies, record the objects."""
        result = original(accelerator, *self._preparing(accelerator, given, named), **named)
        self.accelerator = accelerator
        members = list(result) if isinstance(result, (tuple, list)) else [result]
        self.loaders += [m for m in members if hasattr(m, "total_batch_size")]
        self.watch_models([m for m in members if isinstance(m, nn.Module)])
        return result

    def _preparing(self, accelerator: Any, given: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return the arguments of ``prepare`` with the added strategies applied."""
        self.end_again()
        modules = [m for m in given if isinstance(m, nn.Module)]
        models = [m for m in modules if trains(m)]
        frozen = [m for m in modules if not trains(m)]
        optimizers = [o for o in given if isinstance(o, torch.optim.Optimizer)]
        if models and not self.models:
            self.reporter.enter("prepare")
            self.meter.enter("prepare")
        placed = named.get("device_placement") is not None
        settle.check_objects(self.row, models, frozen, optimizers, len(self.models), placed)
        try:
            for model in models:
                blocks = blocks_of(model)
                linears = frozen_linears(model, blocks)
                for part in self.row.recipe.strategies[1:]:
                    part.edit_model(model, self.row.subject.found(blocks, linears))
                self.blocks += blocks
                self.linears += linears
            new = {id(old): self._optimizer_for(old) for old in optimizers}
        except Cannot as error:
            raise Refused(str(error)) from None
        micro = next((batch_of(x) for x in given if isinstance(x, DataLoader)), None)
        scratch = self.reporter.own / "nvme"
        settle.settle_prepare(accelerator, self.row, models, micro, scratch)
        self.models += models
        self.before_prepare += [weakref.ref(p) for m in models for p in m.parameters()]
        return [new.get(id(one), one) for one in given]

    def _optimizer_for(self, optimizer: Any) -> Any:
        """Return the optimizer of an added strategy for a script's own, also in its schedulers;
        the own one without such a strategy."""
        part = next((p for p in self.row.recipe.strategies if p.name in OPTIMIZERS), None)
        if part is None:
            return optimizer
        new, kind = swap(part, optimizer, self.row.launch), torch.optim.lr_scheduler.LRScheduler
        for one in [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]:
            if getattr(one, "optimizer", None) is optimizer:
                one.optimizer = new
        return new

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
        subject = self.row.subject.found(blocks, self.linears)
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

    def backward(self, original: Any, accelerator: Any, loss: Any, **named: Any) -> None:
        """Patch of ``Accelerator.backward``, within which DeepSpeed steps."""
        self.begin()
        self.backwards += 1
        self.bench.loss(loss)
        original(accelerator, loss, **named)
        if "own_step" in self.row.launch.traits and self.accelerator.sync_gradients:
            self.stepped[0] += 1
            self.ever_stepped = True

    def step_of_wrapper(self, original: Any, optimizer: Any) -> None:
        """Patch of the step of DeepSpeed's stand-in of an optimizer, which does nothing."""
        if self.bench is not None and self.ended is None:
            self.step_begins(_innermost(optimizer))
        original(optimizer)

    def step_begins(self, optimizer: Any, *_: Any) -> None:
        """Receive the start of an optimizer's step."""
        prepared = self.bench is not None or self.models
        if prepared and self.backwards == 0 and self._is_ours(optimizer):
            raise Refused(NO_BACKWARD)

    def step_ended(self, optimizer: Any, *_: Any) -> None:
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

    def accumulate(self, original: Any, accelerator: Any, *models: Any) -> Any:
        """Patch of ``Accelerator.accumulate``, at whose end a step may be complete."""
        self.end_again()
        self.in_accumulate = True
        listed = any(isinstance(m, (list, tuple)) for m in models)
        if listed and self.accelerator.gradient_accumulation_steps > 1:
            text = "the script passes a list to accumulate, which accelerate does not unpack"
            if "dtensor_weights" in self.row.launch.traits:
                raise Refused(f"{text}; write accumulate(*models), or take ddp")
            self.note(f"{text}: gradients are sent in every micro-batch")
        return self._accumulating(original(accelerator, *models))

    @contextlib.contextmanager
    def _accumulating(self, accumulation: Any) -> Iterator[None]:
        with accumulation:
            yield
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

    @property
    def finished(self) -> bool:
        """Return whether the last measured step has ended."""
        return isinstance(self.ended, Finished)

    # ---- facts ----

    def clip_gradients(self, original: Any, *given: Any, **named: Any) -> Any:
        """Patch of ``clip_grad_norm_``, of ``Accelerator`` and of torch.

        The norm of no parameters is none of the training's.
        """
        bound = inspect.signature(original).bind(*given, **named)
        parameters = bound.arguments["parameters"]
        # A list can be looked at after the call.
        parameters = [parameters] if torch.is_tensor(parameters) else list(parameters)
        bound.arguments["parameters"] = parameters
        norm = original(*bound.args, **bound.kwargs)
        limit = float(bound.arguments["max_norm"])
        engine_clips = "own_clipping" in self.row.launch.traits
        if not parameters:
            self.note(NONE_CLIPPED)
            return norm  # no engine may clip at this limit: the others would train something else
        if self.bench is not None:
            if not engine_clips and all(p.grad is None for p in parameters):
                if self.backwards == 0:
                    raise Refused(NO_BACKWARD)
                raise Void(CLIPPING, limit, "parameters without gradients", MADE_BEFORE)
            self.bench.norm = norm
        if self.clip != limit:
            self.clip = limit
            if engine_clips and (self.row.clip or 0.0) != limit:
                raise Void(CLIPPING, limit, self.row.clip or 0.0, f"give --clip {limit:g}")
        return norm

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
