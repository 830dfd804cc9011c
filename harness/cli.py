"""The command line: run (the default) and every other command of ``./run.sh --help``.

Exit codes: 0 all rows that could run are ok; 1 a row failed; 2 bad input; 130 interrupted.
Imports stay inside the commands: bad input is answered before anything heavy is loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.spec import DEVICES, Spec, add_arguments
from strategies.base import BadInput

__all__ = ["main"]

OK, FAILED, BAD, INTERRUPTED = 0, 1, 2, 130
COMMANDS = (
    *("run", "plan", "report", "compare", "list", "doctor", "lint"),
    *("anatomy", "train", "max-batch", "test"),
)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage above it."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(BAD)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, do, and say in one line what went wrong; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["run", *words]
    options = _parser().parse_args(words)
    try:
        return options.act(options)
    except BadInput as error:
        return _bad(error)
    except BrokenPipeError:  # the reader of a pipe has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        if not isinstance(error, _own_errors()):
            raise
        return _bad(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _bad(error: Exception) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return BAD


def _own_errors() -> tuple[type[Exception], ...]:
    from harness.launch import LaunchError
    from harness.suite_run import OutputError

    return LaunchError, OutputError


# ---- what can be said ----


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="./run.sh",
        description="Train one DiT under many strategies, and compare memory and speed.",
        epilog="Each command has --help with an example. Without a command: run, default suite.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    adders = (_add_run, _add_plan, _add_report, _add_compare, _add_list, _add_doctor)
    for add in (*adders, _add_lint, _add_anatomy, _add_train, _add_max_batch, _add_test):
        add(commands)
    return parser


def _add(commands: Any, name: str, act: Any, text: str, example: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(act=act)
    return parser


def _add_run(commands: Any) -> None:
    example = (
        "./run.sh run --recipes ddp zero3+bf16 zero3_offload+checkpoint:every=2 --steps 10\n"
        "  ./run.sh run --suite default --dry-run"
    )
    parser = _add(commands, "run", _run, "run a suite of recipes and report on it", example)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--suite", metavar="NAME_OR_FILE", help="see ./run.sh list (default: default)"
    )
    what.add_argument(
        "--recipes", nargs="+", metavar="R", help="recipes; the first is the reference"
    )
    add = parser.add_argument
    add("--repeat", type=int, metavar="N", help="measure every recipe N times")
    add(
        "--timeout", type=_seconds, metavar="SECONDS", help="deadline of one run (default: suite's)"
    )
    add("--out", type=Path, metavar="DIR", help="results folder (default: results/SUITE)")
    add("--fresh", action="store_true", help="repeat finished runs too")
    add("--no-predictions", action="store_true", help="do not predict what was measured")
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    settings = parser.add_argument_group("settings of every row (they win over the suite's)")
    _add_settings(settings, "recipe", "repeat")


def _add_settings(parser: Any, *leave_out: str) -> None:
    parser.add_argument("--device", choices=DEVICES, help="cpu or cuda (default: cuda if there)")
    add_arguments(parser, leave_out=(*leave_out, "device"))


def _add_plan(commands: Any) -> None:
    from harness import plan

    example = (
        "./run.sh plan --model DiT-XL/2 --gpus 8 --gpu-memory 24GiB --global-batch 256\n"
        "  ./run.sh plan --gpus 64 --gpu A100-80GB --recipes zero3+bf16+checkpoint --largest model"
    )
    text = "predict, without a GPU, which recipe fits which GPUs and how fast"
    plan.add_arguments(_add(commands, "plan", _plan, text, example))


def _add_report(commands: Any) -> None:
    example = "./run.sh report results/default"
    text = "make the report again from results alone; needs no torch"
    parser = _add(commands, "report", _report, text, example)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a results folder")


def _add_compare(commands: Any) -> None:
    example = "./run.sh compare results/before results/after"
    text = "compare two result sets: what changed beyond the noise"
    parser = _add(commands, "compare", _compare, text, example)
    parser.add_argument("old", type=Path, metavar="DIR", help="results before")
    parser.add_argument("new", type=Path, metavar="DIR", help="results after")


def _add_list(commands: Any) -> None:
    text = "list strategies with their parameters, and suites"
    parser = _add(commands, "list", _list, text, "./run.sh list")
    parser.add_argument("--markdown", action="store_true", help="the strategies, for a README")


def _add_doctor(commands: Any) -> None:
    text = "say what this machine can run, and why not the rest"
    parser = _add(commands, "doctor", _doctor, text, "./run.sh doctor")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path("results"), help="results folder"
    )


def _add_lint(commands: Any) -> None:
    text = "name DeepSpeed settings that waste memory for a model, with the bytes"
    example = "./run.sh lint my_zero3.json --model DiT-XL/2 --processes 8"
    parser = _add(commands, "lint", _lint, text, example)
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE.json", help="DeepSpeed files (default: our own)")
    add("--model", metavar="MODEL", default="DiT-XL/2", help="model preset (default: DiT-XL/2)")
    add("--processes", type=int, metavar="N", default=8, help="devices (default: 8)")
    add("--precision", choices=("bf16", "fp32"), default="bf16", help="(default: bf16)")


def _add_anatomy(commands: Any) -> None:
    text = "show where the memory and time of one recipe go: a page of its own"
    example = "./run.sh anatomy zero2+bf16 --model DiT-S/4 --global-batch 16"
    parser = _add(commands, "anatomy", _anatomy, text, example)
    parser.add_argument("recipe", metavar="RECIPE", help="strategies joined by +")
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder (default: results/anatomy/RECIPE)")
    add("--timeout", type=_seconds, metavar="SECONDS", help="deadline (default: none)")
    add("--dry-run", action="store_true", help="print the command, start nothing")
    _add_settings(parser.add_argument_group("settings"), "recipe", "repeat", "profile", "snapshot")


def _add_train(commands: Any) -> None:
    example = "./run.sh train --recipe ddp+bf16 --steps 2000 --samples digits.png"
    parser = _add(
        commands, "train", _train, "train one recipe to a checkpoint and samples", example
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="run folder (default: results/train/RECIPE)")
    add("--timeout", type=_seconds, metavar="SECONDS", help="deadline (default: none)")
    add("--checkpoint", metavar="DIR", help="the training state (default: OUT/checkpoint)")
    add("--save-every", type=int, metavar="K", help="steps between two checkpoints")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--samples", metavar="FILE.png", help="grid of samples (default: OUT/samples.png)")
    add("--trained", metavar="FILE", help="what was trained by itself: adapters, not the model")
    add("--sample-steps", type=int, metavar="N", help="steps of the sampler")
    add("--guidance", type=float, metavar="G", help="classifier-free guidance scale")
    add("--dry-run", action="store_true", help="print the command, start nothing")
    _add_settings(
        parser.add_argument_group("settings"), "repeat", "warmup", "world", "profile", "snapshot"
    )


def _add_max_batch(commands: Any) -> None:
    example = "./run.sh max-batch --recipe zero2+bf16+checkpoint --model DiT-XL/2 --memory-limit 24"
    text = "find the largest micro batch that fits"
    parser = _add(commands, "max-batch", _max_batch, text, example)
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="results (default: results/max-batch/RECIPE)")
    add("--memory-limit", type=float, metavar="GIB", help="what a process may use (default: all)")
    add("--first", type=int, default=1, metavar="N", help="micro batch to begin with (default: 1)")
    add("--most", type=int, default=4096, metavar="N", help="largest to try (default: 4096)")
    add("--timeout", type=_seconds, default=1800, metavar="SECONDS", help="deadline of one probe")
    add("--fresh", action="store_true", help="repeat probes that are known")
    left = ("repeat", "warmup", "steps", "global_batch", "world", "profile", "snapshot")
    _add_settings(parser.add_argument_group("settings"), *left)


def _add_test(commands: Any) -> None:
    _add(commands, "test", _test, "set up and pass the tests", "./run.sh test")


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def overrides(options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Spec fields given on the command line."""
    names = [f.name for f in dataclasses.fields(Spec) if f.name not in ("recipe", "device")]
    found = {name: getattr(options, name, None) for name in (*names, *more)}
    return {name: value for name, value in found.items() if value is not None}


# ---- what is done ----


def _run(options: argparse.Namespace) -> int:
    from harness.commands import run

    return run(options, overrides(options))


def _plan(options: argparse.Namespace) -> int:
    from harness.plan import plan

    return plan(options)


def _report(options: argparse.Namespace) -> int:
    from harness.commands import report

    return report(options.folder)


def _compare(options: argparse.Namespace) -> int:
    from harness.commands import compare

    return compare(options.old, options.new)


def _list(options: argparse.Namespace) -> int:
    from harness import listing

    if options.markdown:
        print(listing.markdown())
    else:
        listing.print_list()
    return OK


def _doctor(options: argparse.Namespace) -> int:
    from harness.commands import doctor

    return doctor(options.out)


def _lint(options: argparse.Namespace) -> int:
    from harness.linting import lint_files

    return lint_files(options)


def _anatomy(options: argparse.Namespace) -> int:
    from harness.portraying import anatomy

    return anatomy(options, overrides(options))


def _train(options: argparse.Namespace) -> int:
    from harness.training import train

    return train(options, overrides(options))


def _max_batch(options: argparse.Namespace) -> int:
    from harness.max_batch import max_batch

    return max_batch(options, overrides(options))


def _test(options: argparse.Namespace) -> int:
    print("error: the tests need their environment; start them with ./run.sh test", file=sys.stderr)
    return BAD
