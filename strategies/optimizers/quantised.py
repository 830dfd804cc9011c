"""Optimizers with low-bit states: made alike, and read back by the bytes of their codes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from strategies.base import Settings, demand
from strategies.engine import Launch, Trained
from strategies.evidence import rules, states, updates
from strategies.evidence.settings import label
from strategies.evidence.stored import bytes_of, stored

__all__ = ["low_bit_facts", "torchao_adam", "torchao_needs", "watch_low_bit"]

# bitsandbytes and torchao both keep tensors below this in float32.
SMALLEST = 4096
BLOCKS = {8: 256, 4: 128}
"""Bits -> torchao's block; it leaves tensors that are not whole blocks in float32."""

OFF = 0.01
"""From AdamW's rule in float64, of an update: by the moments as they are read from their bits."""


def torchao_adam(name: str, params: list[Any], settings: Settings, device: str) -> Any:
    """torchao's optimizer; on a CPU, and while operators are watched, stepped op by op.

    It compiles its step for each shape of a parameter. On a GPU that is a Triton kernel; on a CPU
    it is a C++ compiler's half minute for the same arithmetic. Beneath a dispatch mode, as a trace
    is one, torch compiles nothing, and torch 2.13 takes that for an error where it was told to
    compile ("fullgraph=True found no compiled frames").
    """
    import torch
    from torchao import optim

    kind = getattr(optim, name)

    def step(self: Any, closure: Any = None) -> Any:
        compiles = device == "cuda" and not torch._C._len_torch_dispatch_stack()
        self.compiled_steps += compiles
        # The stance is in force from the moment at which it is made.
        with contextlib.nullcontext() if compiles else torch.compiler.set_stance("force_eager"):
            return kind.step(self, closure)

    members = {"step": step, "compiled_steps": 0}
    return type(name, (kind,), members)(params, **settings.adam)


def torchao_needs(launch: Launch) -> tuple[str, ...]:
    """What the machine must have for it: on a GPU, what compiles its step as well."""
    return ("torchao", "inductor") if launch.device == "cuda" else ("torchao",)


def watch_low_bit(trained: Trained) -> AbstractContextManager[list[updates.Update]]:
    """The first update of a tensor whose moments are kept in few bits, with them as numbers."""
    optimizer = trained.inner_optimizer

    def quantised(p: Any) -> bool:
        kept = [v for v in _moments(optimizer.state.get(p, {})) if str(v.dtype) == "torch.uint8"]
        return bool(kept)

    return updates.watch(optimizer, quantised, read=_as_numbers)


def _as_numbers(state: dict[str, Any], p: Any) -> dict[str, Any]:
    """Both moments in float32, by AdamW's names; of bitsandbytes' the first elements."""
    if "state1" in state:
        names = {"exp_avg": "1", "exp_avg_sq": "2"}
        return {name: _looked_up(state, number) for name, number in names.items()}
    # Where the parameter is a DTensor they are too, and their codes are the share's.
    return {name: updates.here(state[name]).dequantize() for name in ("exp_avg", "exp_avg_sq")}


def _looked_up(state: dict[str, Any], number: str) -> Any:
    """bitsandbytes' blocks: each code is a place in the table, each block has a scale."""
    codes = state[f"state{number}"].flatten()[: updates.SAMPLE]
    scales = state[f"absmax{number}"].repeat_interleave(BLOCKS[8])[: codes.numel()]
    return state[f"qmap{number}"][codes.long()] * scales


def low_bit_facts(
    trained: Trained, kind: str, home: str, bits: int, watched: Iterable[updates.Update] | None
) -> dict[str, Any]:
    """Class, settings and steps, the state's bytes: codes of ``bits`` and no more than scales; and
    the update that was ``watched``, against AdamW's rule.

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
    compiled = {"compiled_step": optimizer.compiled_steps > 0} if home == "torchao" else {}
    demand(mean <= 1.2 * 2 * bits / 8, f"{mean:.2f} bytes of moments an element")
    facts = {
        "class": f"{home}.{kind}",
        **compiled,
        "steps": states.steps(trained),
        "moment_bytes_per_element": round(mean, 3),
        "state_bytes_per_element": round(states.per_element(trained), 3),
    }
    for update in watched or ():
        error = rules.adamw_weight_error(update, trained.settings)
        demand(error <= OFF, f"an update is {error:.2g} of itself away from AdamW's rule")
        facts["update_error"] = float(f"{error:.2g}")
    return label(facts, "compiled_step") if compiled else facts


def _moments(state: dict[str, Any]) -> list[Any]:
    """Codes and scales of one parameter; the lookup tables are shared or tiny, so left out."""
    import torch

    kept = [v for k, v in state.items() if k != "step" and not k.startswith("qmap")]
    tensors = [v for v in kept if isinstance(v, torch.Tensor)]
    return [t for v in tensors for t in stored(v) if t is not getattr(v, "qmap", None)]
