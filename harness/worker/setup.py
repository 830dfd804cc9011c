"""From a resolved spec to the prepared objects of one rank: the only place where they are made."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from harness.data.brought import Brought
from harness.data.cached import Cached
from harness.data.feed import TOGETHER, Dataset, Feed, open_data
from harness.launch.command import GROUP_SECONDS
from harness.launch.on_loopback import listen_on_loopback
from harness.resolve import Resolved
from harness.result import reported_name
from harness.subjects.named_objectives import objective_of
from harness.worker import world
from harness.worker.building import Building
from harness.worker.loop import Run
from strategies.base import Slot
from strategies.engine import Trained, Workload
from strategies.strategy import Strategy

__all__ = ["build_feed", "build_model", "make_accelerator", "prepare"]


def make_accelerator(resolved: Resolved) -> Accelerator:
    """Accelerator with what the recipe's parts ask of it."""
    if resolved.spec.world:
        world.simulate(resolved.spec.world)
    listen_on_loopback()
    given = resolved.recipe.accelerator_kwargs(resolved.launch)
    return Accelerator(**_with_timeout(given, os.environ.get(GROUP_SECONDS)))


def _with_timeout(given: dict[str, Any], seconds: str | None) -> dict[str, Any]:
    """``given`` for ``Accelerator``, with ``seconds`` as the timeout of every process group: of the
    first by accelerate's handler, of those made later by torch's defaults, which have no setter."""
    if seconds is None:
        return given
    limit, c10d = timedelta(seconds=float(seconds)), torch.distributed.distributed_c10d
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = limit
    handlers = given.setdefault("kwargs_handlers", [])
    if not any(isinstance(h, InitProcessGroupKwargs) for h in handlers):
        handlers.append(InitProcessGroupKwargs())
    for handler in handlers:
        if isinstance(handler, InitProcessGroupKwargs):
            handler.timeout = limit
    return given


def build_feed(resolved: Resolved, accelerator: Accelerator) -> Feed:
    """This rank's micro batches."""
    spec, layout = resolved.spec, resolved.launch.layout
    return Feed(
        dataset=_dataset(resolved, accelerator.device),
        draw=objective_of(spec.objective).draw,
        seed=spec.seed,
        global_batch=spec.global_batch,
        shares=layout.data,
        share=layout.share(accelerator.process_index),
        micro_batch=resolved.micro_batch,
        class_dropout=spec.class_dropout,
        together=1 if resolved.subject.brings_samples else TOGETHER,
        device=accelerator.device,
    )


def _dataset(resolved: Resolved, device: torch.device) -> Dataset:
    """The spec's data, or the samples that the model brings."""
    reader = resolved.subject.reader()
    if reader is not None:
        return Cached(resolved.subject.data, reader, device)
    brought = resolved.subject.samples()
    if brought is None:
        return open_data(resolved.spec.data, device)
    return Brought(resolved.subject.data, brought, device)


def build_model(resolved: Resolved) -> torch.nn.Module:
    """The whole model with the spec's initial weights, float32, in host memory; that of a run is
    built piece by piece instead (``Building``)."""
    return resolved.subject.build(resolved.spec.seed, resolved.spec.init)


LIBRARIES = {
    "peft": ("peft",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao", "torchao.optim"),
    "inductor": ("torch._inductor.compile_fx",),
    "cpu_adam": ("strategies.engines.zero.processor",),
}
"""Need of a strategy -> what it will import: tens of MiB each."""


def rehearse(resolved: Resolved, accelerator: Accelerator) -> None:
    """On a CPU, load what a step loads, before the meter takes its baseline.

    Building, stepping and dropping a tiny model brings in modules, kernels and their scratch:
    some 100 MiB that belong to the process and not to the training. A GPU's allocator counts
    tensors alone and needs none of this.
    """
    if accelerator.device.type != "cpu":
        return
    modules = [*resolved.launch.engine.modules]
    modules += [name for need in resolved.needs for name in LIBRARIES.get(need, ())]
    for name in modules:
        importlib.import_module(name)
    subject = resolved.subject.small()
    module = subject.build(seed=0, init=resolved.spec.init)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    subject.predict(module, *subject.example("cpu")).square().mean().backward()
    torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    optimizer.step()


def prepare(
    resolved: Resolved,
    feed: Feed,
    accelerator: Accelerator,
    scratch: Path,
    enter: Callable[[str], None],
) -> Run:
    """Build, edit, fill, prepare and attach, in slot order.

    Args:
        feed: opened before the meter took its baseline: data and its libraries are not the model.
        scratch: where NVMe offload may write.
        enter: told when the phases load and prepare begin.
    """
    recipe, launch = resolved.recipe, resolved.launch
    enter("load")
    building = Building(resolved)
    building.edit()
    # Only now is it known what is trained: an engine's buffers are sized by that.
    launch.engine.configure(accelerator, _work(resolved, building.module, scratch))
    module = building.finish(accelerator)
    enter("prepare")
    for part in recipe.strategies:
        part.configure(accelerator, module, launch)
    module.train()
    blocks = resolved.subject.blocks(module)
    model, optimizer = launch.engine.prepare(accelerator, module, _optimizer_of(resolved), blocks)
    trained = Trained(
        accelerator=accelerator,
        model=model,
        module=module,
        optimizer=optimizer,
        launch=launch,
        settings=resolved.settings,
        attached={},
    )
    _attach(trained, recipe.strategies)
    launch.engine.ready(trained)
    objective = objective_of(resolved.spec.objective)
    return Run(
        trained=trained,
        feed=feed,
        objective=objective,
        digest=building.digest,
        notes=building.notes,
    )


def _work(resolved: Resolved, module: torch.nn.Module, scratch: Path) -> Workload:
    """What an engine is configured for."""
    return Workload(
        micro_batch=resolved.micro_batch,
        clip=resolved.settings.grad_clip,
        sizes=resolved.subject.sizes_of(module),
        scratch=scratch,
        layout=resolved.launch.layout,
    )


def _attach(trained: Trained, strategies: Sequence[Strategy]) -> None:
    for part in strategies:
        attachment = part.attach(trained)
        if attachment is not None:
            trained.attached[part.name] = attachment


def _optimizer_of(resolved: Resolved) -> Callable[[list[torch.nn.Parameter]], Any]:
    """What makes the recipe's optimizer once the engine has the parameters."""
    chosen = resolved.recipe.in_slot(Slot.OPTIMIZE)
    return lambda params: chosen.make_optimizer(params, resolved.settings, resolved.launch)


def to_device_note(device: torch.device) -> str:
    """How the device is called in a result."""
    if device.type != "cuda":
        return "cpu"
    return reported_name(torch.cuda.get_device_name(device))
