"""``./run.sh list``: print strategies, suites, models and cards."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
from dataclasses import fields
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
    console = make_console()
    if kind is None:
        print_one(options.what, console)
    elif kind == "strategies":
        print_list(console)
    else:
        title, heads, rows, foot = table_of(kind)
        console.print(Text(title, style="bold"))
        print_listed(console, heads, rows)
        if foot:
            console.print(Text(foot, style="dim"))
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
        rows = [
            {
                "name": one,
                "place": CATALOG[one].slot.name.lower(),
                "what": first_sentence(CATALOG[one].__doc__),
                "parameters": {f.name: spelled(f.default) for f in fields(CATALOG[one])},
                "needs": CATALOG[one].needs,
                "losses": CATALOG[one].parity.value,
                "source": CATALOG[one].source,
            }
            for one in names
            if one in CATALOG
        ]
    absent = {**ABSENT, **ENDED}
    some = absent if kind == "strategies" else {n: absent[n] for n in (plain(name),) if n in absent}
    return {"kind": kind or "strategy", "rows": rows, "absent": some}


def print_list(console: Console) -> None:
    """Print the strategies by place, one line each."""
    for line in INTRO:
        console.print(Text(line, style="dim"))
    room = console.width - NAME_WIDTH - 2
    for place in dict.fromkeys(kind.slot for kind in CATALOG.values()):
        console.print(Text(place.name.lower(), style="bold"))
        for name, kind in CATALOG.items():
            if kind.slot is place and room < NAME_WIDTH:  # a narrow terminal gets the name alone
                console.print(Text(f"  {name}", no_wrap=True, overflow="crop"))
            elif kind.slot is place:  # on one line, cut between words
                text = first_sentence(kind.__doc__).replace("`", "")
                text = textwrap.shorten(text, room, placeholder=" ..")
                console.print(Text(f"  {name:{NAME_WIDTH}}"), Text(text, "dim"), sep="")
    console.print(Text(f"not here ({RUN} list NAME says why)", style="bold"))
    console.print(Padding(Text(", ".join(ABSENT)), (0, 0, 0, 2), expand=False))
    text = f"Also: {RUN} list models, {RUN} list cards, {RUN} list suites"
    console.print(Text(text, style="dim"))


def print_one(name: str, console: Console) -> None:
    """Print what a strategy does, its parameters, parity and source, or why there is none.

    Raises:
        BadInput: there is no such strategy.
    """
    absent, known, text = plain(name), name_of(name, CATALOG), ""
    if absent in ABSENT:
        text = f"{absent} is no strategy here: {ABSENT[absent]}"
    elif name in ENDED:
        text = f"{name} is not here: {ENDED[name]}"
    elif known not in CATALOG and (told := related(name)):
        text = f"model {name} is not here: {told}"
    if text:
        console.print(text, markup=False)
        return
    if known not in CATALOG:
        raise BadInput(f"there is no strategy {name!r}; {hint(name, CATALOG)}")
    kind = CATALOG[known]
    console.print(Text(f"{known} (place: {kind.slot.name.lower()})", style="bold"))
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n"):
        console.print(Text(" ".join(paragraph.replace("``", "").split())))
    given = ", ".join(f"{f.name}={spelled(f.default)}" for f in fields(kind))
    same = "same losses as the reference" if kind.parity.value == "exact" else "changes the losses"
    facts = [f"parameters: {given}"] if given else []
    facts += [f"needs: {', '.join(kind.needs)}"] if kind.needs else []
    facts += [f"parity: {kind.parity.value} ({same})", f"source: {kind.source}"]
    for fact in facts:
        console.print(Padding(Text(fact), (0, 0, 0, 2), expand=False))


def table_of(kind: str) -> tuple[str, tuple[str, ...], list[tuple[Any, ...]], str]:
    """Return title, heads, rows and last line of the list of a ``kind`` other than strategies."""
    if kind == "suites":
        title = f"suites: {RUN} run --suite NAME (without a name: default)"
        return title, ("suite", "rows", "title"), _suites(), ""
    if kind == "models":
        models = [
            (Text(name, "bold"), f"{known.parameters['built'] / 1e9:.2f}", ", ".join(known.hub))
            for name, known in families.table().items()
        ]
        title = "public models: --model takes these names in any spelling"
        names = ", ".join(dict.fromkeys(name.partition("/")[0] for name in dit.PRESETS))
        foot = f"DiTs, each with patch 2, 4 or 8: {names}. Read on: docs/reference/models.md"
        return title, ("model", "billion parameters", "on the Hugging Face Hub"), models, foot
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
    heads = ("card", "GiB", "GB/s", "TFLOP/s in 16 bits", "step times")
    foot = "Other cards: --gpu-memory SIZE. Peak rates and bandwidths are from data sheets."
    return "cards: --gpu takes these names in any spelling", heads, rows, foot


KINDS = ("strategies", "suites", "models", "cards")
SPELLED = {"gpu": "cards", "gpus": "cards", "strategy": "strategies"}


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
