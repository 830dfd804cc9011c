"""Build one rank's prepared objects from a resolved spec: weights, model, accelerator, data,
engine."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import Tensor, nn

from harness import ROOT
from harness.data.datasets import Brought, open_data
from harness.data.feed import TOGETHER, Dataset, Feed
from harness.launch.command import GROUP_SECONDS
from harness.launch.on_loopback import listen_on_loopback
from harness.resolve import Resolved
from harness.spec import Spec, SpecError
from harness.subjects.objectives import objective_of
from harness.worker.loop import Run
from strategies import initial
from strategies.base import Slot
from strategies.engine import NoOptimizer, TrainingRun, Workload
from strategies.initial import Draw
from strategies.subject import Subject

# ---- weights from a file ----


@dataclass
class FromFile:
    """Draw that reads parameters from a spec's file and samples those that the file lacks.

    Training froze the missing parameters (a table of positions), so they have no average.
    """

    spec: Spec
    state: dict[str, Tensor]
    drawn: Draw
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = frozenset(self.state)

    def __call__(self, name: str, like: Tensor) -> Tensor:
        if name not in self.names:
            return self.drawn(name, like)
        value = self.state.pop(name)  # each is read once, so it need not stay in memory
        if value.shape != like.shape:
            raise SpecError(
                f"weights is {self.spec.weights}: {name} has the shape {list(value.shape)}, and "
                f"the model's has {list(like.shape)}; give its own --model, --data and --objective"
            )
        return value.float()

    def check(self, module: nn.Module) -> None:
        """Check that the file and ``module`` have the same trained parameters.

        Raises:
            SpecError: the file is of another model; names a parameter.
        """
        mine = {name: p.requires_grad for name, p in module.named_parameters()}
        lacking = (name for name, free in mine.items() if free and name not in self.names)
        odd = [*sorted(self.names - mine.keys()), *lacking]
        if odd:
            raise SpecError(
                f"weights is {self.spec.weights}, of another model than {self.spec.model}: "
                f"{odd[0]} is on one side only; give its own --model and --objective"
            )


def read(spec: Spec, subject: Subject) -> dict[str, Tensor]:
    """Read parameters by name, as ``train --averaged`` wrote them.

    Raises:
        SpecError: the file is not a weight file, or holds nothing.
    """
    try:
        state = subject.load(ROOT / spec.weights)
    except Exception as error:  # every format has its own errors
        raise SpecError(f"weights is {spec.weights}: {error}; train it anew") from None
    if not state:
        raise SpecError(f"weights is {spec.weights}, which holds no tensor; train it anew")
    return dict(state)


# ---- building ----
# A model is built without values if it can sample each weight by its name; otherwise it is built
# whole. Then it is edited, filled and hashed.


def tensor_digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    plain = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy()).hexdigest()


def combined(digests: Mapping[str, str]) -> str:
    """Return a short hash of all parameters' hashes by name, independent of their order."""
    text = "".join(f"{name}:{digest};" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Hashed:
    """A model's draws, and the hash of each.

    The hash covers the float32 values before they are cast, packed or split, so that all rows of a
    suite have the same.
    """

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.digests: dict[str, str] = {}

    def __call__(self, name: str, like: Tensor) -> Tensor:
        values = self.draw(name, like)
        self.digests[name] = tensor_digest(values)
        return values


class Building:
    """One rank's bare model during construction; ``module`` throughout.

    Call ``edit``, then ``finish`` once the engine is configured.
    """

    def __init__(self, resolved: Resolved) -> None:
        subject = resolved.subject
        # A model that a part of the recipe substitutes for the named one has its own weights.
        spec = dataclasses.replace(resolved.spec, model=subject.model, weights=resolved.weights)
        self.resolved, self.notes = resolved, list[str]()
        draw = subject.draws(spec.seed, spec.init)
        built = draw or (lambda _, like: like.detach())  # a model that is built whole has values
        file = FromFile(spec, read(spec, subject), built) if spec.weights else None
        if draw is None:
            self.module = subject.build(spec.seed, spec.init)
            if file:
                file.check(self.module)
                for name, p in self.module.named_parameters():
                    p.data.copy_(file(name, p))
            named = self.module.named_parameters()
            self.drawn, self.whole = None, {name: tensor_digest(p) for name, p in named}
            self.notes.append(
                f"load: {subject.name} is built whole in float32 in host memory by every rank, for "
                "it does not say how each weight is drawn (Subject.draws)"
            )
        else:
            self.drawn, self.whole = Hashed(file or draw), {}
            self.module = initial.skeleton(subject.shell, self.drawn)
            if file:
                file.check(self.module)
        # Parameters that get no gradient are frozen before trained ones are counted.
        idle = [self.module.get_parameter(name).requires_grad_(False) for name in subject.idle]
        if idle:
            count = sum(p.numel() for p in idle)
            self.notes.append(
                f"frozen: {len(idle)} parameters ({count:,} elements) get no gradient, of which "
                f"the first is {subject.idle[0]}"
            )

    @property
    def digest(self) -> str:
        """Return a short hash of the initial weights, the same for every row of a suite."""
        return combined(self.drawn.digests if self.drawn else self.whole)

    def edit(self) -> None:
        """Let every strategy edit the model, in slot order. Weights are created in host memory
        before the first strategy that reads them."""
        for part in self.resolved.recipe.strategies:
            if part.reads_weights and self.drawn:
                initial.fill(self.module, self.drawn, "cpu")
            part.edit_model(self.module, self.resolved.subject)

    def finish(self, accelerator: Any) -> nn.Module:
        """Return the model with its weights, on the engine's device.

        Raises:
            ValueError: a parameter has no value.
        """
        if self.drawn:
            blocks = self.resolved.subject.blocks(self.module)
            self.resolved.launch.engine.fill(accelerator, self.module, self.drawn, blocks)
        predicted = accelerator.device.type == "meta"
        for name, p in self.module.named_parameters():
            if p.device.type == "meta" and not predicted:
                raise ValueError(
                    f"{name} has no value: the strategy whose edit_model copied or made it must "
                    "say reads_weights = True"
                )
        return self.module


def make_accelerator(resolved: Resolved) -> Accelerator:
    """Return an Accelerator with the settings that the recipe's parts require."""
    listen_on_loopback()
    given = resolved.recipe.accelerator_kwargs(resolved.launch)
    return Accelerator(**with_timeout(given, os.environ.get(GROUP_SECONDS)))


def with_timeout(given: dict[str, Any], seconds: str | None) -> dict[str, Any]:
    """Return ``given`` with ``seconds`` as the timeout of every process group.

    accelerate's handler sets that of the first group. Later groups use torch's defaults, which have
    no setter.
    """
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
    """Return this rank's micro-batches."""
    spec, layout, device = resolved.spec, resolved.launch.layout, accelerator.device
    brought = resolved.subject.samples()
    data: Dataset
    if brought is None:
        data = open_data(spec.data, device)
    else:
        data = Brought(resolved.subject.data, brought, device)
    return Feed(
        dataset=data,
        draw=objective_of(spec.objective).draw,
        seed=spec.seed,
        global_batch=spec.global_batch,
        shares=layout.data,
        share=layout.share(accelerator.process_index),
        micro_batch=resolved.micro_batch,
        class_dropout=spec.class_dropout,
        together=1 if resolved.subject.brings_samples else TOGETHER,
        device=device,
    )


def build_model(resolved: Resolved) -> torch.nn.Module:
    """Build the whole model with the spec's initial weights, float32, in host memory. A run builds
    its model piece by piece instead (``Building``)."""
    return resolved.subject.build(resolved.spec.seed, resolved.spec.init)


LIBRARIES = {
    "peft": ("peft",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao", "torchao.optim"),
    "inductor": ("torch._inductor.compile_fx",),
    "cpu_adam": ("strategies.engines.zero.engine",),
}
"""Need of a strategy -> module that it will import, of tens of MiB each."""


def rehearse(resolved: Resolved, accelerator: Accelerator) -> None:
    """On a CPU, load the libraries of a step before the meter takes its baseline.

    Building, stepping and dropping a tiny model loads modules, kernels and their scratch memory:
    some 100 MiB that belong to the process and not to the training. A GPU's allocator counts only
    tensors, so it needs no rehearsal.
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
    feed: Feed | None,
    accelerator: Accelerator,
    scratch: Path,
    enter: Callable[[str], None],
) -> Run:
    """Build, edit, fill, prepare and attach, in slot order.

    Args:
        feed: opened before the meter took its baseline, which includes data and its libraries.
            None: the run draws samples, so nothing is trained and there is no optimizer.
        scratch: folder for NVMe offload.
        enter: called at the start of the phases load and prepare.
    """
    recipe, launch, subject = resolved.recipe, resolved.launch, resolved.subject
    enter("load")
    building = Building(resolved)
    building.edit()
    if feed is not None:
        work = Workload(
            micro_batch=resolved.micro_batch,
            clip=resolved.settings.grad_clip,
            # Trained parameters are known only now, and they determine the buffers' sizes.
            sizes=subject.sizes_of(building.module),
            scratch=scratch,
            layout=launch.layout,
        )
        launch.engine.configure(accelerator, work)
    module = building.finish(accelerator)
    if feed is None:
        module.requires_grad_(False).eval()
    enter("prepare")
    for part in recipe.strategies:
        part.configure(accelerator, module, launch)
    if feed is None:
        model = accelerator.prepare_model(module, evaluation_mode=True)
        optimizer: Any = NoOptimizer()
    else:
        chosen: Any = recipe.in_slot(Slot.OPTIMIZE)
        model, optimizer = launch.engine.prepare(
            accelerator,
            module.train(),
            lambda params: chosen.make_optimizer(params, resolved.settings, launch),
            subject.blocks(module),
        )
    trained = TrainingRun(
        accelerator=accelerator,
        model=model,
        module=module,
        optimizer=optimizer,
        launch=launch,
        settings=resolved.settings,
        attached={},
    )
    for part in recipe.strategies:
        attachment = part.attach(trained)
        if attachment is not None:
            trained.attached[part.name] = attachment
    return Run(
        trained=trained,
        feed=feed,
        objective=objective_of(resolved.spec.objective),
        digest=building.digest,
        notes=building.notes,
    )
