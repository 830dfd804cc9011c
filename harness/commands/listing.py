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
from strategies.base import BadInput, parity
from strategies.recipe import ABSENT, ENDED
from strategies.strategy import spelled
from strategies.words import hint, name_of, plain

KINDS = ("strategies", "suites", "models", "cards")
SPELLED = {"gpu": "cards", "gpus": "cards", "strategy": "strategies"}
INTRO = (
    "A recipe joins strategies with +, at most one of each place: zero2+bf16+ema.",
    f"Defaults for open places: fp32, adamw, ema. Details: {RUN} list NAME",
)
NAME_WIDTH = 23
"""Columns of a name in the list, with the gap behind it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = f"{', '.join(KINDS)}, or the name of a strategy (default: strategies)"
    parser.add_argument("what", nargs="?", metavar="WHAT", default="strategies", help=text)
    add_json(parser)


def list_all(options: argparse.Namespace) -> int:
    """Print all things of a kind, or describe one strategy; return the exit code."""
    name, console = options.what, make_console()
    what = SPELLED.get(name, name)
    kind = next((kind for kind in KINDS if what in (kind, kind.removesuffix("s"))), None)
    absent = {**ABSENT, **ENDED}
    if kind in LISTS:
        rows, absent = LISTS[kind](console), {}
    elif kind:
        print_strategies(console)
        rows = [facts_of(one) for one in CATALOG]
    else:
        print_one(name, console)
        known, some = name_of(name, CATALOG), plain(name)
        rows = [facts_of(known)] if known in CATALOG else []
        absent = {some: absent[some]} if some in absent else {}
    write_answer(options, {"kind": kind or "strategy", "rows": rows, "absent": absent})
    return OK


def facts_of(name: str) -> dict[str, Any]:
    kind = CATALOG[name]
    return {
        "name": name,
        "place": kind.slot.name.lower(),
        "what": first_sentence(kind.__doc__),
        "parameters": {f.name: spelled(f.default) for f in fields(kind)},
        "needs": kind.needs,
        "losses": parity(kind.alters),
        "source": kind.source,
    }


def print_strategies(console: Console) -> None:
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
    """Print what a strategy does, its parameters, parity and source, or why there is none."""
    absent, known, text = plain(name), name_of(name, CATALOG), ""
    if absent in ABSENT:
        text = f"{absent} is no strategy here: {ABSENT[absent]}"
    elif name in ENDED:
        text = f"{name} is not here: {ENDED[name]}"
    elif known not in CATALOG and (others := related(name)):
        text = f"model {name} is not here: {others}"
    if text:
        console.print(text, markup=False)
        return
    if known not in CATALOG:
        raise BadInput(f"there is no strategy {name!r}; {hint(name, CATALOG)}")
    facts = facts_of(known)
    console.print(Text(f"{known} (place: {facts['place']})", style="bold"))
    for paragraph in inspect.cleandoc(CATALOG[known].__doc__ or "").split("\n\n"):
        console.print(Text(" ".join(paragraph.replace("``", "").split())))
    given = ", ".join(f"{name}={value}" for name, value in facts["parameters"].items())
    same = "same losses as the reference" if facts["losses"] == "exact" else "changes the losses"
    lines = [f"parameters: {given}"] if given else []
    lines += [f"needs: {', '.join(facts['needs'])}"] if facts["needs"] else []
    lines += [f"parity: {facts['losses']} ({same})", f"source: {facts['source']}"]
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def list_suites(console: Console) -> list[dict[str, Any]]:
    """Print the suites; return them as plain data."""
    listed: list[tuple[Any, ...]] = []
    for name in known_suites():
        try:
            suite = load_suite(name, "cpu")
            listed.append((Text(name, "bold"), len(suite.rows), suite.title))
        except SuiteError as error:
            listed.append((name, "-", Text(str(error), "red")))
    console.print(f"[bold]suites: {RUN} run --suite NAME (without a name: default)")
    print_listed(console, ("suite", "rows", "title"), listed)
    return [dict(zip(("name", "rows", "title"), map(str, one), strict=True)) for one in listed]


def list_models(console: Console) -> list[dict[str, Any]]:
    """Print the public models; return them as plain data."""
    rows = [
        {"name": name, "parameters": known.parameters["built"], "hub": known.hub}
        for name, known in families.table().items()
    ]
    console.print("[bold]public models: --model takes these names in any spelling")
    heads = ("model", "billion parameters", "on the Hugging Face Hub")
    cells = [
        (Text(row["name"], "bold"), f"{row['parameters'] / 1e9:.2f}", ", ".join(row["hub"]))
        for row in rows
    ]
    print_listed(console, heads, cells)
    names = ", ".join(dict.fromkeys(name.partition("/")[0] for name in dit.PRESETS))
    foot = f"DiTs, each with patch 2, 4 or 8: {names}. Read on: docs/reference/models.md"
    console.print(Text(foot, style="dim"))
    return rows


def list_cards(console: Console) -> list[dict[str, Any]]:
    """Print the cards; return them as plain data."""
    cells = [
        (
            Text(name, "bold"),
            f"{card.memory_bytes / 2**30:.1f}",
            f"{card.bandwidth / 1e9:.0f}",
            f"{card.flops('float16') / 1e12:.0f}",
            "compared with measured ones" if card.timed else "untried",
        )
        for name, card in cards.table().items()
    ]
    console.print("[bold]cards: --gpu takes these names in any spelling")
    print_listed(console, ("card", "GiB", "GB/s", "TFLOP/s in 16 bits", "step times"), cells)
    foot = "Other cards: --gpu-memory SIZE. Peak rates and bandwidths are from data sheets."
    console.print(Text(foot, style="dim"))
    return [dataclasses.asdict(card) | {"name": n} for n, card in cards.table().items()]


LISTS = {"suites": list_suites, "models": list_models, "cards": list_cards}


def first_sentence(doc: str | None) -> str:
    paragraph = " ".join((doc or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.]) (?=[A-Z`])", paragraph)[0].replace("``", "`")
