"""AdamW for bfloat16 weights without a float32 copy.

It is our own: torch's AdamW rounds to nearest. torchao's AdamW with unquantized moments and
stochastic rounding is a private class of 0.18 that compiles its step. Neither has a compensated
sum.
"""

from __future__ import annotations

from typing import Any

import torch


def rounded_by_chance(exact: Any, generator: Any = None) -> Any:
    """Round float32 to bfloat16 stochastically: up or down with the odds of the distance, unbiased.

    A bfloat16 is a float32 without its last 16 bits. A random number below 2^16 added to them
    carries into the rest as often as they are large.
    """
    bits = exact.view(torch.int32)
    given = {"dtype": torch.int32, "device": bits.device, "generator": generator}
    noise = torch.randint(1 << 16, bits.shape, **given)
    return ((bits + noise) & -65536).view(torch.float32).to(torch.bfloat16)


def compensated(weight: Any, carried: Any, update: Any) -> tuple[Any, Any]:
    """Return weight + update in bfloat16, and the rounding error, which the next step adds."""
    wanted = update + carried.float()
    exact = weight.float() + wanted
    written = exact.to(weight.dtype)
    return written, (wanted - (written.float() - weight.float())).to(weight.dtype)


class Bf16AdamW(torch.optim.Optimizer):
    """AdamW that updates each tensor in float32.

    ``rescued`` counts elements of this process's first step that rounding to nearest would not have
    moved, and that moved or were carried. Random numbers depend on the step and the tensor's index:
    all ranks draw the same, also after a resume, or replicas would drift apart.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)
        self.rescued = 0
        self.generator: Any = None
        self.places: dict[Any, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_parameter(p, self.state[p], group)

    def _step_parameter(self, p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        kahan, first = group["kahan"], p not in self.places
        if not state:
            state["step"] = torch.zeros(())
            names = ("exp_avg", "exp_avg_sq", "carried")
            state.update({n: torch.zeros_like(p) for n in names[: 2 + kahan]})
        state["step"] += 1
        self.generator = self.generator or torch.Generator(p.device)
        place = self.places.setdefault(p, len(self.places))
        self.generator.manual_seed(int(state["step"]) << 20 | place)
        update, moments = _update(p, state, group)
        for name, moment in moments.items():
            state[name].copy_(moment if kahan else rounded_by_chance(moment, self.generator))
        if kahan:
            written, state["carried"] = compensated(p, state["carried"], update)
            moved = state["carried"] != 0
        else:
            written = rounded_by_chance(p.float() + update, self.generator)
            moved = written != p
        if first:
            stuck = (p.float() + update).to(p.dtype) == p
            self.rescued += int((stuck & moved & (update != 0)).sum())
        p.copy_(written)


def _update(p: Any, state: dict[str, Any], group: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return AdamW's update of ``p`` and the new moments, in float32."""
    (beta1, beta2), step, gradient = group["betas"], float(state["step"]), p.grad.float()
    first = state["exp_avg"].float().lerp(gradient, 1 - beta1)
    second = state["exp_avg_sq"].float().lerp(gradient * gradient, 1 - beta2)
    scale = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    update = (first / (1 - beta1**step)).div_(scale).mul_(-group["lr"])
    if group["weight_decay"]:
        update -= group["lr"] * group["weight_decay"] * p.float()
    return update, {"exp_avg": first, "exp_avg_sq": second}
