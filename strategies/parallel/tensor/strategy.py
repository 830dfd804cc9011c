"""Tensor parallel: neighbouring ranks have a part each of the blocks' matrices.

No torch at import. ``products`` has the rule by which blocks are cut, ``fitting`` the models that
it does not fit, ``layers`` the layers, ``saving`` norms and checkpoints, ``effects`` the
evidence.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Slot
from strategies.engine import RunContext, TrainingRun
from strategies.parallel.groups import uneven
from strategies.strategy import Strategy
from strategies.subject import Dimensions, Subject

BESIDE = {
    "compiled": "a graph with its sums inside has not been tried; leave compile out",
    "doubles_tokens": "a branch beside the blocks would be whole; leave it out",
    "quantized_weights": "a coded weight cannot be cut; leave the codes out",
    "replaced_layers": "the layers that it cuts are replaced by others; leave those out",
    "other_products": "it cuts the products of a whole model that is trained whole; leave out what "
    "freezes, prunes or teaches",
    "streams_weights": "a part of a weight is not streamed; leave block_swap out",
    "moves_activations": "what it would copy away has not been tried; leave it out, or take "
    "checkpoint",
    "scales_gradients": "a rank whose part overflows would skip a step alone; take bf16",
    "own_state": "the optimizer's state of a part is not a part of the state; take adamw",
    "early_gradients": "a gradient's norm is of all ranks, so none is used early; take adamw",
    "edits_gradients": "DDP's hook would see parts of some gradients; leave it out",
    "sparse_gradients": "the norm of a sparse gradient is taken alone; leave it out",
}
"""Trait of another part -> why tensor parallelism refuses it, and the way out."""


def _counts(size: Dimensions) -> tuple[tuple[int, str], ...]:
    return (size.heads, "heads"), (size.inner, "inner features of the MLP")


@dataclass(frozen=True, kw_only=True)
class TensorParallel(Strategy):
    """Groups of ranks share the blocks' weights.

    Each of the ``ranks`` neighbors has some of the heads and of the MLP's inner features. The
    outputs of each attention and MLP are summed in forward, and the gradients of its inputs in
    backward.

    Embedders, norms, modulation and the final layer are whole on every rank. All ranks of a group
    work on the same samples. Gradients are averaged among the ranks that have the same parts.
    ``norms=whole`` has all tokens on all ranks. ``norms=tokens`` cuts the layers between the
    products by tokens. Each half of a block then gathers all tokens, and leaves each rank the sum
    of its own.
    """

    name: ClassVar[str] = "tp"
    slot: ClassVar[Slot] = Slot.TENSOR
    source: ClassVar[str] = (
        "Shoeybi et al. 2019, Megatron-LM (arXiv:1909.08053); norms=tokens: Korthikanti et al. "
        "2022, sequence parallelism (arXiv:2205.05198)"
    )

    ranks: int = 2
    norms: str = "whole"

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, int) or self.ranks < 2:
            raise ValueError(f"ranks is {self.ranks!r}; so many share the weights, from 2 on")
        if self.norms not in ("whole", "tokens"):
            raise ValueError(f"norms is {self.norms!r}; one of whole, tokens")

    @property
    def by_tokens(self) -> bool:
        """True if each rank has a stripe of the tokens between the halves of a block."""
        return self.norms == "tokens"

    def traits(self) -> frozenset[str]:
        return frozenset({"cut_weights"})

    def refuses(self, launch: RunContext) -> str | None:
        subject, lack = launch.subject, None
        if "projections" not in subject.parts:
            lack = subject.lacks("halves", "leave tp out, or take fsdp2")
        return lack or self._beside(launch) or self._ranks(launch) or self._sizes(launch)

    def _beside(self, launch: RunContext) -> str | None:
        return next((why for trait, why in BESIDE.items() if trait in launch.traits), None)

    def _ranks(self, launch: RunContext) -> str | None:
        if "one_process" in launch.traits:
            return "one process cannot share weights; take ddp"
        if not launch.traits & {"replicas", "dtensor_weights"}:
            return (
                f"{launch.sharding} shards weights in a way of its own, and a part of one has not "
                "been sharded; take ddp or fsdp2"
            )
        odd = uneven(launch)
        if odd:
            return odd
        if "dtensor_weights" in launch.traits and launch.layout.sharers == 1:
            enough = 2 * launch.layout.replicate * self.ranks
            return (
                f"of {launch.processes} processes one has each part, and shards it with nobody; "
                f"use --processes {enough}, or ddp"
            )
        return None

    def _sizes(self, launch: RunContext) -> str | None:
        subject = launch.subject
        if "projections" in subject.parts:
            lack = self._library(subject)
        else:
            lack = self._uneven(_counts(subject.dimensions))
        if lack is None and self.by_tokens:
            lack = subject.lacks("chain", "take norms=whole")
        tokens = subject.dimensions.tokens // launch.sequence if lack is None else 0
        if self.by_tokens and tokens % self.ranks:
            of = f" on each rank of sp:ranks={launch.sequence}" if launch.sequence > 1 else ""
            return f"{tokens} tokens{of} are not {self.ranks} equal stripes; take norms=whole"
        return lack

    def _library(self, subject: Subject) -> str | None:
        from strategies.parallel.tensor import fitting

        lack = fitting.unknown(subject) or self._uneven(fitting.counts(subject))
        return lack or fitting.fails(subject, self.ranks) or None

    def _uneven(self, counts: Sequence[tuple[int, str]]) -> str | None:
        for number, what in counts:
            if number % self.ranks:
                all_of_them = math.gcd(*(n for n, _ in counts))
                fitting = [str(n) for n in range(2, all_of_them + 1) if all_of_them % n == 0]
                way = f"take ranks of {' or '.join(fitting)}" if fitting else "leave tp out"
                return f"{number} {what} cannot be dealt to {self.ranks} ranks; {way}"
        return None

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch.distributed as dist

        from strategies.parallel.tensor import layers

        rank = dist.get_rank() if dist.is_initialized() else 0
        for block in subject.blocks(module):
            layers.cut_block(block, rank % self.ranks, self.ranks, by_tokens=self.by_tokens)

    def configure(self, accelerator: Any, module: Any, launch: RunContext) -> None:
        from strategies.parallel import groups
        from strategies.parallel.tensor import layers

        if "dtensor_weights" in launch.traits:  # the engine made the groups that average gradients
            parts = accelerator.torch_device_mesh["tp"].get_group()
        else:
            parts, alike = groups.made(self.ranks, accelerator.num_processes)
            accelerator.ddp_handler = groups.Among(accelerator.ddp_handler, alike)
        layers.connect(module, parts)
        if self.by_tokens:
            layers.run_on_stripes(module, launch.subject, parts)

    def attach(self, trained: TrainingRun) -> None:
        from strategies.parallel.tensor import saving

        saving.save_whole(trained)

    def observe(self, trained: TrainingRun) -> contextlib.AbstractContextManager[Any]:
        from strategies.parallel.tensor import effects

        return effects.observe(trained)

    def evidence(self, trained: TrainingRun) -> dict[str, Any]:
        from strategies.parallel.tensor import effects

        return effects.evidence(trained, self.note(trained), by_tokens=self.by_tokens)
