"""Shell completion of ``./run.sh``: commands, options, recipes, suites, models and cards.

argcomplete's shell function starts ``run.sh``, which starts this module before any set-up. It reads
the parsers alone, and imports no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from harness import cli
from harness.commands import listing
from harness.subjects.dit import presets as dit
from harness.subjects.library import families
from harness.suite import file as suite_file
from harness.system import cards
from strategies import CATALOG
from strategies.base import Slot


def recipes(prefix: str, **_: Any) -> list[str]:
    """Return recipes that begin with ``prefix`` and end in one more strategy, or its parameter."""
    whole, plus, last = prefix.rpartition("+")
    if ":" in last:
        return [f"{whole}{plus}{text}" for text in _parameters(last)]
    names = [part.split(":")[0] for part in whole.split("+")]
    taken = {CATALOG[name].slot for name in names if name in CATALOG}
    able = (name for name in CATALOG if name.startswith(last))
    if not plus:
        return [name for name in able if CATALOG[name].slot is Slot.SHARD]
    return [f"{whole}+{name}" for name in able if CATALOG[name].slot not in taken]


def _parameters(part: str) -> list[str]:
    """Return ``part`` with each parameter that it lacks, as ``checkpoint:every=``."""
    name, _, given = part.partition(":")
    if name not in CATALOG:
        return []
    before, comma, last = given.rpartition(",")
    known = {text.partition("=")[0] for text in before.split(",")}
    fields = (field.name for field in dataclasses.fields(CATALOG[name]))
    return [
        f"{name}:{before}{comma}{field}="
        for field in fields
        if field.startswith(last) and field not in known
    ]


def _listed(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    return lambda prefix, **_: [name for name in names() if name.startswith(prefix)]


strategies = _listed(lambda: CATALOG)
suites = _listed(suite_file.known_suites)
models = _listed(lambda: [*families.table(), *dit.PRESETS])
all_cards = _listed(cards.table)
BY_OPTION: Mapping[str, Callable[..., list[str]]] = {
    "recipes": recipes,
    "recipe": recipes,
    "added": strategies,
    "suite": suites,
    "model": models,
    "models": models,
    "gpu": all_cards,
    "cards": all_cards,
    "what": _listed(lambda: [*listing.KINDS, *CATALOG]),
}
"""Name of an option in the parsed arguments -> its completer."""


def parser(line: str) -> argparse.ArgumentParser:
    """Return the parser for a command line, with a completer for each option that has names."""
    whole = cli._parser([*line.split(), "", ""][1])
    for action in whole._actions:
        choices = action.choices if isinstance(action.choices, dict) else {}
        for command in choices.values():
            for option in command._actions:
                if completer := BY_OPTION.get(option.dest):
                    option.completer = completer
    return whole


def main() -> int:
    """Print the completions of the line in ``COMP_LINE`` for argcomplete's shell function."""
    try:
        import argcomplete
    except ImportError:  # a Python of the user's own
        return 1
    argcomplete.autocomplete(parser(os.environ.get("COMP_LINE", "")), default_completer=None)
    return 1


if __name__ == "__main__":
    sys.exit(main())
