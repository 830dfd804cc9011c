"""``./run.sh list``: print strategies, suites, models and cards."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from harness import RUN
from harness.commands.console import OK, make_console, print_listed
from harness.commands.options import add_json, write_answer
from harness.subjects.dit import presets as dit
from harness.subjects.library import families
from harness.subjects.names import related
from harness.suite.file import SuiteError, known_suites, load_suite
from harness.system import cards
from strategies import CATALOG
from strategies.base import BadInput
from strategies.recipe import ABSENT, ENDED
from strategies.strategy import spelled
from strategies.words import hint, name_of, plain

INTRO = (
    "A recipe joins strategies with +, at most one of each place: zero2+bf16+ema.",
    f"Defaults for open places: fp32, adamw, ema. Details: {RUN} list NAME",
)
OTHERS = f"Also: {RUN} list models, {RUN} list cards, {RUN} list suites"
NAME_WIDTH = 23
"""Columns of a name in the list, with the gap behind it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``list``."""
    text = f"{', '.join(KINDS)}, or the name of a strategy (default: strategies)"
    parser.add_argument("what", nargs="?", metavar="WHAT", default="strategies", help=text)
    add_json(parser)


def list_all(options: argparse.Namespace) -> int:
    """Print all things of a kind, or describe one strategy; return the exit code."""
    what = SPELLED.get(options.what, options.what)
    kind = next((kind for kind in KINDS if what in (kind, kind.removesuffix("s"))), None)
    if kind:
        KINDS[kind](make_console())
    else:
        print_one(options.what, make_console())
    write_answer(options, as_json(kind, options.what))
    return OK


def as_json(kind: str | None, name: str) -> dict[str, Any]:
    """Return all things of a kind, or the strategy ``name``, as plain data."""
    rows: list[dict[str, Any]]
    if kind == "suites":
        heads = ("name", "rows", "title")
        rows = [dict(zip(heads, map(str, one), strict=True)) for one in _suites()]
    elif kind == "models":
        known = families.table().items()
        rows = [{"name": n, "parameters": m.parameters["built"], "hub": m.hub} for n, m in known]
    elif kind == "cards":
        rows = [dataclasses.asdict(card) | {"name": n} for n, card in cards.table().items()]
    else:
        names = CATALOG if kind else [name_of(name, CATALOG)]
        rows = [_strategy(one) for one in names if one in CATALOG]
    absent = {**ABSENT, **ENDED}
    some = absent if kind == "strategies" else {n: absent[n] for n in (plain(name),) if n in absent}
    return {"kind": kind or "strategy", "rows": rows, "absent": some}


def _strategy(name: str) -> dict[str, Any]:
    kind = CATALOG[name]
    return {
        "name": name,
        "place": kind.slot.name.lower(),
        "what": first_sentence(kind.__doc__),
        "parameters": {f.name: spelled(f.default) for f in dataclasses.fields(kind)},
        "needs": kind.needs,
        "losses": kind.parity.value,
        "source": kind.source,
    }


def print_list(console: Console) -> None:
    """Print the strategies by place, one line each."""
    for line in INTRO:
        console.print(Text(line, style="dim"))
    for place in dict.fromkeys(kind.slot for kind in CATALOG.values()):
        console.print(Text(place.name.lower(), style="bold"))
        for name, kind in CATALOG.items():
            if kind.slot is place:
                _print_line(console, name, first_sentence(kind.__doc__))
    console.print(Text(f"not here ({RUN} list NAME says why)", style="bold"))
    console.print(Padding(Text(", ".join(ABSENT)), (0, 0, 0, 2), expand=False))
    console.print(Text(OTHERS, style="dim"))


def _print_line(console: Console, name: str, text: str) -> None:
    """Print a name and its text on one line, cut between words."""
    room = console.width - NAME_WIDTH - 2
    if room < NAME_WIDTH:  # a narrow terminal gets the name alone
        console.print(Text(f"  {name}", no_wrap=True, overflow="crop"))
        return
    short = textwrap.shorten(text.replace("`", ""), room, placeholder=" ..")
    console.print(Text(f"  {name:{NAME_WIDTH}}"), Text(short, "dim"), sep="")


def print_one(name: str, console: Console) -> None:
    """Print what a strategy does, its parameters, parity and source, or why there is none.

    Raises:
        BadInput: there is no such strategy.
    """
    absent = plain(name)
    if absent in ABSENT:
        console.print(f"{absent} is no strategy here: {ABSENT[absent]}", markup=False)
        return
    if name in ENDED:
        console.print(f"{name} is not here: {ENDED[name]}", markup=False)
        return
    known = name_of(name, CATALOG)
    if known not in CATALOG and (told := related(name)):
        console.print(f"model {name} is not here: {told}", markup=False)
        return
    if known not in CATALOG:
        raise BadInput(f"there is no strategy {name!r}; {hint(name, CATALOG)}")
    kind = CATALOG[known]
    console.print(Text(f"{known} (place: {kind.slot.name.lower()})", style="bold"))
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        console.print(Text(" ".join(paragraph.replace("``", "").split())))
    for note in _notes(kind):
        console.print(Padding(Text(note), (0, 0, 0, 2), expand=False))


def _print_suites(console: Console) -> None:
    """Print the suites: their rows on a CPU, and their titles."""
    console.print(Text(f"suites: {RUN} run --suite NAME (without a name: default)", style="bold"))
    print_listed(console, ("suite", "rows", "title"), _suites())


def _print_models(console: Console) -> None:
    """Print the public models and their names on the Hugging Face Hub."""
    rows = [
        (Text(name, "bold"), f"{known.parameters['built'] / 1e9:.2f}", ", ".join(known.hub))
        for name, known in families.table().items()
    ]
    text = "public models: --model takes these names in any spelling"
    console.print(Text(text, style="bold"))
    print_listed(console, ("model", "billion parameters", "on the Hugging Face Hub"), rows)
    names = ", ".join(dict.fromkeys(name.partition("/")[0] for name in dit.PRESETS))
    text = f"DiTs, each with patch 2, 4 or 8: {names}. Read on: docs/reference/models.md"
    console.print(Text(text, style="dim"))


def _print_cards(console: Console) -> None:
    """Print the cards that ``plan`` accepts by name."""
    console.print(Text("cards: --gpu takes these names in any spelling", style="bold"))
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
    text = "Other cards: --gpu-memory SIZE. Peak rates and bandwidths are from data sheets."
    console.print(Text(text, style="dim"))


KINDS = {
    "strategies": print_list,
    "suites": _print_suites,
    "models": _print_models,
    "cards": _print_cards,
}
"""Kind that ``list`` accepts -> its printer."""
SPELLED = {"gpu": "cards", "gpus": "cards", "strategy": "strategies"}


def _notes(kind: Any) -> list[str]:
    given = ", ".join(f"{f.name}={spelled(f.default)}" for f in dataclasses.fields(kind))
    parity = (
        "same losses as the reference" if kind.parity.value == "exact" else "changes the losses"
    )
    facts = [f"parameters: {given}"] if given else []
    facts += [f"needs: {', '.join(kind.needs)}"] if kind.needs else []
    return [*facts, f"parity: {kind.parity.value} ({parity})", f"source: {kind.source}"]


def first_sentence(doc: str | None) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = " ".join((doc or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", paragraph)[0].replace("``", "`")


def _suites() -> list[tuple[Any, ...]]:
    listed: list[tuple[Any, ...]] = []
    for name in known_suites():
        try:
            suite = load_suite(name, "cpu")
        except SuiteError as error:
            listed.append((name, "-", Text(str(error), "red")))
            continue
        listed.append((Text(name, "bold"), len(suite.rows), suite.title))
    return listed
