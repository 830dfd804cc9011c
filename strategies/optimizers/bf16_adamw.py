"""AdamW and Adafactor for bfloat16 weights without a float32 copy.

They are our own: torch's round to nearest. torchao's AdamW with unquantized moments and stochastic
rounding is a private class of 0.18 that compiles its step. Neither has a compensated sum.
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


class ByChance:
    """Base of optimizers that round weights by chance, one at a time.

    Random numbers depend on the step and the tensor's index: all ranks draw the same, also after a
    resume, or replicas would drift apart.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.generator: Any = None
        self.places: dict[Any, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p in [(g, p) for g in self.param_groups for p in g["params"]]:
            if p.grad is not None:
                self._step_parameter(p, group)

    def _step_parameter(self, p: Any, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _draw_anew(self, p: Any, step: int) -> None:
        self.generator = self.generator or torch.Generator(p.device)
        self.generator.manual_seed(step << 20 | self.places.setdefault(p, len(self.places)))


class Bf16AdamW(ByChance, torch.optim.Optimizer):
    """AdamW that updates each tensor in float32."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    def _step_parameter(self, p: Any, group: dict[str, Any]) -> None:
        state, kahan = self.state[p], group["kahan"]
        if not state:
            state["step"] = torch.zeros(())
            names = ("exp_avg", "exp_avg_sq", "carried")
            state.update({n: torch.zeros_like(p) for n in names[: 2 + kahan]})
        state["step"] += 1
        self._draw_anew(p, int(state["step"]))
        update, moments = _update(p, state, group)
        for name, moment in moments.items():
            state[name].copy_(moment if kahan else rounded_by_chance(moment, self.generator))
        if kahan:
            written, state["carried"] = compensated(p, state["carried"], update)
        else:
            written = rounded_by_chance(p.float() + update, self.generator)
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


class Bf16Adafactor(ByChance, torch.optim.Adafactor):
    """torch's Adafactor in float32 over a copy of one weight at a time, as OneTrainer steps."""

    def _step_parameter(self, p: Any, group: dict[str, Any]) -> None:
        exact, groups = torch.nn.Parameter(p.float()), self.param_groups
        exact.grad = p.grad.float()
        self.state[exact] = self.state.pop(p, {})
        self.param_groups = [{**group, "params": [exact]}]
        torch.optim.Adafactor.step(self)
        self.param_groups = groups
        self.state[p] = self.state.pop(exact)
        self._draw_anew(p, int(self.state[p]["step"]))
        found = exact.detach()
        p.copy_(rounded_by_chance(found, self.generator) if p.dtype == torch.bfloat16 else found)

    def load_state_dict(self, saved: Any) -> None:
        """Load a state as it was saved: torch casts it to the type of its parameter."""
        super().load_state_dict(saved)
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(indices, params, strict=True):
            state = saved["state"].get(index, {})
            self.state[p] |= {k: v.to(p.device, copy=True) for k, v in state.items() if v.dim()}
