"""Set-up of one rank: ``prepare`` shows what is applied to a model, and in which order."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from safetensors.torch import load_file
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
from strategies.engine import Workload
from strategies.subject import Subject

# ---- first weights ----


def read(spec: Spec) -> dict[str, Tensor]:
    """Read parameters by name, as ``train --averaged`` wrote them.

    Raises:
        SpecError: the file is not a weight file, or holds nothing.
    """
    try:
        state = load_file(str(ROOT / spec.weights))
    except Exception as error:  # every format has its own errors
        raise SpecError(f"weights is {spec.weights}: {error}; train it anew") from None
    if not state:
        raise SpecError(f"weights is {spec.weights}, which holds no tensor; train it anew")
    return state


def tensor_digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    plain = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy()).hexdigest()


def combined(digests: Mapping[str, str]) -> str:
    """Return a short hash of all parameters' hashes by name, independent of their order."""
    text = "".join(f"{name}:{digest};" for name, digest in sorted(digests.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Weights:
    """First weights of a model by name, drawn or read from the spec's file, and a hash of each.

    The hashes are of float32 values before they are cast, packed or split, so that all rows of a
    suite have the same. ``whole``: the model is built with its values, for the subject does not say
    how each is drawn.
    """

    def __init__(self, spec: Spec, subject: Subject) -> None:
        self.spec, draw = spec, subject.draws(spec.seed, spec.init)
        self.whole, self.draw = draw is None, draw or (lambda _, like: like.detach())
        self.state = read(spec) if spec.weights else {}
        self.names = frozenset(self.state)
        self.digests: dict[str, str] = {}

    def __call__(self, name: str, like: Tensor) -> Tensor:
        if name in self.names:
            values = self.state.pop(name).float()  # read once, so it need not stay in memory
            if values.shape != like.shape:
                raise SpecError(
                    f"weights is {self.spec.weights}: {name} has the shape {list(values.shape)}, "
                    f"and the model's has {list(like.shape)}; give its own --model, --data and "
                    "--objective"
                )
        else:  # frozen in training (a table of positions), so the file has no average of it
            values = self.draw(name, like)
        self.digests[name] = tensor_digest(values)
        return values

    def check(self, module: nn.Module) -> None:
        """Check that the spec's file and ``module`` have the same trained parameters.

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


def edited_model(resolved: Resolved) -> tuple[nn.Module, Weights, list[str]]:
    """Return the bare model with every strategy's edit, in slot order, its weights, and notes.

    It is built without values if each weight can be drawn by its name, else whole.
    """
    subject = resolved.subject
    # A model that a part of the recipe substitutes for the named one has its own weights.
    spec = dataclasses.replace(resolved.spec, model=subject.model, weights=resolved.weights)
    weights, notes = Weights(spec, subject), list[str]()
    if weights.whole:
        module = initial.build(subject, spec.seed, spec.init)
        notes.append(
            f"load: {subject.name} is built whole in float32 in host memory by every rank, for it "
            "does not say how each weight is drawn (Subject.draws)"
        )
    else:
        module = initial.skeleton(subject, weights)
    if spec.weights:
        weights.check(module)
    for name, p in module.named_parameters() if weights.whole else ():
        values = weights(name, p)
        if name in weights.names:
            p.data.copy_(values)
    # Parameters that get no gradient are frozen before trained ones are counted.
    still = subject.survey.idle
    idle = [module.get_parameter(name).requires_grad_(False) for name in still]
    if idle:
        count = sum(p.numel() for p in idle)
        notes.append(
            f"frozen: {len(idle)} parameters ({count:,} elements) get no gradient, of which the "
            f"first is {still[0]}"
        )
    for part in resolved.recipe.strategies:
        if part.reads_weights and not weights.whole:
            initial.fill(module, weights, "cpu")
        part.edit_model(module, subject)
    return module, weights, notes


# ---- accelerator, data, libraries ----


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
    module = initial.build(subject, 0, resolved.spec.init)
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
    kind: type[Run] = Run,
) -> Run:
    """Build, edit, fill, prepare and attach, in slot order; return the run, a ``kind``.

    Args:
        feed: opened before the meter took its baseline, which includes data and its libraries.
            None: the run draws samples, so nothing is trained and there is no optimizer.
        scratch: folder for NVMe offload.
        enter: called at the start of the phases load and prepare.
    """
    recipe, launch, subject = resolved.recipe, resolved.launch, resolved.subject
    engine = launch.engine
    enter("load")
    module, weights, notes = edited_model(resolved)
    if feed is not None:
        work = Workload(
            micro_batch=resolved.micro_batch,
            clip=resolved.settings.grad_clip,
            # Trained parameters are known only now, and they determine the buffers' sizes.
            sizes=subject.sizes_of(module),
            scratch=scratch,
            layout=launch.layout,
        )
        engine.configure(accelerator, work)
    if not weights.whole:
        engine.fill(accelerator, module, weights, subject.blocks(module))
    for name, p in module.named_parameters() if accelerator.device.type != "meta" else ():
        if p.device.type == "meta":
            raise ValueError(
                f"{name} has no value: the strategy whose edit_model copied or made it must say "
                "reads_weights = True"
            )
    if feed is None:
        module.requires_grad_(False).eval()
    enter("prepare")
    for part in recipe.strategies:
        part.configure(accelerator, module, launch)
    if feed is None:
        model = accelerator.prepare_model(module, evaluation_mode=True)
        optimizer: Any = SimpleNamespace(param_groups=[], state={})  # updates nothing
    else:
        chosen: Any = recipe.in_slot(Slot.OPTIMIZE)
        model, optimizer = engine.prepare(
            accelerator,
            module.train(),
            lambda params: chosen.make_optimizer(params, resolved.settings, launch),
            subject.blocks(module),
        )
    run = kind(
        resolved=resolved,
        accelerator=accelerator,
        model=model,
        module=module,
        optimizer=optimizer,
        launch=launch,
        settings=resolved.settings,
        feed=feed,
        objective=objective_of(resolved.spec.objective),
        digest=combined(weights.digests),
        notes=notes,
    )
    for part in recipe.strategies:
        attachment = part.attach(run)
        if attachment is not None:
            run.attached[part.name] = attachment
    return run
