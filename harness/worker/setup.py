"""From a resolved spec to the prepared objects of one rank: the only place where they are made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from harness import data, model, world
from harness.audit import weights_digest
from harness.diffusion import OBJECTIVES
from harness.loop import Run
from harness.resolve import Resolved
from strategies.base import Slot, Trained

__all__ = ["build_feed", "build_model", "make_accelerator", "prepare"]


def make_accelerator(resolved: Resolved) -> Accelerator:
    """Accelerator with what the recipe's parts ask of it."""
    if resolved.spec.world:
        world.simulate(resolved.spec.world)
    return Accelerator(**resolved.recipe.accelerator_kwargs(resolved.launch))


def build_feed(resolved: Resolved, accelerator: Accelerator) -> data.Feed:
    """This rank's micro batches."""
    spec = resolved.spec
    return data.Feed(
        dataset=data.open_data(spec.data, accelerator.device),
        objective=OBJECTIVES[spec.objective],
        seed=spec.seed,
        global_batch=spec.global_batch,
        processes=accelerator.num_processes,
        rank=accelerator.process_index,
        micro_batch=resolved.micro_batch,
        class_dropout=spec.class_dropout,
        device=accelerator.device,
    )


def build_model(resolved: Resolved) -> model.DiT:
    """The DiT with the spec's initial weights, float32, in host memory."""
    spec, facts = resolved.spec, resolved.facts
    return model.build(
        spec.model,
        input_size=facts.input_size,
        channels=facts.channels,
        classes=facts.classes,
        seed=spec.seed,
        init=spec.init,
        learn_sigma=OBJECTIVES[spec.objective].learn_sigma,
        class_dropout=spec.class_dropout,
    )


ENGINE_MODULES = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.ops.adam",
    "deepspeed.checkpoint",
)
LIBRARIES = {
    "peft": ("peft",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao", "torchao.optim"),
    "inductor": ("torch._inductor.compile_fx",),
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
    modules = list(ENGINE_MODULES) if resolved.launch.engine == "DEEPSPEED" else []
    modules += [name for need in resolved.needs for name in LIBRARIES.get(need, ())]
    for name in modules:
        importlib.import_module(name)
    facts = resolved.facts
    module = model.build(
        "DiT-T/8", input_size=32, channels=facts.channels, classes=facts.classes, seed=0
    )
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    x_BCHW = torch.zeros(1, facts.channels, 32, 32)
    index_B = torch.zeros(1, dtype=torch.long)
    module(x_BCHW, index_B, index_B).square().mean().backward()
    torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
    optimizer.step()


def prepare(
    resolved: Resolved,
    feed: data.Feed,
    accelerator: Accelerator,
    scratch: Path,
    enter: Callable[[str], None],
) -> Run:
    """Build, edit, prepare and attach, in slot order.

    Args:
        feed: opened before the meter took its baseline: data and its libraries are not the model.
        scratch: where NVMe offload may write.
        enter: told when the phases load and prepare begin.
    """
    recipe, launch = resolved.recipe, resolved.launch
    enter("load")
    module = build_model(resolved)
    digest = weights_digest(module)
    enter("prepare")
    settle_engine(resolved, accelerator, scratch)
    for part in recipe.strategies:
        part.edit_model(module)
    # Only now is it known what is trained: an engine's buffers are sized by that.
    for part in recipe.strategies:
        part.configure(accelerator, module)
    module.train()
    parameters = [p for p in module.parameters() if p.requires_grad]
    chosen = recipe.in_slot(Slot.OPTIMIZE)
    optimizer = chosen.make_optimizer(parameters, resolved.settings, launch)
    prepared, optimizer = accelerator.prepare(module, optimizer)
    trained = Trained(
        accelerator=accelerator,
        model=prepared,
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
    if launch.simulated:
        world.average_alone(prepared)
    objective = OBJECTIVES[resolved.spec.objective]
    return Run(trained=trained, feed=feed, objective=objective, digest=digest)


def settle_engine(resolved: Resolved, accelerator: Accelerator, scratch: Path) -> None:
    """Write what the spec owns into DeepSpeed's config: micro batch, clipping, scratch folder.

    The JSON says "auto" or an explicit 0.0 there; left alone, accelerate would clip at 1.0.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return
    config: dict[str, Any] = plugin.deepspeed_config
    config["train_micro_batch_size_per_gpu"] = resolved.micro_batch
    config["gradient_clipping"] = resolved.settings.grad_clip
    for what in ("offload_optimizer", "offload_param"):
        block = config["zero_optimization"].get(what, {})
        if block.get("device") == "nvme":
            scratch.mkdir(parents=True, exist_ok=True)
            block["nvme_path"] = str(scratch)


def to_device_note(device: torch.device) -> str:
    """How the device is called in a result."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
