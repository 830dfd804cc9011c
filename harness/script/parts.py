"""Strategies that can be added to a script's model or optimizer, within ``Accelerator.prepare``.

Each is the core's strategy with another way in: a script runs its blocks by itself, so block
runners do not reach them. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from strategies.activations.attend import KERNELS, Attend, only, ran_by
from strategies.activations.checkpoint import Checkpoint
from strategies.activations.compile import Compile, CountingBackend, graph_facts
from strategies.adapters.cast import Cast
from strategies.base import Attachment, BadInput, Settings, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject

SWAPPED = ("AdamW", "Adam", "AdamW8bit", "Adam8bit", "PagedAdamW8bit")
"""Classes of torch and bitsandbytes that compute AdamW or Adam, and so can be replaced."""


class Cannot(BadInput):
    """A strategy cannot be added to this script. The message has the reason and the remedy."""


def swap(part: Strategy, optimizer: Any, launch: RunContext) -> Any:
    """Return the optimizer of ``part`` for the groups of a script's optimizer.

    Raises:
        Cannot: the optimizer is of another class, or has stepped.
    """
    name, kind, fault = part.name, type(optimizer).__name__, ""
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    if kind not in SWAPPED:
        fault = f" replaces AdamW and Adam, but the script's optimizer is {kind}; leave {name} out"
    elif optimizer.state:
        fault = ": the optimizer already has state; call prepare before its first step"
    elif not kind.startswith(("AdamW", "PagedAdamW")) and decays:
        fault = f" applies decoupled weight decay, but {kind} does not; leave {name} out"
    if fault:
        raise Cannot(f"{name}{fault}")
    kept = ("params", "lr", "betas", "eps", "weight_decay", "initial_lr")
    groups = [{k: g[k] for k in kept if k in g} for g in optimizer.param_groups]
    return part.make_optimizer(groups, settings_of(optimizer), launch)


def settings_of(optimizer: Any) -> Settings:
    """Return the settings of an optimizer's first group."""
    group = optimizer.param_groups[0]
    usual = Settings()
    return Settings(
        learning_rate=float(group.get("lr", usual.learning_rate)),
        betas=tuple(group.get("betas", usual.betas)),
        eps=float(group.get("eps", usual.eps)),
        weight_decay=float(group.get("weight_decay", 0.0)),
        ema_decay=0.0,
    )


# ---- blocks ----


class Recomputations(Attachment):
    """Counts forward calls of blocks, and those that autograd starts in backward."""

    def __init__(self, blocks: list[Any]) -> None:
        self.calls = self.again = 0
        self.blocks = blocks
        for block in blocks:
            block.register_forward_pre_hook(self._called)

    def _called(self, *_: Any) -> None:
        import torch

        self.calls += 1
        self.again += torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, kw_only=True)
class ScriptCheckpoint(Checkpoint):
    """Recomputes blocks by the model's own method, or by torch's wrapper of each block."""

    def refuses(self, launch: RunContext) -> str | None:
        if self != type(self)():
            return "a script's model recomputes by its own method; take checkpoint alone"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        named = ("enable_gradient_checkpointing", "gradient_checkpointing_enable")
        own = next((getattr(module, name) for name in named if hasattr(module, name)), None)
        if own is not None:
            try:
                own()
            except ValueError as error:
                raise Cannot(f"checkpoint: {error}; leave it out") from None
            return
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        if subject.blocks(module) == [module]:
            text = "checkpoint: the model has no _no_split_modules, so its blocks are unknown"
            raise Cannot(f"{text}; leave checkpoint out")
        # As accelerate does for FSDP: torch's wrapper calls a block again with its hooks, so that
        # an engine gathers the weights again.
        chosen = {id(block) for block in subject.blocks(module)}
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if id(child) in chosen:
                    setattr(parent, name, checkpoint_wrapper(child))

    def attach(self, run: TrainingRun) -> Recomputations:
        return Recomputations(run.blocks())

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        seen: Recomputations = run.attached[self.name]
        each, blocks = seen.again / max(run.micro_steps, 1), len(seen.blocks)
        demand(each >= 1, f"{seen.again} of {seen.calls} calls of blocks recomputed in backward")
        return {"blocks": blocks, "blocks_recomputed": round(each, 2)}


@dataclass(frozen=True, kw_only=True)
class ScriptAttend(Attend):
    """Restricts torch's attention to one backend within the trained model."""

    def refuses(self, launch: RunContext) -> str | None:
        text = f"a script's attention cannot be replaced by {self.kernel}"
        return f"{text}; take attend:kernel=math" if KERNELS[self.kernel] is None else None

    def edit_model(self, module: Any, subject: Subject) -> None:
        for block in subject.blocks(module):
            block.forward = _within(block.forward, KERNELS[self.kernel])

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        seen = run.observed
        demand(bool(seen.ran), "no step was recorded")
        ran = [r.name for r in seen.ran if r.phase == "forward"]
        calls = {name: sum(ran_by(name, op) for op in ran) for name in KERNELS}
        others = {k: n for k, n in calls.items() if n and k != self.kernel}
        demand(not others, f"forward ran {others}, expected {self.kernel}")
        demand(calls[self.kernel] > 0, f"{self.kernel} did not run")
        return {"calls_in_forward": calls[self.kernel] / seen.micro_steps}


def _within(call: Any, backend: str) -> Any:
    def forward(*given: Any, **named: Any) -> Any:
        with only(backend):
            return call(*given, **named)

    return forward


@dataclass(frozen=True, kw_only=True)
class ScriptCompile(Compile):
    """Compiles each block in place."""

    def refuses(self, launch: RunContext) -> str | None:
        if self.budget < 1 or self.scope != "block":
            return "a script's blocks are compiled one by one; leave budget and scope out"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        module.compiled_by = CountingBackend(self.backend)
        for block in subject.blocks(module):
            block.compile(backend=module.compiled_by, dynamic=False)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        return graph_facts(run, run.attached.get(self.name), len(run.blocks()))


@dataclass(frozen=True, kw_only=True)
class ScriptCast(Cast):
    """Stores the frozen linear layers of the blocks in 8 bits."""

    def refuses(self, launch: RunContext) -> str | None:
        if self.layers != "blocks":
            return "a script's layers outside of its blocks may train; leave layers out"
        # Frozen weights are known only when the script prepares its model.
        traits = launch.traits | {"frozen_weights"}
        return super().refuses(dataclasses.replace(launch, traits=traits))

    def edit_model(self, module: Any, subject: Subject) -> None:
        if not subject.linears:
            raise Cannot("cast: no linear layer of the blocks is frozen; leave cast out")
        super().edit_model(module, subject)


FOREIGN: dict[str, type[Strategy]] = {
    "checkpoint": ScriptCheckpoint,
    "attend": ScriptAttend,
    "compile": ScriptCompile,
    "cast": ScriptCast,
}
"""Strategy -> its form for a script."""
OPTIMIZERS = ("adam8bit", "paged_adam8bit", "adam4bit", "adam16bit")
"""Strategies that take the place of a script's optimizer as they are (``swap``)."""


def own_part(part: Strategy) -> Strategy:
    """Return the form of a strategy for a script, with the same parameters."""
    given = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return FOREIGN.get(part.name, type(part))(**given)
