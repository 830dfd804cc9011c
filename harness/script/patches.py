"""Patches of ``Accelerator``'s public calls in a script's process.

Class attributes are patched before the script runs, so its imports do not matter. The patches call
the original methods with the script's own arguments, except for what ``harness.script.settle``
adds. ``harness.script.watch`` receives the calls.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedOptimizerWrapper
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from harness.script.watch import Watch


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Within this context, ``watch`` receives the calls of every ``Accelerator``."""
    with contextlib.ExitStack() as stack:
        for name, patched in _methods(watch).items():
            original = getattr(Accelerator, name)
            replaced = functools.wraps(original)(watch.guarded(patched(original)))
            stack.enter_context(mock.patch.object(Accelerator, name, replaced))
        for owner, name, patch in (
            (nn.utils, "clip_grad_norm_", _clip),
            (DeepSpeedOptimizerWrapper, "step", _step),
        ):
            patched = patch(watch, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, patched))
        for register, hook in (
            (register_optimizer_step_pre_hook, watch.guarded(watch.steps_begin)),
            (register_optimizer_step_post_hook, watch.steps_end),
        ):
            stack.callback(register(lambda optimizer, *_, hook=hook: hook(optimizer)).remove)
        yield


SKIPPED = ("save_state", "save_model", "init_trackers")
"""Calls that a measured run leaves out. A collective save under ``is_main_process`` would hang, and
a tracker's package may be missing."""
Patch = Callable[[Callable[..., Any]], Callable[..., Any]]


def _methods(watch: Watch) -> dict[str, Patch]:
    """Return the name of each patched method -> a function of the original."""
    skipped = {
        name: lambda _, name=name: lambda *_, **__: watch.skipped.update([name]) for name in SKIPPED
    }
    own = {
        "__init__": _init,
        "prepare": _prepare,
        "accumulate": _accumulate,
        "backward": _backward,
        "clip_grad_norm_": _clip,
        "get_tracker": _tracker,
    }
    return {name: functools.partial(patch, watch) for name, patch in own.items()} | skipped


def _init(watch: Watch, original: Any) -> Any:
    signature = inspect.signature(original)

    def init(accelerator: Any, *given: Any, **named: Any) -> None:
        bound = signature.bind(accelerator, *given, **named).arguments
        bound.pop("self")
        watch.make(accelerator, dict(bound), original)

    return init


def _prepare(watch: Watch, original: Any) -> Any:
    def prepare(accelerator: Any, *given: Any, **named: Any) -> Any:
        result = original(accelerator, *watch.preparing(accelerator, given, named), **named)
        watch.prepared(accelerator, result)
        return result

    return prepare


def _accumulate(watch: Watch, original: Any) -> Any:
    @contextlib.contextmanager
    def accumulate(accelerator: Any, *models: Any) -> Iterator[None]:
        watch.guarded(watch.accumulates)(models)
        with original(accelerator, *models):
            yield
        watch.left_accumulate()

    return accumulate


def _backward(watch: Watch, original: Any) -> Any:
    def backward(accelerator: Any, loss: Any, **named: Any) -> None:
        watch.backward_begins(loss)
        original(accelerator, loss, **named)
        watch.backward_ended()

    return backward


def _clip(watch: Watch, original: Any) -> Any:
    """Patch ``Accelerator``'s method and torch's own function, which some scripts call."""
    signature = inspect.signature(original)

    def clip(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        parameters = bound.arguments["parameters"]
        if not torch.is_tensor(parameters):
            # A list can be looked at after the call.
            parameters = bound.arguments["parameters"] = list(parameters)
        norm = original(*bound.args, **bound.kwargs)
        watch.clipped(bound.arguments["max_norm"], norm, parameters)
        return norm

    return clip


class LeftOut:
    """Tracker of a measured run: every call and attribute of it is accepted and does nothing."""

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


def _tracker(watch: Watch, original: Any) -> Any:
    def get_tracker(accelerator: Any, name: str, unwrap: bool = False) -> Any:
        if accelerator.trackers:
            return original(accelerator, name, unwrap)
        watch.skipped["get_tracker"] += 1
        return LeftOut()

    return get_tracker


def _step(watch: Watch, original: Any) -> Any:
    """Patch the step of DeepSpeed's stand-in of an optimizer, which does nothing."""

    def step(optimizer: Any) -> None:
        watch.asked_to_step(optimizer)
        original(optimizer)

    return step
