"""The command line: ``run`` (the default) and every other command of ``./run.sh --help``.

Exit codes:
- 0: all rows that could run are ok;
- 1: a row failed, or an output file could not be written;
- 2: bad input;
- 130: interrupted.

Commands import their modules when they run, so that bad input is reported before slow imports.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness import ROOT, extensions
from harness.commands.options import folder_name, overrides
from harness.commands.streams import Ending, lasting_streams, open_descriptors
from strategies.base import BadInput
from strategies.files import printable

OK, FAILED, BAD, INTERRUPTED = 0, 1, 2, 130


IN_RECIPE = "a recipe has the precision, as in single+bf16: --recipes of plan, --recipe of train"
WANTED = {
    **dict.fromkeys(
        ("--precision", "--mixed-precision", "--mixed_precision", "--dtype"), IN_RECIPE
    ),
    **dict.fromkeys(("--batch-size", "--batch_size", "--batch"), "take --global-batch"),
    "--card": "take --gpu",
}
"""Options that other tools have -> what to take instead."""


class _Parser(argparse.ArgumentParser):
    """Argument parser that prints a one-line error without the usage."""

    def error(self, message: str) -> NoReturn:
        absent = list(filter(None, map(extensions.missing, message.split())))
        words = message.split() if message.startswith("unrecognized") else ()
        hints = [WANTED[word] for word in words if word in WANTED]
        hint = hints[0] if hints else f"see {self.prog} --help"
        text = absent[0] if absent else f"{message}; {hint}"
        print(f"error: {text}", file=sys.stderr)
        raise SystemExit(BAD)


MOST = 1000
"""Most characters of an error's line."""
KINDS = ("strategies", "suites", "models", "cards")
"""Kinds that ``list`` accepts."""
SPELLED = {"gpu": "cards", "gpus": "cards", "strategy": "strategies"}
LONG = ("run", "train", "max-batch", "controls", "anatomy")
"""Long commands, which warn if their output could not be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command; report errors in one line. Return the exit code."""
    open_descriptors()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words = ["run", *words]
    with lasting_streams(warns=words[0] in LONG) as out, Ending() as ending:
        code = _act(words, ending)
    if out.failed:
        print(f"standard output is incomplete: {out.failed}", file=sys.stderr)
        return code or FAILED
    return code


def _act(words: Sequence[str], ending: Ending) -> int:
    if absent := extensions.missing(words[0]):
        return _bad(BadInput(absent))
    options = _parser(words[0]).parse_args(words)
    options.ending = ending
    try:
        return options.act(options)
    except BadInput as error:
        return _bad(error)
    except OSError as error:
        if not isinstance(error, _own_errors()):
            raise
        return _bad(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _bad(error: Exception) -> int:
    text = printable(" ".join(str(error).split()))
    print(f"error: {text[:MOST]}{' ...' * (len(text) > MOST)}", file=sys.stderr)
    return BAD


def _own_errors() -> tuple[type[Exception], ...]:
    from harness.launch.launch import LaunchError
    from harness.suite.run import OutputError

    return LaunchError, OutputError


# ---- arguments ----


def _parser(only: str = "") -> argparse.ArgumentParser:
    """Return the parser of all commands.

    ``only`` limits the extensions' options to those of one command, because each extension is slow
    to import.
    """
    parser = _Parser(
        prog="./run.sh",
        description="Train one model under many strategies, and compare memory and speed.",
        epilog="Each command has --help with its defaults and an example. Without a command: run, "
        "with the suite default. Read on: README.md.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    usual = (_add_run, _add_report, _add_compare, _add_list, _add_doctor)
    rest = (_add_lint, _add_anatomy, _add_train, _add_max_batch, _add_controls)
    for add in (*usual, *rest, _add_docs, _add_test):
        add(commands)
    for name, command in extensions.commands().items():
        act = functools.partial(_run_extension, command.act)
        added = _add(commands, name, act, command.help, command.example, command.page)
        if only in ("", name):
            extensions.load(command.arguments)(added)
    for one in commands.choices.values():
        _say_defaults(one)
    return parser


class _Version(argparse.Action):
    """Print the version in ``pyproject.toml``. Python 3.10 cannot read TOML."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        found = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)[0]
        print(f"headroom {found}")
        parser.exit()


def _say_defaults(command: argparse.ArgumentParser) -> None:
    """Append the default to each flag's help; it is "no" for all flags."""
    for action in command._actions:
        if action.nargs == 0 and action.dest != "help" and "default" not in (action.help or ""):
            action.help = f"{action.help} (default: no)"


def _add(
    commands: Any, name: str, act: Any, text: str, example: str, page: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}\n\nread on: {page}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(act=act)
    return parser


def _add_run(commands: Any) -> None:
    from harness.commands.run import add_arguments

    example = (
        "./run.sh run --recipes ddp zero3+bf16 zero3_offload+checkpoint --steps 10\n"
        "  ./run.sh run --suite default --dry-run"
    )
    text = "run a suite of recipes and report on it"
    pages = "docs/reference/suites.md, docs/reference/strategies.md"
    add_arguments(_add(commands, "run", _run, text, example, pages))


def _add_report(commands: Any) -> None:
    example = "./run.sh report results/default"
    text = "write the report of existing results again, without torch"
    parser = _add(commands, "report", _report, text, example, "docs/how-to/read-a-report.md")
    parser.add_argument("folder", type=folder_name, metavar="DIR", help="a results folder")


def _add_compare(commands: Any) -> None:
    example = "./run.sh compare results/before results/after"
    text = "compare two result sets, and show the changes beyond the noise"
    parser = _add(commands, "compare", _compare, text, example, "docs/how-to/read-a-report.md")
    parser.add_argument("old", type=folder_name, metavar="DIR", help="results before")
    parser.add_argument("new", type=folder_name, metavar="DIR", help="results after")


def _add_list(commands: Any) -> None:
    text = "list strategies, suites, models or cards; or describe one strategy"
    pages = "docs/reference/strategies.md, docs/reference/suites.md"
    parser = _add(commands, "list", _list, text, "./run.sh list zero2", pages)
    message = f"{', '.join(KINDS)}, or the name of a strategy (default: strategies)"
    parser.add_argument("what", nargs="?", metavar="WHAT", default=KINDS[0], help=message)
    parser.add_argument("--markdown", action="store_true", help="the strategy table as Markdown")


def _add_doctor(commands: Any) -> None:
    text = "check which strategies this machine can run, and how to enable the others"
    parser = _add(commands, "doctor", _doctor, text, "./run.sh doctor", "docs/how-to/install.md")
    add, message = parser.add_argument, "results folder (default: results)"
    add("--out", type=folder_name, metavar="DIR", default=Path("results"), help=message)
    message = (
        "read all samples of this data source, and report NaN and damaged files, as "
        "latents:FOLDER (default: none)"
    )
    add("--data", metavar="DATA", help=message)
    for more in extensions.hooks("doctor_arguments"):
        more(parser)


def _add_lint(commands: Any) -> None:
    from harness.commands.lint import add_arguments

    text = "list DeepSpeed settings that waste memory for a model, with the bytes"
    example = "./run.sh lint my_zero3.json --model DiT-XL/2 --processes 8"
    add_arguments(_add(commands, "lint", _lint, text, example, "docs/how-to/find-memory.md"))


def _add_anatomy(commands: Any) -> None:
    from harness.commands.anatomy import add_arguments

    text = "write a page about the memory and time of one recipe"
    example = "./run.sh anatomy zero2+bf16 --model DiT-S/4 --global-batch 16"
    add_arguments(_add(commands, "anatomy", _anatomy, text, example, "docs/how-to/find-memory.md"))


def _add_train(commands: Any) -> None:
    from harness.commands.train import add_arguments

    text = "train one recipe to a checkpoint and samples"
    example = "./run.sh train --recipe single+bf16 --steps 2000 --samples digits.png"
    add_arguments(_add(commands, "train", _train, text, example, "docs/how-to/train.md"))


def _add_max_batch(commands: Any) -> None:
    from harness.commands.max_batch import add_arguments

    text = "find the largest micro batch that fits"
    example = "./run.sh max-batch --recipe zero2+bf16 --model DiT-XL/2 --memory-limit 24"
    add_arguments(_add(commands, "max-batch", _max_batch, text, example, "docs/how-to/train.md"))


def _add_controls(commands: Any) -> None:
    from harness.commands.controls import add_arguments

    text = "run sabotaged recipes, and check that parity detects each"
    page = "docs/explanation/noise-and-parity.md"
    add_arguments(_add(commands, "controls", _controls, text, "./run.sh controls", page))


def _add_docs(commands: Any) -> None:
    text = "build the documentation as a static site in site/, which opens from disk"
    _add(commands, "docs", _outside, text, "./run.sh docs", "docs/index.md")


def _add_test(commands: Any) -> None:
    text = "set up the environment, and run the tests"
    _add(commands, "test", _outside, text, "./run.sh test", "docs/adding/README.md")


# ---- commands ----


def _run_extension(act: str, options: argparse.Namespace) -> int:
    return extensions.load(act)(options)


def _run(options: argparse.Namespace) -> int:
    from harness.commands.run import run

    return run(options, overrides(options))


def _report(options: argparse.Namespace) -> int:
    from harness.commands.reports import report

    return report(options.folder)


def _compare(options: argparse.Namespace) -> int:
    from harness.commands.reports import compare

    return compare(options.old, options.new)


def _list(options: argparse.Namespace) -> int:
    from harness.commands import listing

    if options.markdown:
        print(listing.markdown())
        return OK
    whole = (listing.print_list, listing.print_suites, listing.print_models, listing.print_cards)
    what = SPELLED.get(options.what, options.what)
    kind = next((kind for kind in KINDS if what in (kind, kind.removesuffix("s"))), None)
    if kind:
        whole[KINDS.index(kind)]()
    else:
        listing.print_one(options.what)
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from harness.commands.doctor import doctor, look_at_data

    return look_at_data(options.data) if options.data else doctor(options)


def _lint(options: argparse.Namespace) -> int:
    from harness.commands.lint import lint_files

    return lint_files(options)


def _anatomy(options: argparse.Namespace) -> int:
    from harness.commands.anatomy import anatomy

    return anatomy(options, overrides(options))


def _train(options: argparse.Namespace) -> int:
    from harness.commands.train import train

    return train(options, overrides(options))


def _max_batch(options: argparse.Namespace) -> int:
    from harness.commands.max_batch import max_batch

    return max_batch(options, overrides(options))


def _controls(options: argparse.Namespace) -> int:
    from harness.commands.controls import controls

    return controls(options, overrides(options))


def _outside(options: argparse.Namespace) -> int:
    text = (
        f"error: ./run.sh {options.command} runs in an environment of its own; start it as ./run.sh"
    )
    print(text, options.command, file=sys.stderr)
    return BAD
