"""``./run.sh list``: print strategies with their parameters, models, cards and suites."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.text import Text

from harness import extensions
from harness.commands.console import make_console, print_listed
from harness.planner.speed import cards
from harness.subjects.dit import presets as dit
from harness.subjects.library import families
from harness.suite import file as suite_file
from harness.suite.file import Suite, SuiteError, load_suite
from strategies import CATALOG
from strategies.recipe import ABSENT
from strategies.strategy import spelled

DEFAULTS = (
    "Open places get fp32, adamw and ema; all others stay empty. Parameters stand with their "
    "defaults. Read on: docs/reference/strategies.md"
)


def print_list(console: Console | None = None) -> None:
    """Print the strategies, the unsupported ones and the suites."""
    console = console or make_console()
    told = "strategies: at most one for each place, joined by + into a recipe"
    console.print(Text(told, style="bold"))
    console.print(Text(DEFAULTS, style="dim"))
    print_listed(console, ("strategy", "place", "what it does"), _strategies())
    console.print(Text("not here, and why", style="bold"))
    heads = ("technique", "reason, and what there is instead")
    print_listed(console, heads, list(ABSENT.items()))
    console.print(Text("suites: ./run.sh run --suite NAME", style="bold"))
    console.print(
        Text("Without a name it is default. Read on: docs/reference/suites.md", style="dim")
    )
    print_listed(console, ("suite", "rows", "title"), _suites())


def print_models(console: Console | None = None) -> None:
    """Print the public models and their names on the Hugging Face Hub."""
    console = console or make_console()
    rows = [
        (Text(name, "bold"), f"{known.parameters['built'] / 1e9:.2f}", ", ".join(known.hub))
        for name, known in families.table().items()
    ]
    told = "public models: --model takes any of these names, however it is spelled"
    console.print(Text(told, style="bold"))
    print_listed(console, ("model", "billion parameters", "on the Hugging Face Hub"), rows)
    names = ", ".join(dict.fromkeys(name.partition("/")[0] for name in dit.PRESETS))
    told = f"DiTs, each with patch 2, 4 or 8: {names}. Read on: docs/reference/models.md"
    console.print(Text(told, style="dim"))


def print_cards(console: Console | None = None) -> None:
    """Print the cards that ``plan`` accepts by name."""
    console = console or make_console()
    console.print(Text("cards: --gpu takes their names, however they are spelled", style="bold"))
    heads = ("card", "GiB", "GB/s", "TFLOP/s in 16 bits", "step times")
    rows = [
        (
            Text(name, "bold"),
            f"{card.memory_bytes / 2**30:.1f}",
            f"{card.bandwidth / 1e9:.0f}",
            f"{card.flops('float16') / 1e12:.0f}",
            "compared with measured ones" if card.timed else "untried",
        )
        for name, card in cards.table().items()
    ]
    print_listed(console, heads, rows)
    told = "any other: --gpu-memory SIZE. Peaks and bandwidths are the data sheets'."
    console.print(Text(told, style="dim"))


def markdown() -> str:
    """Return the strategy table of docs/reference/strategies.md."""
    lines = ["| strategy | place | what it does | losses |", "|---|---|---|---|"]
    for name, kind in CATALOG.items():
        what = _first_line(kind.__doc__).partition(". ")[0].rstrip(".:").replace("``", "`")
        place = kind.slot.name.lower().replace("_", " ")
        lines.append(f"| `{name}` | {place} | {what} | {kind.parity.value} |")
    return "\n".join(lines)


def _strategies() -> list[tuple[Any, ...]]:
    rows = []
    for name, kind in CATALOG.items():
        what = Text(_first_line(kind.__doc__))
        for note in _notes(kind):
            what.append(f"\n{note}", "dim")
        rows.append((Text(name, "bold"), kind.slot.name.lower(), what))
    return rows


def _notes(kind: Any) -> list[str]:
    given = ", ".join(f"{f.name}={spelled(f.default)}" for f in dataclasses.fields(kind))
    parity = "losses as the reference's" if kind.parity.value == "exact" else "changes the losses"
    facts = [f"parameters: {given}"] if given else []
    facts += [f"needs: {', '.join(kind.needs)}"] if kind.needs else []
    return [*facts, f"parity: {kind.parity.value} ({parity})", f"source: {kind.source}"]


def _first_line(doc: str | None) -> str:
    """Return the first sentence or paragraph of a docstring, on one line."""
    return " ".join((doc or "").strip().partition("\n\n")[0].split())


def _suites() -> list[tuple[Any, ...]]:
    listed: list[tuple[Any, ...]] = []
    for name, path in suite_file.known_suites().items():
        try:
            rows = len(suite_file.load_suite(name, "cpu").rows)
        except suite_file.SuiteError as error:
            listed.append((name, "-", Text(str(error), "red")))
            continue
        listed.append((Text(name, "bold"), rows, suite_file.title_of(path)))
    return listed


# ---- suites ----


def load(name: str, device: str) -> Suite:
    """Read the suite of that name or file, with an analysis that is known, for ``device`` (cpu or
    cuda).

    Raises:
        SuiteError: one line that names the file, key and value, and a remedy.
    """
    suite = load_suite(name, device)
    known = extensions.analyses()
    if suite.story not in ("", *known) and extensions.is_complete():
        raise SuiteError(
            f"{suite.path}: story is {suite.story!r}; one of {', '.join(known)}, or leave it out"
        )
    return suite
