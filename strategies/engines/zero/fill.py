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
    from deepspeed.runtime.zero.partition_parameters import Init

    # The values that accelerate will set; Init reads offload and other settings.
    config, steps = copy.deepcopy(config), accelerator.gradient_accumulation_steps
    samples = config["train_micro_batch_size_per_gpu"] * steps * accelerator.num_processes
    config |= {"gradient_accumulation_steps": steps, "train_batch_size": samples}
    first: list[Any] = []

    def shared(p: nn.Parameter) -> nn.Parameter:
        if initial.pending(p) is not None:
            new = initial.filled(p, draw, accelerator.device, dtype)
        else:  # DeepSpeed casts no parameter after this, nor an adapter that has its value
            new = initial.moved(p, accelerator.device, dtype)
        if first:  # DeepSpeed's engine shards more parameters by a method of the first
            first[0].convert_to_zero_parameters([new])
        else:
            Init(module=nn.ParameterList([new]), dtype=new.dtype, config_dict_or_path=config)
            first.append(new)
        return new

    initial.replace(module, shared)
    for part in module.modules():  # DeepSpeed moves no buffers either
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = buffer.to(accelerator.device)
