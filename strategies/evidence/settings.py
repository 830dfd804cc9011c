"""Facts that are settings and not effects: said plainly, for the reader of a report.

Some facts can only be read where they were set, such as a flag of a library, or the place of a
tensor on a machine whose host and device are one memory. They are listed by name in the facts
themselves, under ``SETTINGS``; all other facts are read off what the training did. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["SETTINGS", "WORDS", "effects", "label", "settings", "worded"]

SETTINGS = "settings_not_effects"
"""The fact that lists which of its neighbours are settings."""
WORDS = "setting, not effect"


def label(facts: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """``facts``, of which those of these names, where they are there, are settings.

    Raises:
        KeyError: none of the names is there: a label of nothing.
    """
    known = [name for name in names if name in facts]
    if not known:
        raise KeyError(f"none of {', '.join(names)} is among the facts {', '.join(facts)}")
    return {**facts, SETTINGS: sorted({*facts.get(SETTINGS, ()), *known})}


def settings(facts: Mapping[str, Any]) -> list[str]:
    """Names of the facts that are settings."""
    return list(facts.get(SETTINGS, ()))


def effects(facts: Mapping[str, Any]) -> list[str]:
    """Names of the facts that show an effect."""
    return [name for name in facts if name != SETTINGS and name not in settings(facts)]


def worded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """``facts`` for a reader: each setting says so behind its name."""
    mine = settings(facts)
    named = ((f"{k} ({WORDS})" if k in mine else k, v) for k, v in facts.items())
    return {name: value for name, value in named if name != SETTINGS}
