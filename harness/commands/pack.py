"""``./run.sh pack``: what a machine without network access needs, as a folder of wheels."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import ROOT
from harness.commands.console import OK, make_console, short
from harness.system import packing
from harness.system.probe import version
from strategies.base import BadInput

__all__ = ["add_arguments", "pack"]

LIMIT = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``pack``."""
    add = parser.add_argument
    here = ".".join(map(str, sys.version_info[:2]))
    add("--python", metavar="3.N", default=here, help=f"that machine's Python (default: {here})")
    told = "its torch, as torch.__version__ says it: 2.11.0+cu126 (default: this environment's)"
    add("--torch", metavar="VERSION", help=told)
    add("--machine", default="x86_64", help="its processor, by uname -m (default: x86_64)")
    told = "packages there already, beside torch and what torch brings (default: none)"
    add("--has", nargs="+", metavar="NAME", default=[], help=told)
    add("--limit", type=float, metavar="MIB", default=LIMIT, help=f"(default: {LIMIT})")
    add("--out", type=Path, metavar="FOLDER", help="(default: wheels, beside run.sh)")


def pack(options: argparse.Namespace) -> int:
    """Pack, and say how it is used there."""
    torch = options.torch or version("torch")
    if torch is None:
        raise BadInput("torch is not installed here; name that machine's with --torch")
    target = packing.Target(python=options.python, torch=torch, machine=options.machine)
    folder, console = Path(options.out or ROOT / "wheels").absolute(), make_console()
    sizes = packing.pack(target, folder, int(options.limit * 2**20), options.has)
    console.print(
        f"{short(folder)}: {len(sizes)} wheels, {sum(sizes.values()) / 2**20:.1f} MiB, for Python "
        f"{target.python} with torch {target.torch} ({target.cuda})\n"
        "there, beside run.sh: HEADROOM_PYTHON=$(which python3) ./run.sh doctor\n"
        "or from elsewhere: HEADROOM_WHEELS=/path/to/folder",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return OK
