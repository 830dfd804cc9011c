"""ZeRO-3 has few weights whole at a time, or it shards in name alone: counted in a watched step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.engines.zero import facts, variants


@contextlib.contextmanager
def watched(trained: TrainingRun, counts: list[int], again: list[int]) -> Iterator[None]:
    """While it lasts, ``counts`` gets the elements of the weights that are whole, each time that
    DeepSpeed has gathered those of a module, and ``again`` those of second shares (``secondary``).
    Of other stages, nothing."""
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
    """The most that was whole, held to what may be: what stays, what DeepSpeed is allowed to keep
    for a use ahead, what is on its way, and the module at work."""
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
