"""The exported lines, executed in this process: each has the effect that it names, read from what
was trained; without its lines the same script has not.

On one process without a GPU, with the stand-in model: what needs more is started in
``test_launched_exports`` or compiled in ``test_export_files``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from conftest import launchable
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from harness.planner.export.bundle import script
from harness.planner.export.lines import Lines, lines_of, mixed_precision
from harness.resolve import Resolved, resolve
from harness.spec import Spec

Trained = dict[str, Any]
NUMBERS = "MICRO_BATCH, ACCUMULATION, STEPS, BLOCKS = 2, {}, 2, 4"


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """accelerate's states and torch's switches are global to a process."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    kept = [flag.allow_tf32 for flag in flags]
    torch.set_num_threads(1)
    yield
    for flag, value in zip(flags, kept, strict=True):
        flag.allow_tf32 = value
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Seen:
    """What the steps of a script showed: norms of gradients as the optimizer got them, how often
    it stepped, and how backward was called."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.backwards: list[dict[str, Any]] = []

    def stepping(self, optimizer: Any, *_: Any) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self.sparse = any(g.is_sparse for g in grads)
        self.norms.append(float(torch.nn.utils.get_total_norm([g.to_dense() for g in grads])))


def run(resolved: Resolved, lines: list[Lines]) -> tuple[Trained, Seen]:
    """The script with these lines, executed."""
    text = script("title", ("command", ""), lines, NUMBERS.format(resolved.launch.accumulation), ())
    seen, usual = Seen(), torch.Tensor.backward

    def backward(loss: Any, *given: Any, **named: Any) -> None:
        seen.backwards.append(named)
        usual(loss, *given, **named)

    space = {"__name__": "exported", "__file__": "train.py"}
    carried = {str(path.parent) for part in lines for path in part.carry}
    with contextlib.ExitStack() as stack:
        for folder in carried:
            stack.enter_context(mock.patch.object(sys, "path", [folder, *sys.path]))
        word = {
            "ACCELERATE_MIXED_PRECISION": mixed_precision(resolved),
            "ACCELERATE_USE_CPU": "true",
        }
        stack.enter_context(mock.patch.dict("os.environ", word))
        stack.enter_context(mock.patch.object(torch.Tensor, "backward", backward))
        exec(compile(text, "train.py", "exec"), space)
        if "torchao.optim" in text:  # it would compile its step, a C++ compiler's half minute
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(register_optimizer_step_pre_hook(seen.stepping).remove)
        trained = space["main"]()
    PartialState._reset_state()
    return {**space, **trained}, seen


# ---- effects ----


class Ops(TorchDispatchMode):
    """The operators of what runs within, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def loss_again(trained: Trained) -> torch.Tensor:
    """One more forward pass."""
    x, y, noise = next(trained["data"])
    return (trained["model"](x, y).float() - noise).square().mean()


def forwards_a_step(trained: Trained, kind: str = "Attention") -> float:
    """How often a block's layer of this class runs in one forward and backward, on average."""
    layers = [m for m in trained["model"].modules() if type(m).__name__ == kind]
    ran: list[Any] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: ran.append(1))
    loss_again(trained).backward()
    return len(ran) / len(layers)


def attention(trained: Trained) -> set[str]:
    """Names of the fused attention operators of a forward pass."""
    with Ops() as ops:
        loss_again(trained)
    return {name for name in ops.names if "scaled_dot_product" in name}


def kept_products(trained: Trained) -> bool:
    """Recomputed in backward, but for the products."""
    loss = loss_again(trained)
    with Ops() as ops:
        loss.backward()
    forward = sum("gelu.default" in name for name in ops.names)
    return forward == len(trained["model"].blocks) and "aten.addmm.default" not in ops.names


def inner(trained: Trained) -> Any:
    """The optimizer below accelerate's."""
    return trained["optimizer"].optimizer


def free(trained: Trained) -> set[str]:
    """Names of what takes a gradient."""
    return {n for n, p in trained["model"].named_parameters() if p.requires_grad}


def adapters(trained: Trained, rank: int) -> bool:
    layers = [m for m in trained["model"].modules() if hasattr(m, "lora_A") and len(m.lora_A)]
    ranks = {layer.lora_A["default"].weight.shape[0] for layer in layers}
    moved = all(bool(layer.lora_B["default"].weight.any()) for layer in layers)
    return (
        len(layers) == 16 and ranks == {rank} and moved and all("lora_" in n for n in free(trained))
    )


def placed(trained: Trained, part: str) -> set[str]:
    """The layers of the blocks whose adapter's ``part``, zero at first, has moved."""
    named = trained["model"].named_parameters()
    moved = [n for n, p in named if p.requires_grad and f".{part}." in n and bool(p.any())]
    return {name.removeprefix("blocks.").partition(f".{part}.")[0] for name in moved}


def shapes(trained: Trained, part: str) -> set[tuple[int, ...]]:
    """The shapes of such matrices."""
    named = trained["model"].named_parameters()
    return {tuple(p.shape) for n, p in named if f".{part}." in n}


def kinds(trained: Trained) -> tuple[set[torch.dtype], ...]:
    """Types of frozen and of trained parameters."""
    named = list(trained["model"].parameters())
    return tuple({p.dtype for p in named if p.requires_grad == free} for free in (False, True))


def of_kind(trained: Trained, name: str) -> int:
    """How many modules are of a class of that name."""
    return sum(type(module).__name__ == name for module in trained["model"].modules())


def in_four_bits(trained: Trained) -> int:
    """How many weights are stored as bytes."""
    return sum(p.dtype == torch.uint8 for p in trained["model"].parameters())


def tokens_inside(trained: Trained) -> list[int]:
    """Tokens that each block's MLP gets in forward."""
    layers = [m for m in trained["model"].modules() if type(m).__name__ == "GELU"]
    seen: list[int] = []
    handles = [
        la.register_forward_hook(lambda _, given, out: seen.append(out.shape[1])) for la in layers
    ]
    loss_again(trained)
    for handle in handles:
        handle.remove()
    return seen


def row_scales(trained: Trained) -> int:
    """Scales of rows that one forward finds."""
    with Ops() as ops:
        loss_again(trained)
    return ops.names.count("aten.amax.default")


def in_eight_bits(trained: Trained) -> int:
    """How many layers store codes, and multiply by them."""
    return sum(hasattr(m, "scale") for m in trained["model"].modules())


def int8_products(trained: Trained) -> int:
    """Products of int8 operands in one forward and backward."""
    with Ops() as ops:
        loss_again(trained).backward()
    return ops.names.count("aten._int_mm.default")


def captured() -> int:
    """Calls that went into compiled graphs."""
    return torch._dynamo.utils.counters["stats"]["calls_captured"]


def zeros(trained: Trained) -> float:
    """The share of zeros in the blocks' matrices."""
    found = [p for p in trained["model"].blocks.parameters() if p.ndim == 2]
    return sum(int((p == 0).sum()) for p in found) / sum(p.numel() for p in found)


def state(trained: Trained) -> set[str]:
    """What the optimizer keeps of a matrix of a block."""
    p = next(p for p in trained["model"].blocks.parameters() if p.ndim == 2)
    return set(inner(trained).state[p])


def moment_types(trained: Trained) -> set[torch.dtype]:
    kept = inner(trained).state.values()
    return {v.dtype for state in kept for k, v in state.items() if k.startswith("exp_avg")}


def follows(trained: Trained, device: str = "cpu") -> bool:
    """An average that moved towards its weights, a ten thousandth of the way a step."""
    pairs = zip(trained.get("average", ()), trained.get("weights", ()), strict=True)
    away = [float((a - w.detach().float()).abs().max()) for a, w in pairs]
    return bool(away) and 0 < max(away) < 1e-3


def adam(kind: str, **wanted: Any) -> Callable[[Trained, Seen], bool]:
    def effect(trained: Trained, seen: Seen) -> bool:
        group = inner(trained).param_groups[0]
        numbers = (group["lr"], tuple(group["betas"]), group["eps"], group["weight_decay"])
        asked = (3e-4, (0.9, 0.95), 1e-8, 0.01)
        settings = {name: group.get(name) for name in wanted}
        return type(inner(trained)).__name__ == kind and numbers == asked and settings == wanted

    return effect


EFFECTS: dict[str, Callable[[Trained, Seen], bool]] = {
    "tf32": lambda t, s: torch.backends.cuda.matmul.allow_tf32,
    "bf16_pure": lambda t, s: {p.dtype for p in t["model"].parameters()} == {torch.bfloat16},
    "fp8:emulate=on": lambda t, s: of_kind(t, "Float8Linear") == 16,
    "fp8:emulate=on,scaling=rowwise": lambda t, s: row_scales(t) >= 2 * 16,
    "lora+cast": lambda t, s: in_eight_bits(t) == 16 and not int8_products(t),
    "lora+cast:layers=all": lambda t, s: in_eight_bits(t) > 16,
    "lora+cast:dynamic=on": lambda t, s: in_eight_bits(t) == 16 and int8_products(t) >= 16 + 12,
    "lora:rank=4": lambda t, s: adapters(t, 4),
    "bf16_pure:autocast=on+lora:dtype=fp32": (
        lambda t, s: adapters(t, 8) and kinds(t) == ({torch.bfloat16}, {torch.float32})
    ),
    "bf16_pure+qlora": lambda t, s: adapters(t, 8) and kinds(t)[1] == {torch.bfloat16},
    "dora": lambda t, s: adapters(t, 8) and any("magnitude" in n for n in free(t)),
    "qlora": lambda t, s: adapters(t, 8) and in_four_bits(t) > 16,
    "qlora:layers=blocks": lambda t, s: adapters(t, 8) and in_four_bits(t) == 16,
    "lora:targets=ffn,blocks=1/last1": (
        lambda t, s: placed(t, "lora_B") == {f"{b}.mlp.{i}" for b in (1, 3) for i in (0, 2)}
    ),
    "dora:targets=qkv,blocks=first1": lambda t, s: placed(t, "lora_B") == {"0.attn.qkv"},
    "qlora:targets=attention,blocks=0": (
        lambda t, s: placed(t, "lora_B") == {"0.attn.qkv", "0.attn.proj"} and in_four_bits(t) > 16
    ),
    "lora:reach=model": (
        lambda t, s: {n[0].isdigit() for n in placed(t, "lora_B")} == {True, False}
    ),
    "lokr:factor=8": (
        lambda t, s: len(placed(t, "lokr_w1")) == 16 and shapes(t, "lokr_w1") == {(8, 8)}
    ),
    "loha:rank=4,blocks=0-1": lambda t, s: len(placed(t, "hada_w2_b")) == 8,
    "oft:size=16": (
        lambda t, s: len(placed(t, "oft_R")) == 16 and {n for _, n in shapes(t, "oft_R")} == {120}
    ),
    "head": lambda t, s: free(t) == {"final.weight", "final.bias"},
    "difffit": lambda t, s: sum(n.endswith(".gamma") for n in free(t)) == 8,
    "controlnet": lambda t, s: sum(n.endswith(".zero.weight") for n in free(t)) == 2,
    "prune:fraction=0.75": lambda t, s: 0.74 < zeros(t) < 0.76,
    "attend:kernel=math": lambda t, s: not any("flash" in name for name in attention(t)),
    "checkpoint": lambda t, s: forwards_a_step(t) == 2,
    "checkpoint:every=2": lambda t, s: forwards_a_step(t) == 2 and len(t["model"].blocks) == 2,
    "checkpoint:every=sqrt": lambda t, s: forwards_a_step(t) == 2 and len(t["model"].blocks) == 2,
    "checkpoint:part=ffn": lambda t, s: (
        forwards_a_step(t, "GELU") == 2 and forwards_a_step(t) == 1
    ),
    "checkpoint:part=attention": lambda t, s: (
        forwards_a_step(t) == 2 and forwards_a_step(t, "GELU") == 1
    ),
    "checkpoint:keep=products": lambda t, s: kept_products(t),
    "compile:backend=aot_eager": lambda t, s: captured() > 0,
    "compile:backend=aot_eager,scope=model": (
        lambda t, s: t["model"]._compiled_call_impl is not None
    ),
    "compile:backend=aot_eager,budget=0.5": (
        lambda t, s: torch._functorch.config.activation_memory_budget == 0.5
    ),
    "adamw": adam("AdamW", fused=True),
    "adamw:impl=foreach": adam("AdamW", foreach=True),
    "adamw:impl=plain": adam("AdamW", foreach=False, fused=False),
    "bf16_pure+adamw_bf16": lambda t, s: getattr(inner(t), "rescued", 0) > 0,
    "bf16_pure+adamw_bf16:write=kahan": lambda t, s: "carried" in state(t),
    "adam8bit": lambda t, s: {"state1", "state2"} <= state(t),
    "adam8bit:lib=torchao": adam("AdamW8bit"),
    "adam4bit": adam("AdamW4bit"),
    "adam16bit": lambda t, s: moment_types(t) == {torch.bfloat16},
    "adafactor": lambda t, s: {"row_var", "col_var"} <= state(t),
    "came": lambda t, s: {"exp_avg", "exp_avg_res_row"} <= state(t),
    "prodigy": lambda t, s: {"p0", "s"} <= state(t),
    "muon": lambda t, s: "momentum_buffer" in state(t) and "adamw" in inner(t).parts,
    "sgd:momentum=0.0": lambda t, s: not state(t),
    "sgd": lambda t, s: "momentum_buffer" in state(t),
    "optimizer_in_backward": lambda t, s: len(s.norms) > 2 * len(free(t)),
    "backward": lambda t, s: all(call.get("retain_graph") for call in s.backwards),
    "backward:call=autograd_grad": lambda t, s: not s.backwards,
    "accumulate:steps=3": lambda t, s: (len(s.backwards), len(s.norms)) == (6, 2),
    "sgd:momentum=0.0+sparse_embedding": lambda t, s: s.sparse,
    "ema": lambda t, s: follows(t),
    "ema:place=cpu": lambda t, s: follows(t),
    "grad_clip": lambda t, s: max(s.norms) <= 1e-3 * 1.01,
}  # fmt: skip
"""What is beside ``single`` -> what must be seen of the last part named."""


def asked(parts: str) -> Resolved:
    clips = parts == "grad_clip"
    text = "single" if clips else f"single+{parts}"
    return resolve(
        Spec(
            recipe=text if "ema" in text else f"{text}+ema:place=none",
            model="DiT-S/4:depth=4", data="synthetic:32", global_batch=6, learning_rate=3e-4,
            beta2=0.95, weight_decay=0.01 * ("sparse" not in parts), grad_clip=1e-3 * clips,
        )
    )  # fmt: skip


FIRST = {parts.rpartition("+")[2].partition(":")[0]: parts for parts in reversed(EFFECTS)}
"""Parts of each strategy that are tried by default."""


@pytest.mark.parametrize("parts", launchable(EFFECTS, FIRST.values()))
def test_the_lines_of_a_part_have_its_effect_and_without_them_it_is_gone(parts):
    resolved, effect = asked(parts), EFFECTS[parts]
    assert resolved.refusal is None
    lines = lines_of(resolved)
    trained, seen = run(resolved, lines)
    assert torch.isfinite(loss_again(trained)) and effect(trained, seen)
    last = parts.rpartition("+")[2].partition(":")[0]
    without = [part for part in lines if part.of.partition(":")[0].split()[0] != last]
    assert len(without) == len(lines) - 1
    _reset()
    other, seen = run(resolved, without)
    assert not effect(other, seen), "the effect is there without its lines"
    if last == "checkpoint":
        assert trained["loss"].item() == pytest.approx(other["loss"].item(), rel=1e-6)


@pytest.mark.parametrize(
    ("parts", "edit", "said"),
    [
        ("checkpoint:part=ffn", ("self.mlp", "self.dense"), "no layer of the blocks is called"),
    ],
)
def test_lines_in_a_model_that_they_do_not_fit_are_refused(parts, edit, said, monkeypatch):
    """A trainer whose lines do nothing would run out of memory, or only seem to fit."""
    made, resolved = script, asked(parts)
    monkeypatch.setattr(f"{__name__}.script", lambda *given: made(*given).replace(*edit))
    with pytest.raises(ValueError, match=said):
        run(resolved, lines_of(resolved))


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._functorch.config.activation_memory_budget = 1.0


def test_every_part_with_lines_that_runs_here_is_tried():
    """What has lines, and is neither tried above nor launched, needs a GPU or other processes."""
    from harness.planner.export.lines import table

    tried = {name for parts in EFFECTS for name in _names(parts)}
    with_lines = {name for name, found in table().items() if any("why" not in r for r in found)}
    elsewhere = {"fp32", "fp16", "paged_adam8bit", "offload_adamw", "compress"}
    elsewhere |= {"fsdp2", "fsdp2_offload", "hsdp"}
    assert with_lines - tried == elsewhere


def _names(parts: str) -> list[str]:
    return [part.partition(":")[0] for part in parts.split("+")]


def test_the_stand_in_runs_by_itself():
    path = Path(script.__globals__["STAND_IN"])
    space: Trained = {"__name__": "alone"}
    with mock.patch.dict("os.environ", {"ACCELERATE_USE_CPU": "true"}):
        exec(compile(path.read_text(), str(path), "exec"), space)
        trained = space["main"]()
    assert isinstance(trained["model"], nn.Module) and torch.isfinite(trained["loss"])
