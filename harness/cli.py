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
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from harness import CLONE, RUN, SET_UP, __version__, hooks
from harness.commands.streams import Ending, lasting_streams

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


def _ended() -> dict[str, str]:
    try:
        from strategies.recipe import ENDED
    except ImportError:  # a bare Python without yaml, which prints help alone
        return {}
    return ENDED


class _Parser(argparse.ArgumentParser):
    """Argument parser that prints a one-line error without the usage.

    It takes a word as ``-5GiB`` for a value, not for an option, so that the error names the key.
    """

    asked = ""
    """The command, for options that only the parser of all commands finds to be unknown."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message: str) -> NoReturn:
        words = message.split() if message.startswith("unrecognized") else ()
        command = self.asked or self.prog.split()[-1]
        keys = [key for word in words for key in (f"{command} {word.partition('=')[0]}", word)]
        hints = [known[key] for key in keys for known in (WANTED, _ended()) if key in known]
        hint = hints[0] if hints else f"see {self.prog} --help"
        print(f"error: {message}; {hint}", file=sys.stderr)
        raise SystemExit(BAD)


MOST = 1000
"""Most characters of an error's line."""
EXITED = "code of the model's file ended the process by sys.exit or os._exit"
LONG = ("run", "train", "max-batch", "anatomy")
"""Long commands, which warn if their output could not be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run the command; report errors in one line. Return the exit code."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the completions of a line
        import argcomplete

        line = os.environ.get("COMP_LINE", "").split()
        argcomplete.autocomplete(_parser([*line, "", ""][1]), default_completer=None)
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
    if words[0] in _ended():
        return _bad(f"there is no command {words[0]}: {_ended()[words[0]]}")
    parser = _parser(words[0])
    parser.asked = words[0]
    options = parser.parse_args(words)
    options.ending = ending
    # Help needs no package, and these do.
    from harness.exits import exits_raise
    from strategies.base import BadInput

    try:
        with exits_raise():
            return options.act(options)
    except SystemExit as stop:
        return _bad(BadInput(f"{EXITED} (exit code {stop.code}); remove the call"))
    except BadInput as error:
        return _bad(error)
    except OSError as error:
        from harness.files import OutputError

        if not isinstance(error, OutputError):
            raise
        return _bad(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in LIBRARIES:
            raise
        return _bad(f"this needs {error.name}, which is not installed; {SET_UP}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _bad(error: Exception | str) -> int:
    from strategies.files import printable

    text = printable(" ".join(str(error).split()))
    print(f"error: {text[:MOST]}{' ...' * (len(text) > MOST)}", file=sys.stderr)
    return BAD


# ---- arguments ----


class Command(NamedTuple):
    """A command as ``./run.sh --help`` shows it.

    ``act`` is the "module:function" that takes the parsed options and returns the exit code;
    ``arguments`` is the function beside it that adds the options to a parser.
    """

    help: str
    example: str
    page: str
    act: str
    arguments: str = "add_arguments"


COMMANDS = {
    "run": Command(
        help="run a suite of recipes and report on it",
        example="./run.sh run --recipes ddp zero3+bf16 zero3_offload+checkpoint --steps 10\n"
        "  ./run.sh run --suite default --dry-run",
        page="docs/reference/suites.md, docs/reference/strategies.md",
        act="harness.commands.run:run",
    ),
    "report": Command(
        help="write the report of existing results again, without torch",
        example="./run.sh report results/default",
        page="docs/how-to/read-a-report.md",
        arguments="add_report_arguments",
        act="harness.commands.reports:report",
    ),
    "compare": Command(
        help="compare two result sets, and show the changes beyond the noise",
        example="./run.sh compare results/before results/after",
        page="docs/how-to/read-a-report.md",
        arguments="add_compare_arguments",
        act="harness.commands.reports:compare",
    ),
    "list": Command(
        help="list strategies, suites, models or cards; or describe one strategy",
        example="./run.sh list zero2",
        page="docs/reference/strategies.md, docs/reference/suites.md",
        act="harness.commands.listing:list_all",
    ),
    "doctor": Command(
        help="check which strategies this machine can run, and how to enable the others",
        example="./run.sh doctor",
        page="docs/how-to/install.md",
        act="harness.commands.doctor:doctor",
    ),
    "lint": Command(
        help="list DeepSpeed settings that waste memory for a model, with the bytes",
        example="./run.sh lint my_zero3.json --model DiT-XL/2 --processes 8",
        page="docs/how-to/out-of-memory.md",
        act="harness.commands.lint:lint_files",
    ),
    "anatomy": Command(
        help="write a page about the memory and time of one recipe",
        example="./run.sh anatomy zero2+bf16 --model DiT-S/4 --global-batch 16",
        page="docs/how-to/out-of-memory.md",
        act="harness.commands.anatomy:anatomy",
    ),
    "train": Command(
        help="train one recipe to a checkpoint and samples",
        example="./run.sh train --recipe single+bf16 --steps 2000 --samples digits.png",
        page="docs/how-to/train.md",
        act="harness.commands.train:train",
    ),
    "max-batch": Command(
        help="find the largest micro batch that fits",
        example="./run.sh max-batch --recipe zero2+bf16 --model DiT-XL/2 --memory-limit 24",
        page="docs/how-to/train.md",
        act="harness.commands.max_batch:max_batch",
    ),
    "script": Command(
        help="measure your own accelerate training script under several launch files",
        example="./run.sh script --launch ddp zero2 fsdp2 --with checkpoint --processes 2 "
        "-- train.py --resolution 512",
        page="docs/tutorial/your-own-script.md",
        act="harness.script.command:act",
    ),
    "plan": Command(
        help="predict without a GPU which recipes fit, and how fast each trains",
        example="./run.sh plan --model flux-dev --gpu RTX-4090\n"
        "  ./run.sh plan --model DiT-XL/2 --gpus 8 --gpu-memory 24GiB --global-batch 256\n"
        "  ./run.sh plan --gpu A100-80GB --recipes zero3+bf16 --largest batch",
        page="docs/how-to/plan.md",
        act="harness.planner.plan.command:plan",
    ),
    "export": Command(
        help="write a recipe's files, code and options for your own trainer",
        example="./run.sh export zero2+bf16+checkpoint --gpus 8 --gpu RTX-4090 --out take_home",
        page="docs/how-to/export.md",
        act="harness.planner.export.command:export",
    ),
    "oom": Command(
        help="explain an out-of-memory message, log or memory snapshot, and what would fit",
        example="./run.sh oom train.log\n"
        "  ./run.sh oom train.log --model flux-dev --recipe single+bf16_pure+lora:rank=16",
        page="docs/how-to/out-of-memory.md",
        act="harness.planner.oom.command:oom",
    ),
    "atlas": Command(
        help="predict every public model on every common card, and write a page with filters",
        example="./run.sh atlas --models pixart-sigma flux-dev --cards RTX-4090 24GiB --gpus 1",
        page="docs/how-to/plan.md",
        act="harness.planner.atlas.command:atlas",
    ),
    "calibrate": Command(
        help="measure the rates of this machine that predictions assume, and store them",
        example="./run.sh calibrate --device cpu",
        page="docs/how-to/first-gpu.md",
        act="harness.planner.calibrate.command:calibrate",
    ),
}
TRAIN = ("run", "doctor", "anatomy", "train", "max-batch", "script", "calibrate")
"""Commands that train or measure."""
NEEDED = ("torch", "accelerate", "numpy", "PIL")
"""Modules without which nothing is trained; other libraries are missed by single rows."""
LIBRARIES = (*NEEDED, "deepspeed", "transformers", "sklearn", "scipy", "safetensors", "ninja")
"""Modules that the light installation lacks."""
OUTSIDE = {
    "docs": ("build the documentation as a static site in site/, which opens from disk",
             "docs/index.md"),
    "test": ("set up the environment, and run the tests", "docs/adding/README.md"),
}  # fmt: skip
"""Commands that ``run.sh`` runs by itself, in an environment of their own -> help and page."""


def _parser(only: str = "") -> _Parser:
    """Return the parser of all commands; ``only`` limits the options to those of one command,
    because the modules of each command are slow to import.
    """
    parser = _Parser(
        prog=RUN,
        description="Train one model under many strategies, and compare memory and speed.",
        epilog="Each command has --help with its defaults and an example. Without a command: run, "
        "with the suite default. Read on: README.md.",
    )
    version = f"headroom {__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version, and end"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    outside = {
        name: Command(text, f"./run.sh {name}", page, "harness.cli:_outside", "")
        for name, (text, page) in OUTSIDE.items()
        if CLONE
    }
    for name, command in {**COMMANDS, **outside}.items():
        added = commands.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"example:\n  {command.example}\n\nread on: {command.page}".replace(
                "./run.sh", RUN
            ),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(act=functools.partial(_run, command.act))
        if command.arguments and only in ("", name):
            module = command.act.partition(":")[0]
            hooks.load(f"{module}:{command.arguments}")(added)
        for action in added._actions:  # the default of every flag is "no"
            flag = action.nargs == 0 and action.dest != "help"
            if flag and "default" not in (action.help or ""):
                action.help = f"{action.help} (default: no)"
    return parser


def _run(act: str, options: argparse.Namespace) -> int:
    needed = NEEDED if options.command in TRAIN else ()
    if lacking := [name for name in needed if not importlib.util.find_spec(name)]:
        return _bad(f"{options.command} needs {', '.join(lacking)}; {SET_UP}")
    from harness.commands.options import answering

    with answering(options):
        return hooks.load(act)(options)


def _outside(options: argparse.Namespace) -> int:
    text = (
        f"error: ./run.sh {options.command} runs in an environment of its own; start it as ./run.sh"
    )
    print(text, options.command, file=sys.stderr)
    return BAD
