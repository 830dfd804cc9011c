"""Evidence that blocks' weights are streamed, and preparation of a model for it. Imports torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor, nn

from strategies import initial
from strategies.base import demand
from strategies.engine import TrainingRun
from strategies.streaming.streamer import Streamer
from strategies.streaming.weights import Taken
from strategies.subject import Subject


def streamed_facts(
    trained: TrainingRun, streamer: Streamer, seen: Counter[str] | None, at_once: int
) -> dict[str, Any]:
    """Return the facts of a run; ``seen`` is the record of a watched step, None if there was none.

    At most ``at_once`` streamed blocks may have been on the device at a time.

    Raises:
        NotInForce: a fact shows that weights were not streamed.
    """
    sizes = [one.size for one in streamer.streamed.values()]
    demand(not streamer.resident(), "weights of streamed blocks stay on the device between uses")
    places = {p.device.type for p in streamer.hosts}
    demand(places == {"cpu"}, f"the streamed weights are stored on {sorted(places)}, expected cpu")
    flats = [flat for one in streamer.streamed.values() for flat in one.flats]
    pinned = all(flat.host.is_pinned() for flat in flats)
    demand(pinned or trained.launch.device != "cuda", "the host memory is not pinned")
    states = [trained.engine.state_of(trained, p) for p in streamer.hosts if p.requires_grad]
    demand(all(states), f"{states.count({})} of {len(states)} streamed weights were never stepped")
    facts = {"blocks": len(sizes), "host_weight_bytes": sum(sizes)}
    if seen is None:
        return facts
    stale, resident, most = seen["stale"], seen["resident"], at_once * max(sizes)
    demand(not stale, f"{stale} blocks left the device with weights unlike those in host memory")
    text = f"{resident} bytes of streamed weights were on the device at once"
    demand(resident <= most, f"{text}, expected at most {most}")
    return facts | {"most_resident_bytes": resident}


# ---- taking weights out of a model ----


def lent(module: nn.Module, subject: Subject) -> set[nn.Module]:
    """Return the modules of blocks, and those within, that code outside of their block calls.

    ``module`` may have been edited: an adapter has the layer that it replaces within.
    """
    return {part for name in subject.lent for part in module.get_submodule(name).modules()}


def stay_on_host(block: nn.Module, lent: Container[nn.Module]) -> None:
    """Keep the weights of ``block`` that have no value yet in host memory when they are drawn.

    Weights of the modules ``lent`` go to the device.
    """
    owned = (part._parameters.values() for part in block.modules() if part not in lent)
    for p in (p for some in owned for p in some if p is not None):
        waits = initial.pending(p)
        if waits is not None and waits.keep is None:
            p.pending = dataclasses.replace(waits, keep=_as_it_is)


def _as_it_is(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=values.is_floating_point())


def take_out(
    module: nn.Module, blocks: Iterable[nn.Module], *, frozen: bool, stay: Container[nn.Module]
) -> None:
    """Remove the weights of ``blocks`` from the model, so that no call moves them to the device.

    They wait as ``swapped`` of their block. ``frozen``: only those that take no gradient. Weights
    that several layers share stay, and those of the modules ``stay``.
    """
    users = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    for block in blocks:
        block.swapped = [
            Taken(owner, name, p)
            for owner in block.modules()
            if owner not in stay
            for name, p in owner._parameters.items()
            if p is not None and users[id(p)] == 1 and not (frozen and p.requires_grad)
        ]
        for owner, name, _ in block.swapped:
            owner._parameters[name] = None
