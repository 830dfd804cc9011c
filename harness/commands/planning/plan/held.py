"""What CUDA's allocator may hold of a GPU beyond what a plan says it reserves."""

from __future__ import annotations

from collections.abc import Sequence

from harness.commands.planning.plan.answer import gib
from harness.predict.verdict import Fit

__all__ = ["held_back", "held_notes"]


def held_back(fit: Fit) -> int:
    """Bytes at most, of one GPU, beyond ``need_bytes``.

    ZeRO-3 gathers on a stream of its own and lets go of weights by ``Tensor.record_stream``
    (DeepSpeed 0.19.8, partition_parameters.py, ``free_param``): their memory is given out again
    once the GPU has used them. The host is ahead by then and has gathered the next ones into other
    memory; how far ahead nobody says, so at most all weights stand gathered at once. A prediction
    has those that the host knows of. Nothing fails by it: before it gives up, the allocator waits
    for what is held (torch 2.13, CUDACachingAllocator.cpp, ``release_cached_blocks``).
    """
    instant, launch = fit.prediction.peak, fit.resolved.launch
    if instant is None or fit.gpu.shared or "gathers_ahead" not in launch.traits:
        return 0
    itemsize = 2 if "half_compute" in launch.traits else 4
    whole = fit.resolved.subject.parameters * itemsize
    return max(0, whole - instant.categories.get("gathered", 0))


def held_notes(fits: Sequence[Fit]) -> list[str]:
    """Of the rows that may fit, where it may be more than what is left of the card."""
    able = [fit for fit in fits if fit.may_fit and held_back(fit) > max(0, fit.margin_bytes)]
    return [
        f"{fit.label}: up to {gib(held_back(fit))} GiB more, gathered weights that are let go of, "
        "may be held until the GPU has used them: the allocator would then wait, which is slow."
        for fit in able
    ]
