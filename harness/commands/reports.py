"""``./run.sh report`` and ``./run.sh compare``: reports from existing results, without torch."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness import RUN, files
from harness.commands.console import FAILED, OK, make_console, short
from harness.commands.options import add_force, add_json, folder_name, write_answer
from harness.json_files import read_json
from harness.report import compare as compare_folders
from harness.report import render_comparison, write_report
from harness.result import Result, load_all
from harness.spec import SpecError


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=folder_name, metavar="DIR", help="a results folder")
    add_force(parser)
    add_json(parser)


def report(options: argparse.Namespace) -> int:
    """Write the report of a results folder again; return the exit code."""
    results, skipped = _results(options.folder)
    with contextlib.suppress(OSError):  # the table is printed even if no file can be written
        files.claim(options.folder, files.REPORT, force=options.force)
    written = show(results, skipped, options.folder, make_console())
    if options.json and written:
        write_answer(options, {"report": read_json(options.folder / "report.json")})
    return OK if written else FAILED


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=folder_name, metavar="DIR", help="results before")
    parser.add_argument("new", type=folder_name, metavar="DIR", help="results after")
    add_json(parser)


def compare(options: argparse.Namespace) -> int:
    """Print the differences between two results folders; return the exit code."""
    for folder in (options.old, options.new):
        _results(folder)
    found = compare_folders(options.old, options.new)
    render_comparison(found, make_console())
    changed = [change.label for change in found.changed]
    write_answer(options, {**dataclasses.asdict(found), "changed": changed})
    return OK


def show(results: Sequence[Result], skipped: Sequence[str], out: Path, console: Console) -> bool:
    """Write the report of ``out``, and print its table and files; return whether all went well."""
    lost: list[str] = []
    if not results:
        return True
    console.print()
    paths = write_report(results, skipped, out, lost=lost, console=console)
    console.print()
    for path in paths:
        console.print(Text(str(short(path))), soft_wrap=True)
    for line in lost:
        console.print(Text(f"not written: {line}", style="red"), soft_wrap=True)
    return not lost


def _results(folder: Path) -> tuple[list[Result], list[str]]:
    for path in (folder, folder / "runs"):
        try:
            with os.scandir(path):
                pass
        except PermissionError as error:  # else it would read as empty
            way = "ask its owner for access, or copy the files that you may read"
            raise SpecError(f"{path}: {error.strerror}; {way}") from None
        except OSError:  # a missing folder or a file has its own message
            break
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder; give a results folder of {RUN} run (--out)")
    results, skipped = load_all(folder)
    if not results:
        first = skipped[0] if skipped else "it should hold result.json or runs/*/result.json"
        raise SpecError(f"{folder}: no results in it; {first}")
    return results, skipped
