"""Float8 layers of torchao, and weights that FSDP2 gathers in float8. Imports torch and torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torchao.float8 import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    convert_to_float8_training,
)
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

from strategies import initial
from strategies.base import demand
from strategies.engine import TrainingRun


def config(part: Any) -> Float8LinearConfig:
    """Return the layers' configuration as ``part`` says, a ``strategies.precision.fp8.Fp8``."""
    named = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName(part.scaling))
    return dataclasses.replace(named, emulate=part.emulate)


def replace(module: nn.Module, names: Sequence[str], part: Any) -> None:
    """Replace the named linear layers as ``part`` says."""
    chosen = {module.get_submodule(name) for name in names}
    convert_to_float8_training(
        module, module_filter_fn=lambda layer, name: layer in chosen, config=config(part)
    )
    if part.gather == "fp8":
        for name in names:
            _gather_in_float8(module.get_submodule(name))


def _gather_in_float8(layer: Any) -> None:
    """Give a layer's weight torchao's class that FSDP2 gathers in float8, when it is drawn."""

    def keep(values: Tensor) -> nn.Parameter:
        dtype = layer.config.cast_config_weight.target_dtype
        return nn.Parameter(
            WeightWithDynamicFloat8CastTensor(values, layer.linear_mm_config, dtype)
        )

    layer.weight = initial.kept(layer.weight, keep, hold=nn.Parameter)


def gathered(run: TrainingRun) -> dict[str, Any]:
    """Check the type of the weights that FSDP2 gathered in the watched step, by their bytes."""
    from strategies.engines.fsdp import shard

    kind = WeightWithDynamicFloat8CastTensor
    params = [p for group in shard.groups(run.module) for p in group.fsdp_params]
    ours = [p for p in params if isinstance(p._sharded_local_tensor, kind)]
    wanted = len(run.subject.linears)
    demand(len(ours) >= wanted, f"{len(ours)} of {wanted} weights are gathered in float8")
    seen = run.observed
    demand(bool(seen.ran), "no step was watched")
    sent = [s for s in seen.sent if s.phase == "forward" and "allgather" in s.collective]
    found = sum(s.bytes for s in sent) / seen.micro_steps
    codes = sum(p._sharded_param_data.numel() for p in ours)
    others = sum(p._sharded_param_data.numel() for p in params) - codes
    itemsize = max((p.param_dtype or p.orig_dtype).itemsize for p in params)
    most = 1.5 * codes + others * itemsize
    text = f"{found:.0f} bytes were gathered in forward, expected {most:.0f} at most"
    demand(found <= most, text)
    return {"gathered_in_float8": codes}
