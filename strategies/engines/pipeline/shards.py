"""How a stage is sharded among the ranks that have it, and how its gradients are reduced.

torch's schedules know a stage that ``fully_shard`` made, and reduce its gradients behind its last
micro batch. Here the bare model is the root of all runs of blocks that a rank has, since parts of
it lie outside of them and are called by name; what torch does for such a stage, ``Reducing`` does
for each run.

Source: torch 2.13, torch/distributed/pipelining/stage.py (``backward_maybe_with_nosync``,
``perform_reduce_grad``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)

from strategies import initial
from strategies.engines.fsdp import facts
from strategies.engines.fsdp import shard as fsdp
from strategies.engines.pipeline import cut, places
from strategies.engines.pipeline.cut import Cut
from strategies.engines.pipeline.passage import Output
from strategies.engines.pipeline.places import Places
from strategies.engines.pipeline.staged import Stage, Staged
from strategies.engines.pipeline.ways import Handed, Standing
from strategies.initial import Draw

__all__ = ["Reducing", "Shared", "shard"]

KEY = "stages_places"
"""The attribute of a bare model that says where its ranks are."""
RUN = "run_of_blocks"
"""The method of a bare model in which its weights are gathered."""


class Shared(Staged):
    """A cut model whose weights are gathered where one of its runs of blocks is asked for.
    ``graded``: torch's parameters that had a gradient to reduce: what lies in front of the blocks
    of a model that is called whole has none on a stage that does without its values."""

    def __init__(self, module: nn.Module, cut: Cut, places: Places, reshard: bool) -> None:
        super().__init__(module, cut, places)
        self.reshard = reshard
        self.done: set[int] = set()
        self.graded: set[Any] = set()
        self.handed: Sequence[Output] = ()
        setattr(module, RUN, self._taken)
        register_fsdp_forward_method(module, RUN)
        if isinstance(self.way, Standing):
            # Its weights are there: called as a module it would be gathered once more within.
            self.way.called = module.forward

    def _taken(self, work: Callable[[], Tensor]) -> Any:
        """The prediction, or what a run hands on: torch must see it returned."""
        try:
            return work()
        except Handed as left:
            self.handed = left.outputs
            return left.tensors

    def _own(self, run: int, *given: Any) -> Tensor:
        # What came in stays hidden from torch, which would hand on a view of it.
        out = getattr(self.module, RUN)(functools.partial(super()._own, run, *given))
        if run == self.cut.end:
            return out
        raise Handed(out, self.handed)

    def _through(self, *given: Any, **named: Any) -> Tensor:
        """A prediction leaves nothing gathered behind: only a backward would let go of it."""
        try:
            return super()._through(*given, **named)
        finally:
            for part in _parts(self.module):
                part.reshard()

    def reduce(self, run: int) -> list[Any]:
        """Reduce the gradients of what no micro batch of this step uses again, once ``run`` has
        gone back: of its blocks, and with this rank's last run of what lies outside of them. The
        result are torch's groups of it."""
        self.done.add(run)
        last = len(self.done) == len(self.cut.blocks)
        parts = [*self.cut.blocks[run], *([self.module] if last else [])]
        for part in parts:
            part.set_reshard_after_backward(True, recurse=False)
            part.set_requires_gradient_sync(True, recurse=False)
        groups = [group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups]
        self.graded.update(p for group in groups for p in group.fsdp_params if _graded(p))
        for group in groups:
            group.post_backward()
        for group in groups:
            group.finalize_backward()
        if last:
            self.done.clear()
            self.module.set_is_last_backward(True)
            self.module._get_fsdp_state()._root_post_backward_final_callback()
        return groups


def _graded(p: Any) -> bool:
    """Whether one of torch's parameters has a gradient that waits to be reduced."""
    if not hasattr(p, "_unsharded_param"):
        return False
    return p.unsharded_accumulated_grad is not None or p.unsharded_param.grad is not None


def _parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


# ---- set-up ----


def shard(
    engine: Any,
    accelerator: Any,
    module: nn.Module,
    blocks: Sequence[nn.Module],
    draw: Draw | None = None,
) -> Shared:
    """Take from ``module`` what other stages have, and shard the rest by blocks in place, unless it
    is; ``draw`` gives weights that are not there yet, of one block before those of the next. All
    are drawn, so that every rank tells the same first weights."""
    layout, rank = engine.layout(accelerator.num_processes), accelerator.process_index
    if not isinstance(module, FSDPModule):
        vars(module)[KEY] = places.found(rank, layout.ranks, layout.data)
        own = vars(module)[KEY]
        before = list(module.parameters())
        made = cut.cut(module, blocks, own.stage, engine.homes)
        _draw_others(before, module, draw)
        here = [block for run in made.blocks.values() for block in run]
        fsdp.by_part(accelerator, [*here, module], _options(engine, accelerator, own), draw)
    model = Shared(module, cut.cut_of(module), vars(module)[KEY], engine.reshard)
    model.computes_in = _half(accelerator)
    return model


def _draw_others(before: Iterable[nn.Parameter], module: nn.Module, draw: Draw | None) -> None:
    here = {id(p) for p in module.parameters()}
    for p in before:
        waiting = initial.pending(p)
        if draw is not None and waiting is not None and id(p) not in here:
            draw(waiting.name, p)


def _options(engine: Any, accelerator: Any, own: Places) -> dict[str, Any]:
    """Weights are gathered, and multiplied with, in the type of mixed precision, and their
    gradients reduced in float32. Inputs are left as they are: cast, timesteps would be rounded."""
    half = _half(accelerator)
    known = "cuda" if accelerator.device.type == "cuda" else "cpu"  # a prediction's is neither
    return {
        "mesh": DeviceMesh.from_group(own.replicas, known),
        "reshard_after_forward": engine.reshard,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=half,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        ),
    }


def _half(accelerator: Any) -> torch.dtype | None:
    return torch.bfloat16 if accelerator.mixed_precision == "bf16" else None


# ---- one step ----


class Reducing(Stage):
    """torch's stage of a run of blocks that ranks share: gradients wait, whole, for its last micro
    batch; then each rank is left its rows of their mean."""

    def backward_maybe_with_nosync(self, *given: Any, **named: Any) -> Any:
        """See torch's."""
        module = self.submod.staged.module
        module.set_is_last_backward(False)
        module.set_reshard_after_backward(self.submod.staged.reshard)
        module.set_requires_gradient_sync(False)
        return super().backward_maybe_with_nosync(*given, **named)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See torch's."""
        for group in self.submod.staged.reduce(self.submod.run):
            rows = (p.sharded_param.grad for p in group.fsdp_params)
            torch._foreach_div_([facts.local(g) for g in rows if g is not None], grad_scale_factor)
