"""Facts of evidence: labels of settings, and facts from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from strategies.base import NotInForce, demand
from strategies.evidence.readings import stored

if TYPE_CHECKING:
    from strategies.engine import TrainingRun


# ---- settings among facts ----
# Some facts can only be read where they were set: a library's flag, or a tensor's device if host
# and device are one memory. The facts list them by name under ``SETTINGS``; all others are read
# from the training's effects.


SETTINGS = "settings_not_effects"
"""Fact that lists which of the others are settings."""


def label(facts: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return ``facts`` with the named entries, if present, marked as settings rather than effects.

    Raises:
        KeyError: none of the names is present.
    """
    known = [name for name in names if name in facts]
    if not known:
        raise KeyError(f"none of {', '.join(names)} is among the facts {', '.join(facts)}")
    return {**facts, SETTINGS: sorted({*settings(facts), *known})}


def settings(facts: Mapping[str, Any]) -> list[str]:
    """Return the names of the facts that are settings."""
    return list(facts.get(SETTINGS, ()))


def effects(facts: Mapping[str, Any]) -> list[str]:
    """Return the names of the facts that show an effect."""
    return [name for name in facts if name not in (SETTINGS, *settings(facts))]


def worded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``facts`` for a reader, with each setting marked after its name."""
    mark = " (setting, not effect)"
    mine = settings(facts)
    return {k + mark * (k in mine): value for k, value in facts.items() if k != SETTINGS}


# ---- agreement between ranks ----
# A fault that one rank finds is sent to all before their next collective. Otherwise the others
# would wait in it until the process group times out.


UNREAD = (AttributeError, KeyError, IndexError)
"""Errors from reading a library's objects whose attributes have other names now."""
Look = Callable[["TrainingRun"], dict[str, Any]]
"""Function that checks some facts of a run, and returns them."""


def together(run: TrainingRun, *looks: Look) -> dict[str, Any]:
    """Return the facts of all ``looks``; after each, the ranks exchange their faults.

    A look that communicates does so before it demands anything of its own rank.

    Raises:
        NotInForce: a rank found a fault; every rank raises it, with the first rank that found it
            unless all did.
    """
    facts: dict[str, Any] = {}
    for look in looks:
        fault = ""
        try:
            facts |= look(run)
        except NotInForce as error:
            fault = str(error)
        except UNREAD as error:
            fault = f"could not be read back ({type(error).__name__}: {error})"
        faults = _everyone(run, fault)
        each = dict.fromkeys(filter(None, faults))
        said = "; ".join(f"rank {faults.index(text)}: {text}" for text in each)
        demand(not each, faults[0] if len(set(faults)) == 1 else said)
    return facts


def copies(run: TrainingRun, group: Any = None) -> dict[str, float]:
    """Check that the ranks of ``group`` (None: all) hold equal weights, although each has seen
    other samples; all ranks call it."""
    import torch
    import torch.distributed as dist

    if run.launch.simulated:
        return {}
    device = run.accelerator.device  # a strategy may keep weights elsewhere
    with torch.no_grad():
        held = [stored(p.data) for p in run.module.parameters()]
        sums = torch.stack([sum(t.double().sum() for t in parts).to(device) for parts in held])
    each = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, sums, group=group)
    spread = max(float((other - sums).abs().max()) for other in each)
    text = f"weights of the replicas differ by {spread:.3g}: gradients were not averaged"
    demand(spread == 0.0, text)
    return {"replica_spread": spread}


def seen_by_one(run: TrainingRun, look: Look) -> dict[str, Any]:
    """Return the facts of one look that only some ranks have: those of the first such rank."""
    found = together(run, look)
    return next((facts for facts in _everyone(run, found) if facts), {})


def _everyone(run: TrainingRun, value: Any) -> list[Any]:
    """Return ``value`` of every rank; in a simulated world only this rank's."""
    import torch.distributed as dist

    if run.accelerator.num_processes == 1 or run.launch.simulated:
        return [value]
    answers = [None] * run.accelerator.num_processes
    dist.all_gather_object(answers, value)
    return answers
