"""Adam with 8-bit and 4-bit moments, block-wise with a scale each, or bfloat16 moments: adam8bit,
paged_adam8bit, adam4bit, adam16bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Parity, Settings, Slot, demand, load
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import rules, states
from strategies.evidence.readings import bytes_of, stored
from strategies.evidence.rules import label
from strategies.strategy import Strategy

# ---- quantized moments ----


# bitsandbytes and torchao both keep tensors below this in float32.
SMALLEST = 4096
BLOCKS = {8: 256, 4: 128}
"""Bits -> torchao's block size; tensors that are not whole blocks stay in float32."""

OFF = 0.01
"""Largest relative error of an update against AdamW's rule in float64, by the decoded moments."""


TORCHAO = "torchao.optim"


def torchao_adam(place: str, params: list[Any], settings: Settings, device: str) -> Any:
    """Return torchao's optimizer, by "module:Class".

    On a CPU, and while operators are watched, it steps uncompiled.

    It compiles its step for each parameter shape. On a GPU that is a Triton kernel; on a CPU, half
    a minute of a C++ compiler for the same arithmetic. Under a dispatch mode, such as a trace,
    torch compiles nothing, and torch 2.13 raises if it was told to compile ("fullgraph=True found
    no compiled frames").
    """
    import torch

    kind = load(place)

    def step(self: Any, closure: Any = None) -> Any:
        compiles = device == "cuda" and not torch._C._len_torch_dispatch_stack()
        self.compiled_steps += compiles
        # The stance is in force from its construction on.
        with contextlib.nullcontext() if compiles else torch.compiler.set_stance("force_eager"):
            return kind.step(self, closure)

    members = {"step": step, "compiled_steps": 0}
    return type(kind.__name__, (kind,), members)(params, **settings.adam)


def torchao_needs(launch: RunContext) -> tuple[str, ...]:
    """Return the machine's requirements: on a GPU also a compiler for its step."""
    return ("torchao", "inductor") if launch.device == "cuda" else ("torchao",)


def watch_low_bit(trained: TrainingRun) -> AbstractContextManager[list[rules.Update]]:
    """Record the first update of a tensor with quantized moments, and decode these."""
    optimizer = trained.inner_optimizer

    def quantised(p: Any) -> bool:
        kept = [v for v in _moments(optimizer.state.get(p, {})) if str(v.dtype) == "torch.uint8"]
        return bool(kept)

    return rules.watch(optimizer, quantised, read=_as_numbers)


def _as_numbers(state: dict[str, Any], p: Any) -> dict[str, Any]:
    """Return both moments in float32, by AdamW's names; for bitsandbytes the first elements."""
    if "state1" in state:
        names = {"exp_avg": "1", "exp_avg_sq": "2"}
        return {name: _looked_up(state, number) for name, number in names.items()}
    # Moments of a DTensor are DTensors; their codes are those of the share.
    return {name: rules.here(state[name]).dequantize() for name in ("exp_avg", "exp_avg_sq")}


def _looked_up(state: dict[str, Any], number: str) -> Any:
    """Decode bitsandbytes' blocks: each code is an index into the table, each block has a scale."""
    codes = state[f"state{number}"].flatten()[: rules.SAMPLE]
    scales = state[f"absmax{number}"].repeat_interleave(BLOCKS[8])[: codes.numel()]
    return state[f"qmap{number}"][codes.long()] * scales


def low_bit_facts(
    trained: TrainingRun, kind: str, home: str, bits: int, watched: Iterable[rules.Update] | None
) -> dict[str, Any]:
    """Check class, settings, steps, state bytes, and the ``watched`` update against AdamW's rule.

    The state has codes of ``bits`` and at most scales besides. Both libraries keep small tensors in
    float32, so only the others are checked.
    """
    optimizer = trained.inner_optimizer
    names = [f"{k.__module__.partition('.')[0]}.{k.__name__}" for k in type(optimizer).__mro__]
    demand(f"{home}.{kind}" in names, f"the optimizer is {names[0]}, expected {home}.{kind}")
    states.agree(trained, **trained.settings.adam)
    block = 1 if home == "bitsandbytes" else BLOCKS[bits]
    sizes = {p: trained.engine.part(p).tensor.numel() for p in optimizer.state}
    large = [p for p, size in sizes.items() if size >= SMALLEST and size % block == 0]
    # Shards need not be whole blocks; torchao then leaves all of it in float32.
    demand(
        bool(large), f"no state was quantized: no tensor has {SMALLEST} elements in whole blocks"
    )
    moments = [t for p in large for t in _moments(optimizer.state[p])]
    codes = sum(t.numel() for t in moments if str(t.dtype) == "torch.uint8")
    elements = sum(sizes[p] for p in large)
    demand(
        codes == elements * 2 * bits // 8,
        f"{codes} bytes of codes for {elements} elements, expected {elements * 2 * bits // 8}",
    )
    mean = bytes_of(moments) / elements
    compiled = {"compiled_step": optimizer.compiled_steps > 0} if home == "torchao" else {}
    demand(
        mean <= 1.2 * 2 * bits / 8,
        f"{mean:.2f} bytes of moments for each element, expected about {bits / 4:g}",
    )
    facts = {
        "class": f"{home}.{kind}",
        **compiled,
        "steps": states.steps(trained),
        "moment_bytes_per_element": round(mean, 3),
        "state_bytes_per_element": round(states.per_element(trained), 3),
    }
    for update in watched or ():
        error = rules.adamw_weight_error(update, trained.settings)
        demand(error <= OFF, f"an update differs from AdamW's rule by {error:.2g} (relative)")
        facts["update_error"] = float(f"{error:.2g}")
    return label(facts, "compiled_step") if compiled else facts


def _moments(state: dict[str, Any]) -> list[Any]:
    """Return codes and scales of one parameter, without lookup tables, which are shared or tiny."""
    import torch

    kept = [v for k, v in state.items() if k != "step" and not k.startswith("qmap")]
    tensors = [v for v in kept if isinstance(v, torch.Tensor)]
    return [t for v in tensors for t in stored(v) if t is not getattr(v, "qmap", None)]


IN_HOST_MEMORY = {"host_optimizer", "host_weights"}
HOST = "the launch file keeps the optimizer in host memory; take the same sharding without offload"


@dataclass(frozen=True, kw_only=True)
class Adam8bit(Strategy):
    """AdamW with 8-bit moments.

    The library is bitsandbytes (``lib=bnb``) or torchao (``lib=torchao``).
    """

    name: ClassVar[str] = "adam8bit"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Dettmers et al. 2022, 8-bit Optimizers (arXiv:2110.02861)"
    needs: ClassVar[tuple[str, ...]] = ("bitsandbytes",)

    lib: str = "bnb"

    def __post_init__(self) -> None:
        if self.lib not in ("bnb", "torchao"):
            raise ValueError(f"lib is {self.lib!r}; one of bnb, torchao")

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return self.needs if self.lib == "bnb" else torchao_needs(launch)

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state", "rounds_state"})

    def refuses(self, launch: RunContext) -> str | None:
        if self.lib == "bnb" and "dtensor_weights" in launch.traits:
            return "bitsandbytes' kernels take no DTensor; use adam8bit:lib=torchao, zero2 or ddp"
        return HOST if launch.traits & IN_HOST_MEMORY else None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        if self.lib == "torchao":
            return torchao_adam(f"{TORCHAO}:AdamW8bit", params, settings, launch.device)
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(params, **settings.adam)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        return watch_low_bit(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        return low_bit_facts(trained, "AdamW8bit", self._home(), 8, self.note(trained))

    def _home(self) -> str:
        return "bitsandbytes" if self.lib == "bnb" else "torchao"


@dataclass(frozen=True, kw_only=True)
class PagedAdam8bit(Adam8bit):
    """8-bit AdamW with moments in paged memory.

    The driver moves that memory between host and GPU.
    """

    name: ClassVar[str] = "paged_adam8bit"
    source: ClassVar[str] = "Dettmers et al. 2023, QLoRA, section 3 (arXiv:2305.14314)"
    # On a CPU bitsandbytes warns and keeps ordinary memory.
    needs: ClassVar[tuple[str, ...]] = ("bitsandbytes", "cuda")

    def __post_init__(self) -> None:
        if self.lib != "bnb":
            raise ValueError(f"lib is {self.lib!r}; only bnb pages")

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        from bitsandbytes.optim import PagedAdamW8bit

        return PagedAdamW8bit(params, **settings.adam)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        facts = low_bit_facts(trained, "PagedAdamW8bit", "bitsandbytes", 8, self.note(trained))
        moments = [s["state1"] for s in trained.inner_optimizer.state.values()]
        # Moments below 1e5 elements are not worth a page and stay on the device.
        paged = [getattr(m, "is_paged", False) for m in moments if m.numel() >= 1e5]
        demand(
            bool(paged) and all(paged), f"{sum(paged)} of {len(paged)} moments are in paged memory"
        )
        # It is bitsandbytes' own mark; the driver's use of the pages is not observable.
        return label({**facts, "paged_moments": len(paged)}, "paged_moments")


@dataclass(frozen=True, kw_only=True)
class Adam4bit(Strategy):
    """AdamW with 4-bit moments, two to a byte."""

    name: ClassVar[str] = "adam4bit"
    slot: ClassVar[Slot] = Slot.OPTIMIZE
    parity: ClassVar[Parity] = Parity.BY_DESIGN
    alters: ClassVar[tuple[str, ...]] = ("update",)
    source: ClassVar[str] = "Li et al. 2023, 4-bit States (arXiv:2309.01507); torchao.optim"
    needs: ClassVar[tuple[str, ...]] = ("torchao",)

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        return torchao_needs(launch)

    def traits(self) -> frozenset[str]:
        return frozenset({"own_state", "rounds_state"})

    def refuses(self, launch: RunContext) -> str | None:
        return HOST if launch.traits & IN_HOST_MEMORY else None

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        return torchao_adam(f"{TORCHAO}:AdamW4bit", params, settings, launch.device)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        return watch_low_bit(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        return low_bit_facts(trained, "AdamW4bit", "torchao", 4, self.note(trained))


# ---- bfloat16 moments ----


@dataclass(frozen=True, kw_only=True)
class Adam16bit(Adam4bit):
    """AdamW with bfloat16 moments.

    The step runs in float32, and each moment is rounded to nearest when it is stored. With a
    ``beta2`` above 0.998 the second moment then grows but never falls: the decay of a step is less
    than half a unit in its last place. DeepSeek-V3 trained with a ``beta2`` of 0.95.
    """

    name: ClassVar[str] = "adam16bit"
    source: ClassVar[str] = "DeepSeek-AI 2024, DeepSeek-V3, 3.3.2 (arXiv:2412.19437); torchao.optim"

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        place = "strategies.optimizers.bf16_moments:AdamW16bit"
        return torchao_adam(place, params, settings, launch.device)

    def observe(self, trained: TrainingRun) -> AbstractContextManager[Any]:
        return rules.watch(trained.inner_optimizer)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        optimizer = trained.inner_optimizer
        names = [k.__name__ for k in type(optimizer).__mro__]
        demand("AdamW16bit" in names, f"the optimizer is {names[0]}, expected AdamW16bit")
        states.agree(trained, **trained.settings.adam)
        kinds = states.stored_dtypes(trained)["moments"]
        demand(kinds == "bfloat16", f"the moments are {kinds or 'none'}, expected bfloat16")
        facts = {
            "class": names[0],
            "steps": states.steps(trained),
            "compiled_step": optimizer.compiled_steps > 0,
            "moments": kinds,
            "state_bytes_per_element": round(states.per_element(trained), 3),
        }
        for update in self.note(trained) or ():
            error = rules.adamw_error(update, trained.settings)
            demand(error <= OFF, f"an update differs from AdamW's rule by {error:.2g} (relative)")
            facts["update_error"] = float(f"{error:.2g}")
        return label(facts, "compiled_step")
