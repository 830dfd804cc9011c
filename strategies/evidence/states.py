"""Evidence read from objects: optimizer state, types of a forward pass, and frozen weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from strategies.base import Attachment, demand
from strategies.engine import TrainingRun
from strategies.evidence.readings import Observed, Ran, wrapped
from strategies.evidence.watching import watch

if TYPE_CHECKING:
    import torch

    from strategies.engine import Engine
    from strategies.inventory import Shard


def agree(group: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Demand these settings in one parameter group; numbers may be tensors there."""
    for key, value in wanted.items():
        actual = group.get(key)
        if key == "lr":  # torchao keeps its learning rate in a float32 tensor
            same = abs(float(actual or 0.0) - value) <= 1e-6 * abs(value)
        else:
            plain = [tuple(v) if isinstance(v, list) else v for v in (actual, value)]
            same = plain[0] == plain[1]
        demand(same, f"the optimizer's {key} is {actual}, expected {value}")


def counted(run: TrainingRun) -> int | None:
    """Return the highest step count in the optimizer's state; None if it has none."""
    counts = [s["step"] for s in run.inner_optimizer.state.values() if "step" in s]
    return int(max(map(float, counts))) if counts else None


def each_count(run: TrainingRun) -> list[int]:
    """Return the step count (0: none) in the state of each weight, or piece, that this rank's
    optimizer updates; empty if no state has a count."""
    counts = [
        int(shard.state().get("step", 0))
        for shard in run.engine.shards(run)
        if shard.tensor.numel()
    ]
    return counts if any(counts) else []


def first_moment(shard: Shard) -> torch.Tensor | None:
    """Return the running mean of the gradients of what the optimizer updates; None if it keeps
    none as plain numbers."""
    named = (shard.state().get(name) for name in ("exp_avg", "momentum_buffer"))
    found: Any = next((moment for moment in named if moment is not None), None)
    plain = found is not None and found.is_floating_point() and not wrapped((type(found),))
    return found if plain and found.numel() == shard.tensor.numel() else None


def steps(run: TrainingRun) -> int:
    """Return the step count in the optimizer's state, which must equal the loop's."""
    taken: Any = counted(run)
    demand(taken is not None, "the optimizer has no state: it never stepped")
    demand(
        taken == run.optimizer_steps,
        f"the optimizer stepped {taken} times, the loop {run.optimizer_steps}",
    )
    return taken


def count_steps(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Add a step count per parameter, as Adam's, to an optimizer that has none."""

    def count(stepped: Any, *_: Any) -> None:
        for group in stepped.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    stepped.state[p]["step"] = stepped.state[p].get("step", 0) + 1

    optimizer.register_step_post_hook(count)
    return optimizer


# ---- one more forward pass ----


def forward_once(run: TrainingRun, *, gradients: bool = False) -> Any:
    """Return the trained model's output for one sample of zeros; every rank takes part."""
    import torch

    subject = run.subject
    x, t_B, conditions = subject.example(run.accelerator.device)
    with torch.set_grad_enabled(gradients):
        return subject.predict(run.model, run.cut(x), t_B, conditions)


def loss_once(run: TrainingRun) -> Any:
    """Return a loss of one sample of zeros for a backward call, with what is added to the true loss
    (``TrainingRun.supervise``): some weights get a gradient by that alone."""
    with eager(run):
        if run.supervise is None:
            return forward_once(run, gradients=True).float().square().mean()
        x, t_B, conditions = run.subject.example(run.accelerator.device)

        def predict(x: Any, t_B: Any) -> Any:
            return run.subject.predict(run.model, run.cut(x), t_B, conditions)

        return run.supervise(lambda ask: ask(x, t_B).float().square(), predict, conditions)


def compute_dtype(run: TrainingRun) -> str:
    """Return the type in which the model's matrix products ran: that of the output of the blocks'
    first linear layer; without one, of the model's first layer with weights."""
    from torch.utils._pytree import tree_leaves

    seen: list[str] = []

    def found(layer: Any, given: Any, out: Any) -> None:
        kinds = [leaf.dtype for leaf in tree_leaves(out) if hasattr(leaf, "dtype")]
        seen.extend(str(kind) for kind in kinds if kind.is_floating_point)

    modules = run.module.modules()
    leaves = (m for m in modules if not [*m.children()] and [*m.parameters(recurse=False)])
    name = next(iter(run.linears), None)
    first = next(leaves) if name is None else run.module.get_submodule(name)
    handle = first.register_forward_hook(found)
    try:
        with eager(run):
            forward_once(run)
    finally:
        handle.remove()
    return seen[-1].removeprefix("torch.") if seen else "none"


def eager(run: TrainingRun) -> Any:
    """Return a context in which compiled blocks run uncompiled: hooks and modes see them then."""
    if "compiled" not in run.launch.traits:
        return contextlib.nullcontext()
    import torch

    return torch.compiler.set_stance("force_eager")


def operations(run: TrainingRun, *, compiled: bool = True) -> list[Ran]:
    """Return every operator of one forward, in order, without a type if it was profiled;
    ``compiled`` False runs compiled graphs eagerly.

    A dispatch mode would do that as well, so graphs are profiled. Not under ZeRO-3, where the
    profiler has crashed (torch 2.13, DeepSpeed 0.19.8).
    """
    graphs = compiled and "compiled" in run.launch.traits
    if graphs and "split_parameters" not in run.launch.traits:
        from torch.profiler import ProfilerActivity, profile

        forward_once(run)  # compiles for one sample, which runs other operators
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            forward_once(run)
        return [Ran(event.name, event.input_shapes, "", "") for event in profiled.events()]
    seen = Observed()
    with eager(run), watch(seen):
        forward_once(run)
    return seen.ran


# ---- types ----


def dtypes(run: TrainingRun) -> dict[str, str]:
    """Return the types of computation, stored parameters and the optimizer's weights and
    moments."""
    return {"compute_dtype": compute_dtype(run), **stored_dtypes(run)}


def stored_dtypes(run: TrainingRun) -> dict[str, str]:
    """Return the types of stored parameters and of the optimizer's weights and moments."""
    states = run.inner_optimizer.state.values()
    held = {
        # Packed codes are no compute type; the strategy that packs them checks their type.
        "parameters": [p for p in run.module.parameters() if p.is_floating_point()],
        "master": run.optimized(),
        "moments": [v for state in states for k, v in state.items() if k.startswith("exp_avg")],
    }
    kinds = {name: {str(t.dtype) for t in tensors} for name, tensors in held.items()}
    return {k: "+".join(sorted(w.removeprefix("torch.") for w in v)) for k, v in kinds.items()}


def products(run: TrainingRun) -> dict[str, Any]:
    """Return the matrix products of forward and backward of the watched step, counted by type;
    empty if no step was watched."""
    if not run.observed.ran:
        return {}
    return {"products": dict(run.observed.products("forward", "backward"))}


# ---- frozen weights ----


PERIOD = 65521
PIECE = 8 * PERIOD
"""Bytes of a weight that are summed at a time: whole periods, so that places repeat."""


def count(parameters: Iterable[Any], engine: Engine) -> int:
    """Return the elements of whole parameters, also if ``engine`` sharded them or two share a
    byte."""
    elements = 0
    for p in parameters:
        packed = getattr(p, "quant_state", None)
        whole = packed if packed is not None else engine.part(p)
        elements += whole.shape.numel()
    return elements


def train_only(module: Any, wanted: set[str]) -> None:
    """Freeze every parameter whose name is not in ``wanted``."""
    for name, p in module.named_parameters():
        p.requires_grad_(name in wanted)


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bytes, weighted by position: another bit gives another sum.

    It stays on the device, in pieces, since bytes as whole numbers take eight times as much.
    """
    import torch

    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    place = torch.arange(1, 1 + min(PIECE, flat.numel()), device=flat.device).remainder_(PERIOD)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in pieces(flat):
        total += piece.to(torch.int64).mul_(place[: piece.numel()]).sum()
    return int(total)


def pieces(flat: torch.Tensor) -> Iterable[torch.Tensor]:
    """Split a flat tensor of bytes into the pieces that are summed at a time."""
    return flat.split(PIECE)


class Frozen(Attachment):
    """Checksums of all parameters after prepare, of this rank's parts."""

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.sums = dict(self._now())

    def _now(self) -> Iterator[tuple[str, int]]:
        for name, p in self.run.module.named_parameters():
            yield name, checksum(self.run.engine.part(p).tensor)

    def changed(self) -> set[str]:
        """Return the names of parameters that have changed."""
        return {name for name, value in self._now() if value != self.sums[name]}

    def state_dict(self) -> dict[str, Any]:
        """Return the checksums of the training's beginning."""
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the checksums of the training's beginning."""
        self.sums = state["sums"]


def split_facts(run: TrainingRun, name: str) -> dict[str, Any]:
    """Return the counts of trained and frozen elements, and check bit by bit that frozen ones are
    unchanged."""
    kept: Any = run.attached.get(name)
    demand(isinstance(kept, Frozen), "no checksums of the weights were computed before training")
    parameters = dict(run.module.named_parameters())
    free = {n for n, p in parameters.items() if p.requires_grad}
    changed = kept.changed()
    stray = sorted(changed - free)
    demand(not stray, f"{len(stray)} frozen weights changed, {stray[0] if stray else ''} first")
    demand(bool(changed), "no weight has changed")
    trainable = count((parameters[n] for n in free), run.engine)
    total = count(parameters.values(), run.engine)
    return {"trainable": trainable, "frozen": total - trainable, "changed_tensors": len(changed)}
