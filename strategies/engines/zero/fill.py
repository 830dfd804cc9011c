"""First weights under DeepSpeed, in its storage type; under ZeRO-3 each is sharded as it is drawn.

By default DeepSpeed 0.19 takes the whole model, casts all of it, and then shards it, without the
parameters that its own ``zero.Init`` has sharded. Here every rank draws each parameter whole, and
``zero.Init`` shards it before the next one, in the order of ``module.parameters()``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from strategies import initial
from strategies.initial import Draw


def fill(accelerator: Any, module: nn.Module, draw: Draw, *, split: bool) -> None:
    """Draw the first weights of ``module``; ``split``: under ZeRO-3, shard them."""
    if not initial.waits(module):
        return  # DeepSpeed gets the whole model
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}  # to which DeepSpeed casts parameters
    asked = (kind for name, kind in kinds.items() if config.get(name, {}).get("enabled") is True)
    dtype = next(asked, None)
    if not split:
        initial.fill(module, draw, accelerator.device, dtype)
        return
    cut = Cutter(accelerator, config)

    def shared(p: nn.Parameter) -> nn.Parameter:
        if initial.pending(p) is not None:
            new = initial.filled(p, draw, accelerator.device, dtype)
        else:  # DeepSpeed casts no parameter after this, nor an adapter that has its value
            new = initial.moved(p, accelerator.device, dtype)
        cut(new)
        return new

    initial.replace(module, shared)
    for part in module.modules():  # DeepSpeed moves no buffers either
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = buffer.to(accelerator.device)


class Cutter:
    """Sharder of single parameters by ``deepspeed.zero.Init``: this rank's share remains."""

    def __init__(self, accelerator: Any, config: dict[str, Any]) -> None:
        # The values that accelerate will set; Init reads offload and other settings.
        self.config = copy.deepcopy(config)
        steps = accelerator.gradient_accumulation_steps
        self.config["gradient_accumulation_steps"] = steps
        micro = self.config["train_micro_batch_size_per_gpu"]
        self.config["train_batch_size"] = micro * steps * accelerator.num_processes
        self.first: nn.Parameter | None = None

    def __call__(self, p: nn.Parameter) -> None:
        if self.first is not None:
            # DeepSpeed's engine shards more parameters by a method of the first.
            self.first.convert_to_zero_parameters([p])
            return
        from deepspeed.runtime.zero.partition_parameters import Init

        Init(module=nn.ParameterList([p]), dtype=p.dtype, config_dict_or_path=self.config)
        self.first = p
