"""Optimizers, one entry each: library class, keyword arguments, requirements, state and remarks.

No torch at import. What an optimizer computes is held by tests/strategies/test_update_rules.py,
once per version of a library. A run checks the class, the settings, the steps and the bytes of
state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import Any, ClassVar

from strategies.base import Settings, Slot, demand, load
from strategies.engine import RunContext, TrainingRun
from strategies.evidence import states
from strategies.evidence.readings import bytes_of, stored
from strategies.strategy import Strategy
from strategies.subject import Subject

# ---- what an entry says ----

Given = Callable[[Any, Settings], dict[str, Any]]
"""(strategy, the spec's settings) -> keyword arguments of the optimizer's class."""
Bytes = tuple[float, float]
"""Fewest and most bytes of moments for each element of a large tensor."""
Moments = Callable[[Any, int, float], Bytes]
"""(strategy, bytes of one weight, rows and columns for each element) -> bytes of moments."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One optimizer.

    ``kind``: "module:Class". ``about``: docstring; its first sentence is its line in the list.
    ``fields``: parameters and their defaults; ``values``, ``least``, ``ranges``: see ``Strategy``.
    ``written``: value of the parameter ``write`` -> another class. ``exact``: it computes AdamW.
    ``block``: elements that share a scale; only tensors of whole blocks have such moments.
    ``compiled``: it is torchao's, which compiles its step.
    """

    kind: str
    about: str
    source: str
    given: Given = lambda part, settings: settings.adam
    moments: Moments
    needs: tuple[str, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Iterable[str]] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[Callable[[Any], bool], str]] = field(default_factory=dict)
    traits: frozenset[str] = frozenset({"own_state"})
    written: Mapping[str, str] = field(default_factory=dict)
    exact: bool = False
    compiled: bool = False
    block: int = 256
    base: str = "Optimizer"


@dataclass(frozen=True, kw_only=True)
class Optimizer(Strategy):
    """Base of all optimizers; ``entry`` is the one of the table."""

    slot: ClassVar[Slot] = Slot.OPTIMIZE
    entry: ClassVar[Entry]

    def traits(self) -> frozenset[str]:
        random = getattr(self, "write", "") == "stochastic"
        return self.entry.traits | ({"random_rounding"} if random else set())

    @property
    def by_torchao(self) -> bool:
        """True if the step is torchao's, which is compiled on a GPU."""
        return self.entry.compiled or getattr(self, "lib", "") == "torchao"

    def requires(self, launch: RunContext) -> tuple[str, ...]:
        if not self.by_torchao:
            return self.needs
        return ("torchao", "inductor") if launch.device == "cuda" else ("torchao",)

    def kind(self, launch: RunContext) -> str:
        """Return its class as "module:Class"."""
        return self.entry.written.get(getattr(self, "write", ""), self.entry.kind)

    def given(self, settings: Settings, launch: RunContext) -> dict[str, Any]:
        """Return the keyword arguments of its class."""
        return self.entry.given(self, settings)

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        if self.by_torchao:
            return torchao_adam(self.kind(launch), params, settings, launch.device)
        return load(self.kind(launch))(params, **self.given(settings, launch))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        optimizer, wanted = run.inner_optimizer, self.kind(run.launch)
        found = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        demand(isinstance(optimizer, load(wanted)), f"the optimizer is {found}, expected {wanted}")
        for group in optimizer.param_groups:
            states.agree(group, self.given(run.settings, run.launch))
        facts = {"class": type(optimizer).__name__, "steps": states.steps(run)}
        if run.launch.traits & {"swapped_weights", "host_optimizer"}:
            return facts  # its state is in files, or in the engine's own pieces
        return facts | self.moments(run)

    def moments(self, run: TrainingRun) -> dict[str, float]:
        """Return the bytes of moments for each element of large tensors, within their bounds.

        Empty if no tensor is large, unless the moments are quantized: then nothing was.
        """
        block, state = self.entry.block, run.inner_optimizer.state
        # Convolutions are left out: their last two dimensions are too small to factor.
        sizes = {p: run.engine.part(p).tensor.numel() for p in state if p.ndim <= 2}
        large = [p for p, size in sizes.items() if size >= LARGE and size % block == 0]
        if not large:
            text = f"no tensor has {LARGE} elements in whole blocks of {block}"
            demand("rounds_state" not in self.entry.traits, f"no state was quantized: {text}")
            return {}
        elements = sum(sizes[p] for p in large)
        found = bytes_of(t for p in large for t in _moments(state[p])) / elements
        sides = sum(sum(p.shape) for p in large) / elements
        least, most = self.entry.moments(self, large[0].element_size(), sides)
        text = f"{found:.2f} bytes of moments for each element"
        fits = 0.99 * least <= found <= 1.01 * most
        demand(fits, f"{text}, expected {least:.2f} to {most:.2f}")
        return {"moment_bytes_per_element": round(found, 3)}


LARGE = 4096
"""Elements below which bitsandbytes and torchao keep moments in float32; so do they for tensors of
no whole blocks."""


def _moments(state: Mapping[str, Any]) -> list[Any]:
    """Return codes and scales of one parameter, without lookup tables, which are shared or tiny."""
    import torch

    tensors = [v for k, v in state.items() if k != "step" and not k.startswith("qmap")]
    found = [v for v in tensors if isinstance(v, torch.Tensor)]
    return [t for v in found for t in stored(v) if t is not getattr(v, "qmap", None)]


# ---- AdamW, and what steps as it ----

KERNELS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"foreach": False, "fused": False},
}


class TorchAdamW(Optimizer):
    """torch's AdamW; the engine's own where the launch file offloads the optimizer."""

    impl: str

    def kind(self, launch: RunContext) -> str:
        # accelerate's own replacement would drop betas, eps and the decoupled decay.
        host = "host_optimizer" in launch.traits
        return launch.engine.host_adamw if host else self.entry.kind

    def given(self, settings: Settings, launch: RunContext) -> dict[str, Any]:
        host = "host_optimizer" in launch.traits
        return settings.adam if host else super().given(settings, launch)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the kernel too that the operators of a whole step show, whatever the flags are."""
        facts, ops = super().evidence(run), run.ops
        if "host_optimizer" in run.launch.traits:
            demand(run.inner_optimizer.adam_w_mode, "weight decay is not decoupled")
            return facts
        if not ops:  # no step was watched, as if it is compiled
            return facts
        names = {"fused": "_fused_adam", "foreach": "_foreach_addcdiv"}
        found = (name for name, op in names.items() if any(op in one for one in ops))
        ran = next(found, "plain")
        demand(ran == self.impl, f"the step ran the {ran} kernel, expected {self.impl}")
        return facts | {"kernel": ran}


class HostAdamW(Optimizer):
    """torchao's AdamW in host memory (``torchao_adamw``)."""

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        optimizer = run.inner_optimizer
        states = optimizer.state.items()
        places = {state["exp_avg"].device.type for p, state in states if p.numel() >= LARGE}
        demand(places == {"cpu"}, f"the moments are on {places}, expected in host memory")
        facts = super().evidence(run)
        pinned = all(copy.is_pinned() for copy in optimizer.param_d2h_map.values())
        demand(pinned, "the copies of the weights are not in pinned memory")
        return facts | {"pinned": pinned}


# ---- moments in few bits ----


class Bnb(Optimizer):
    """8-bit AdamW by bitsandbytes, or by torchao (``lib=torchao``)."""

    lib: str
    write: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lib == "torchao" and self.entry.written.get(self.write):
            raise ValueError(f"lib is 'torchao', and write is {self.write!r}; take lib=bnb")

    def kind(self, launch: RunContext) -> str:
        return super().kind(launch) if self.lib == "bnb" else "torchao.optim:AdamW8bit"

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        facts = super().evidence(run)
        if not self.kind(run.launch).endswith("PagedAdamW8bit"):
            return facts
        moments = [s["state1"] for s in run.inner_optimizer.state.values()]
        # Moments below 1e5 elements are not worth a page and stay on the device.
        paged = [getattr(m, "is_paged", False) for m in moments if m.numel() >= 1e5]
        text = f"{sum(paged)} of {len(paged)} moments are in paged memory"
        demand(bool(paged) and all(paged), text)
        return facts | {"paged_moments": len(paged)}


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


# ---- others with code of their own ----


class Sgd(Optimizer):
    """SGD: sparse gradients are possible without momentum.

    With momentum, torch would keep a sparse moment that grows by every batch's rows.
    """

    momentum: float

    def traits(self) -> frozenset[str]:
        return super().traits() | ({"takes_sparse"} if self.momentum == 0 else set())

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        return states.count_steps(super().make_optimizer(params, settings, launch))


class Muon(Optimizer):
    """Muon for the blocks' matrices, AdamW for all else (``two_optimizers``)."""

    momentum: float

    def edit_model(self, module: Any, subject: Subject) -> None:
        for block in subject.blocks(module):
            for p in block.parameters():
                p.hidden_matrix = p.ndim == 2

    def make_optimizer(self, params: list[Any], settings: Settings, launch: RunContext) -> Any:
        from strategies.optimizers.two_optimizers import TwoOptimizers

        matrices = [p for p in params if getattr(p, "hidden_matrix", False)]
        others = [p for p in params if not getattr(p, "hidden_matrix", False)]
        parts = {"muon": states.count_steps(super().make_optimizer(matrices, settings, launch))}
        if others:
            parts["adamw"] = load("torch.optim:AdamW")(others, fused=True, **settings.adam)
        return TwoOptimizers(parts)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        optimizer = run.inner_optimizer
        kinds = {name: type(p).__name__ for name, p in getattr(optimizer, "parts", {}).items()}
        found = f"{type(optimizer).__name__} with {kinds}"
        demand(kinds.get("muon") == "Muon", f"the optimizer is {found}, expected Muon")
        for group in optimizer.param_groups:
            own = group["part"] == "muon"
            given = self.entry.given(self, run.settings) if own else run.settings.adam
            states.agree(group, given)
        inner = [p for block in run.blocks() for p in block.parameters()]
        wanted = [p for p in inner if p.requires_grad and p.ndim == 2]
        alone = all(set(optimizer.state[p]) == {"momentum_buffer", "step"} for p in wanted)
        demand(alone, "Muon does not step every matrix of the blocks")
        return {"steps": states.steps(run), "muon_matrices": len(wanted)}


# ---- the table ----

ROUNDS = frozenset({"own_state", "rounds_state"})
MOMENTUM = {"momentum": (lambda v: 0 <= v < 1, "from 0 to below 1")}
CAME = {"eps": (1e-30, 1e-16), "clip_threshold": 1.0}


TABLE: dict[str, Entry] = {
    "adamw": Entry(
        kind="torch.optim:AdamW",
        about="""AdamW, in one of torch's three implementations.

        ``impl=fused`` is one kernel, ``foreach`` is multi-tensor operations, and ``plain`` steps
        tensor by tensor. If the launch file offloads the optimizer, the engine's own
        implementation runs.""",
        source="Loshchilov and Hutter 2019, Decoupled Weight Decay (arXiv:1711.05101)",
        given=lambda part, s: {**s.adam, "amsgrad": False, **KERNELS[part.impl]},
        moments=lambda part, size, sides: (2 * size, 2 * size),
        fields={"impl": "fused"},
        values={"impl": KERNELS},
        traits=frozenset(),
        exact=True,
        base="TorchAdamW",
    ),
    "adamw_bf16": Entry(
        kind="strategies.optimizers.bf16_adamw:Bf16AdamW",
        about="""Writes bfloat16 weights without losing small updates.

        ``write=stochastic`` rounds up or down at random. ``write=kahan`` carries the lost part to
        the next step.""",
        source="Zamirai et al. 2020, Revisiting BFloat16 Training (arXiv:2010.06192)",
        given=lambda part, s: {**s.adam, "kahan": part.write == "kahan"},
        moments=lambda part, size, sides: (2.0 * (2 + (part.write == "kahan")),) * 2,
        fields={"write": "stochastic"},
        values={"write": ("stochastic", "kahan")},
        traits=frozenset(),
    ),
    "adam8bit": Entry(
        kind="bitsandbytes.optim:AdamW8bit",
        about="""AdamW with 8-bit moments.

        The library is bitsandbytes (``lib=bnb``) or torchao (``lib=torchao``). With
        ``write=kahan`` it carries what a bfloat16 weight cannot take to the next step.""",
        source="Dettmers et al. 2022, 8-bit Optimizers (arXiv:2110.02861)",
        moments=lambda part, size, sides: (4.0, 4.4) if part.write == "kahan" else (2.0, 2.4),
        needs=("bitsandbytes",),
        fields={"lib": "bnb", "write": "nearest"},
        values={"lib": ("bnb", "torchao"), "write": ("nearest", "kahan")},
        written={"kahan": "strategies.optimizers.adam8bit_kahan:AdamW8bitKahan"},
        traits=ROUNDS,
        base="Bnb",
    ),
    "adam4bit": Entry(
        kind="torchao.optim:AdamW4bit",
        about="AdamW with 4-bit moments, two to a byte.",
        source="Li et al. 2023, 4-bit States (arXiv:2309.01507); torchao.optim",
        moments=lambda part, size, sides: (1.0, 1.2),
        needs=("torchao",),
        traits=ROUNDS,
        compiled=True,
    ),
    "adam16bit": Entry(
        kind="strategies.optimizers.torchao_adamw:AdamW16bit",
        about="""AdamW with bfloat16 moments.

        The step runs in float32, and each moment is rounded to nearest when it is stored. With a
        ``beta2`` above 0.998 the second moment then grows but never falls: the decay of a step is
        less than half a unit in its last place. DeepSeek-V3 trained with a ``beta2`` of 0.95.""",
        source="DeepSeek-AI 2024, DeepSeek-V3, 3.3.2 (arXiv:2412.19437); torchao.optim",
        moments=lambda part, size, sides: (4.0, 4.0),
        needs=("torchao",),
        traits=ROUNDS,
        block=1,
        compiled=True,
    ),
    "paged_adam8bit": Entry(
        kind="bitsandbytes.optim:PagedAdamW8bit",
        about="""8-bit AdamW with moments in paged memory.

        The driver moves that memory between host and GPU.""",
        source="Dettmers et al. 2023, QLoRA, section 3 (arXiv:2305.14314)",
        moments=lambda part, size, sides: (2.0, 2.4),
        # On a CPU bitsandbytes warns and keeps ordinary memory.
        needs=("bitsandbytes", "cuda"),
        fields={"lib": "bnb"},
        values={"lib": ("bnb",)},
        traits=ROUNDS,
        base="Bnb",
    ),
    "adafactor": Entry(
        kind="torch.optim:Adafactor",
        about="""Adafactor: no first moment, and a factored second.

        The second moment is the outer product of a row and a column a matrix. With
        ``write=stochastic`` bfloat16 weights are stepped in float32 and rounded at random.""",
        source="Shazeer and Stern 2018 (arXiv:1804.04235); torch.optim.Adafactor",
        given=lambda part, s: {"lr": s.learning_rate, "weight_decay": s.weight_decay},
        moments=lambda part, size, sides: (sides * (size if part.write == "nearest" else 4),) * 2,
        fields={"write": "nearest"},
        values={"write": ("nearest", "stochastic")},
        written={"stochastic": "strategies.optimizers.bf16_adamw:Bf16Adafactor"},
    ),
    "came": Entry(
        kind="came_pytorch.CAME:CAME",
        about="""CAME: a first moment, and two factored second moments.

        One is of gradients, as Adafactor's, and one of the difference between an update and its
        mean. A matrix of m x n keeps mn + 2 (m + n) numbers.""",
        source="Luo et al. 2023, CAME (arXiv:2307.02047); came_pytorch",
        given=lambda part, s: {**s.adam, "betas": (*s.betas, 0.9999), **CAME},
        moments=lambda part, size, sides: (4 + 8 * sides,) * 2,
        needs=("came_pytorch",),
    ),
    "prodigy": Entry(
        kind="prodigyopt:Prodigy",
        about="""AdamW that estimates its own learning rate.

        The spec's learning rate is not used. The estimate starts at ``d0`` and grows with the
        distance from the first weights. That takes a copy of these and a sum of gradients, of
        every ``slice``-th element. Warm-up safeguard and bias correction are on, as its authors
        advise for diffusion.""",
        source="Mishchenko and Defazio 2023, Prodigy (arXiv:2306.06101); prodigyopt",
        given=lambda part, s: {
            **s.adam, "lr": 1.0, "use_bias_correction": True, "safeguard_warmup": True,
            "d0": part.d0, "slice_p": part.slice,
        },
        # It keeps no copy of weights that begin at zero.
        moments=lambda part, size, sides: (
            size * (2 + 1 / part.slice), size * (2 + 2.1 / part.slice),
        ),
        needs=("prodigyopt",),
        fields={"d0": 1e-6, "slice": 1},
        least={"slice": 1},
        ranges={"d0": (lambda v: v > 0, "above 0, such as 1e-6")},
        traits=frozenset({"own_state", "whole_gradients"}),
    ),
    "muon": Entry(
        kind="torch.optim:Muon",
        about="""Muon for the blocks' matrices, AdamW for all else.

        All else is embeddings, biases and the output.

        The step is scaled to the size of AdamW's (Moonlight), so that the spec's learning rate
        holds.""",
        source="Jordan et al. 2024, Muon; Liu et al. 2025, Moonlight (arXiv:2502.16982)",
        given=lambda part, s: {
            "lr": s.learning_rate, "momentum": part.momentum, "weight_decay": s.weight_decay,
            "adjust_lr_fn": "match_rms_adamw", "ns_steps": 5,
        },
        moments=lambda part, size, sides: (size, size),
        fields={"momentum": 0.95},
        ranges=MOMENTUM,
        base="Muon",
    ),
    "sgd": Entry(
        kind="torch.optim:SGD",
        about="""SGD with ``momentum``; at 0 it keeps no state. The learning rate is the spec's.""",
        source="Robbins and Monro 1951; Sutskever et al. 2013 (momentum); torch.optim",
        given=lambda part, s: {
            "lr": s.learning_rate, "momentum": part.momentum, "weight_decay": s.weight_decay,
        },
        moments=lambda part, size, sides: (size * (part.momentum > 0),) * 2,
        fields={"momentum": 0.9},
        ranges=MOMENTUM,
        base="Sgd",
    ),
    "offload_adamw": Entry(
        kind="strategies.optimizers.torchao_adamw:HostAdamW",
        about="""AdamW that steps in host memory.

        The moments are there, with pinned copies of weights and gradients.""",
        source="torchao.optim.CPUOffloadOptimizer; Ren et al. 2021 (arXiv:2101.06840)",
        moments=lambda part, size, sides: (2 * size, 2 * size),
        needs=("torchao", "cuda"),
        traits=frozenset({"early_gradients", "whole_gradients"}),
        exact=True,
        base="HostAdamW",
    ),
}  # fmt: skip
"""Name -> optimizer, in the order of the list."""


def optimizer_kind(name: str) -> type[Optimizer]:
    """Return the strategy of the table's entry ``name``."""
    entry, base = TABLE[name], globals()[TABLE[name].base]
    same = ("source", "needs", "values", "least", "ranges")
    members: dict[str, Any] = {key: getattr(entry, key) for key in same}
    members |= {"name": name, "entry": entry, "__doc__": entry.about, "__module__": __name__}
    if not entry.exact:
        members["alters"] = ("update",)
    given = [(n, type(value), field(default=value)) for n, value in entry.fields.items()]
    return make_dataclass(name, given, bases=(base,), namespace=members, frozen=True, kw_only=True)
