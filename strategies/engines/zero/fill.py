"""First weights under DeepSpeed: in the type in which it keeps them, and under ZeRO-3 cut up as
they come, so that no rank ever holds the whole model.

Left to itself DeepSpeed 0.19 is given the whole model, casts all of it, and then cuts it; where its
own ``zero.Init`` made the model it finds parameters that are cut already and leaves them. Here each
parameter is drawn whole, by every rank, and handed to ``zero.Init`` before the next one is drawn:
in the order of ``module.parameters()``, which is DeepSpeed's own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from strategies import initial
from strategies.initial import Draw


def fill(accelerator: Any, module: nn.Module, draw: Draw, *, split: bool) -> None:
    """Give ``module`` its first weights; ``split``: under ZeRO-3, cut into the ranks' shares."""
    if not initial.waits(module):
        return  # DeepSpeed gets the whole model
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    dtype = kept_as(config)
    if not split:
        initial.fill(module, draw, accelerator.device, dtype)
        return
    cut = Cutter(accelerator, config)

    def shared(p: nn.Parameter) -> nn.Parameter:
        # DeepSpeed casts nothing any more, an adapter that has its value neither.
        waiting = initial.pending(p) is not None
        new = (
            initial.filled(p, draw, accelerator.device, dtype)
            if waiting
            else initial.moved(p, accelerator.device, dtype)
        )
        cut(new)
        return new

    initial.replace(module, shared)
    for part in module.modules():  # nor does it move buffers
        for key, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[key] = buffer.to(accelerator.device)


def kept_as(config: dict[str, Any]) -> torch.dtype | None:
    """The 16-bit type to which DeepSpeed casts all parameters; None where it casts none."""
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        if config.get(name, {}).get("enabled") is True:
            return dtype
    return None


class Cutter:
    """Hands parameters to ``deepspeed.zero.Init``, one at a time: what stays of each is a share."""

    def __init__(self, accelerator: Any, config: dict[str, Any]) -> None:
        # As accelerate will settle it; Init reads offload and whatever else the file asks for.
        self.config = copy.deepcopy(config)
        steps = accelerator.gradient_accumulation_steps
        self.config["gradient_accumulation_steps"] = steps
        micro = self.config["train_micro_batch_size_per_gpu"]
        self.config["train_batch_size"] = micro * steps * accelerator.num_processes
        self.first: nn.Parameter | None = None

    def __call__(self, p: nn.Parameter) -> None:
        if self.first is not None:
            # The parameters that it has cut remember how, as DeepSpeed's engine asks them.
            self.first.convert_to_zero_parameters([p])
            return
        from deepspeed.runtime.zero.partition_parameters import Init

        Init(module=nn.ParameterList([p]), dtype=p.dtype, config_dict_or_path=self.config)
        self.first = p
