"""peft's adapters, put beside a model's linear layers, which may have no values yet."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strategies.subject import Subject

if TYPE_CHECKING:
    import torch

__all__ = ["adapted", "inject"]


def inject(
    module: Any,
    subject: Subject,
    rank: int,
    names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> None:
    """Put peft's adapters beside the linear layers of these ``names`` (None: all of the subject's);
    the same first weights in every process. ``dtype`` is that of the adapters; None: the model's.
    """
    import peft
    import torch

    from strategies import initial

    # As a pattern: peft takes names in a list for endings of names.
    targets = "|".join(re.escape(name) for name in (subject.linears if names is None else names))
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, **more)
    waits = initial.waits(module)
    with torch.random.fork_rng(devices=[]):
        # peft puts adapters where the weights beside them are: here on meta, perhaps.
        with initial.valueless() if waits else contextlib.nullcontext():
            peft.inject_adapter_in_model(config, module)
        for name, layer in module.named_modules():
            if is_adapted(layer):
                begin(layer, name)
    for name, p in module.named_parameters():
        if "lora_" in name:  # beside packed weights peft would take float32
            p.data = p.data.to(dtype or subject.dtype(module))


def begin(layer: Any, name: str) -> None:
    """Give an adapter its first weights, by peft's rule: they depend on its name alone."""
    import torch

    from strategies import initial

    for part in (layer.lora_A, layer.lora_B):
        if any(p.device.type == "meta" for p in part.parameters()):
            part.to_empty(device="cpu")
    torch.manual_seed(initial.keyed(0, name).initial_seed())
    layer.reset_lora_parameters("default", True)


def is_adapted(layer: Any) -> bool:
    """Whether a module carries an adapter."""
    return hasattr(layer, "lora_A") and len(layer.lora_A) > 0


def adapted(module: Any) -> list[Any]:
    """The layers that carry an adapter."""
    return [m for m in module.modules() if is_adapted(m)]
