"""Evidence that ZeRO-3 gathers few weights at a time, from counts in a watched step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.zero import facts, variants


@contextlib.contextmanager
def watched(trained: TrainingRun, counts: list[int], again: list[int]) -> Iterator[None]:
    """Record gathered weights each time that DeepSpeed has gathered those of a module.

    ``counts`` gets the elements of whole weights, ``again`` those of second shares. Other stages
    record nothing.
    """
    if trained.engine.stage < 3:
        yield
        return
    coordinator = trained.model.optimizer.parameter_offload.get_param_coordinator()
    fetch, parameters = coordinator.fetch_sub_module, list(trained.module.parameters())

    def fetched(*given: Any, **named: Any) -> None:
        fetch(*given, **named)
        counts.append(sum(p.numel() for p in parameters))
        again.append(sum(share.numel() for share in variants.kept(parameters)))

    coordinator.fetch_sub_module = fetched
    try:
        yield
    finally:
        del coordinator.fetch_sub_module


def evidence(trained: TrainingRun, counts: list[int]) -> dict[str, Any]:
    """Check the largest number of gathered elements against its bound.

    The bound adds persistent weights, those that DeepSpeed may keep for later use, those being
    fetched, and the current module's.
    """
    if trained.engine.stage < 3:
        return {}
    sizes = {p: p.ds_numel for p in trained.module.parameters()}
    settings = facts.buckets(trained.model)
    stay = sum(size for p, size in sizes.items() if p.ds_persist)
    ahead = settings["stage3_max_live_parameters"] + settings["stage3_prefetch_bucket_size"]
    modules = trained.module.modules()
    at_work = max(sum(sizes[p] for p in m.parameters(recurse=False)) for m in modules)
    most, whole, seen = stay + ahead + at_work, sum(sizes.values()), max(counts, default=0)
    told = f"{seen} elements of the weights were whole at once, of {whole} in all"
    demand(seen > 0, "no module's weights were gathered")
    demand(seen <= most, f"{told}: stage 3 as it is set keeps no more than {most}")
    return {"most_gathered_elements": seen, "all_elements": whole}
