"""Sharding of a stage among the ranks that have it, and the reduction of its gradients.

torch's schedules reduce the gradients of a ``fully_shard``-ed stage after its last micro-batch.
Here the bare model is the root of all runs of blocks of a rank, because parts of it lie outside of
them and are called by name. ``Reducing`` therefore does for each run what torch does for a stage.
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
from strategies.engines.fsdp import shard as fsdp
from strategies.engines.pipeline import cut
from strategies.engines.pipeline.cut import Cut, Output
from strategies.engines.pipeline.stage import (
    Handed,
    OwnForward,
    Stage,
    Staged,
    StageRanks,
    stage_ranks,
)
from strategies.initial import Draw

KEY = "stage_ranks"
"""Attribute of a bare model that holds its ``StageRanks``."""
RUN = "run_of_blocks"
"""Method of a bare model within which its weights are gathered."""


class Shared(Staged):
    """A cut model whose weights are gathered when one of its runs of blocks is called. ``graded``:
    torch's parameters that had a gradient to reduce. A shared weight whose values a stage does not
    use has none there."""

    def __init__(self, module: nn.Module, cut: Cut, ranks: StageRanks, reshard: bool) -> None:
        super().__init__(module, cut, ranks)
        self.reshard = reshard
        self.done: set[int] = set()
        self.graded: set[Any] = set()
        self.handed: Sequence[Output] = ()
        setattr(module, RUN, self._taken)
        register_fsdp_forward_method(module, RUN)
        if isinstance(self.way, OwnForward):
            # Called as a module it would gather its weights a second time.
            self.way.called = module.forward

    def _taken(self, work: Callable[[], Tensor]) -> Any:
        """Return the output, or the tensors for the next run: torch must see them returned."""
        try:
            return work()
        except Handed as left:
            self.handed = left.outputs
            return left.tensors

    def _own(self, run: int, *given: Any) -> Tensor:
        # Received tensors are hidden from torch, which would pass on views of them.
        out = getattr(self.module, RUN)(functools.partial(super()._own, run, *given))
        if run == self.cut.end:
            return out
        raise Handed(out, self.handed)

    def _through(self, *given: Any, **named: Any) -> Tensor:
        """Reshard after a forward-only pass, because only a backward reshards."""
        try:
            return super()._through(*given, **named)
        finally:
            for part in _parts(self.module):
                part.reshard()

    def reduce(self, run: int) -> list[Any]:
        """Reduce the gradients that are final after the backward of ``run``: those of its blocks,
        and with this rank's last run those outside of blocks. Returns their groups of torch."""
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
    """Return True if one of torch's parameters has a gradient to reduce."""
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
    """Cut ``module`` to this rank's stage and shard it block by block in place, unless it is so.
    ``draw`` sets missing weights, block by block; all ranks draw all weights, in the same order."""
    layout, rank = engine.layout(accelerator.num_processes), accelerator.process_index
    if not isinstance(module, FSDPModule):
        vars(module)[KEY] = stage_ranks(rank, layout.ranks, layout.data)
        own = vars(module)[KEY]
        before = list(module.parameters())
        made = cut.cut(module, blocks, own.stage, engine.homes)
        _draw_others(before, module, draw)
        here = [block for run in made.blocks.values() for block in run]
        fsdp.by_part(accelerator, [*here, module], _options(engine, accelerator, own), draw)
    whole: Any = cut.cut_of(module)
    model = Shared(module, whole, vars(module)[KEY], engine.reshard)
    model.computes_in = _half(accelerator)
    return model


def _draw_others(before: Iterable[nn.Parameter], module: nn.Module, draw: Draw | None) -> None:
    here = {id(p) for p in module.parameters()}
    for p in before:
        waiting = initial.pending(p)
        if draw is not None and waiting is not None and id(p) not in here:
            draw(waiting.name, p)


def _options(engine: Any, accelerator: Any, own: StageRanks) -> dict[str, Any]:
    """Gather weights and compute in the type of mixed precision; reduce gradients in float32.
    Inputs are not cast: timesteps would be rounded."""
    half = _half(accelerator)
    known = "cuda" if accelerator.device.type == "cuda" else "cpu"  # a traced device is neither
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
    """torch's stage of a sharded run of blocks. Gradients stay whole until its last micro-batch;
    then each rank keeps its rows of their mean."""

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
            torch._foreach_div_([fsdp.local(g) for g in rows if g is not None], grad_scale_factor)
