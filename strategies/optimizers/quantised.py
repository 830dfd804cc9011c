"""Optimizers with low-bit states: made alike, and read back by the bytes of their codes."""

from __future__ import annotations

from typing import Any

from strategies.base import Settings, demand
from strategies.engine import Trained
from strategies.evidence import states
from strategies.evidence.settings import label
from strategies.evidence.stored import bytes_of, stored

__all__ = ["low_bit_facts", "torchao_adam"]

# bitsandbytes and torchao both keep tensors below this in float32.
SMALLEST = 4096
BLOCKS = {8: 256, 4: 128}
"""Bits -> torchao's block; it leaves tensors that are not whole blocks in float32."""


def torchao_adam(name: str, params: list[Any], settings: Settings, device: str) -> Any:
    """torchao's optimizer; on a CPU stepped without torch.compile.

    It compiles its step for each shape of a parameter. On a GPU that is a Triton kernel; on a CPU
    it is a C++ compiler's half minute for the same arithmetic.
    """
    import torch
    from torchao import optim

    kind = getattr(optim, name)
    if device == "cuda":
        return kind(params, **settings.adam)

    def step(self: Any, closure: Any = None) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return kind.step(self, closure)

    return type(name, (kind,), {"step": step})(params, **settings.adam)


def low_bit_facts(trained: Trained, kind: str, home: str, bits: int) -> dict[str, Any]:
    """Class, settings and steps, and the state's bytes: codes of ``bits`` and no more than scales.

    Small tensors stay in float32 by both libraries' rule, so only the others are held to it.
    """
    optimizer = trained.inner_optimizer
    names = [f"{k.__module__.partition('.')[0]}.{k.__name__}" for k in type(optimizer).__mro__]
    demand(f"{home}.{kind}" in names, f"the optimizer is {names[0]}, not {home}.{kind}")
    states.agree(trained, **trained.settings.adam)
    block = 1 if home == "bitsandbytes" else BLOCKS[bits]
    sizes = {p: trained.engine.part(p).numel() for p in optimizer.state}
    large = [p for p, size in sizes.items() if size >= SMALLEST and size % block == 0]
    # Shards need not be whole blocks; torchao then leaves all of it in float32.
    demand(bool(large), f"nothing was quantised: no tensor is {SMALLEST} elements in whole blocks")
    moments = [t for p in large for t in _moments(optimizer.state[p])]
    codes = sum(t.numel() for t in moments if str(t.dtype) == "torch.uint8")
    elements = sum(sizes[p] for p in large)
    demand(codes == elements * 2 * bits // 8, f"{codes} bytes of codes for {elements} elements")
    mean = bytes_of(moments) / elements
    compiled = {"compiled_step": names[0].startswith(home)} if home == "torchao" else {}
    demand(mean <= 1.2 * 2 * bits / 8, f"{mean:.2f} bytes of moments an element")
    facts = {
        "class": f"{home}.{kind}",
        **compiled,
        "steps": states.steps(trained),
        "moment_bytes_per_element": round(mean, 3),
        "state_bytes_per_element": round(states.per_element(trained), 3),
    }
    return label(facts, "compiled_step") if compiled else facts


def _moments(state: dict[str, Any]) -> list[Any]:
    """Codes and scales of one parameter; the lookup tables are shared or tiny, so left out."""
    import torch

    kept = [v for k, v in state.items() if k != "step" and not k.startswith("qmap")]
    tensors = [v for v in kept if isinstance(v, torch.Tensor)]
    return [t for v in tensors for t in stored(v) if t is not getattr(v, "qmap", None)]
