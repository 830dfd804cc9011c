"""Options that several commands share: the fields of a spec, and what was given of them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from harness.spec import DEVICES, Spec, add_arguments

__all__ = ["add_settings", "overrides", "seconds"]


def add_settings(parser: Any, *leave_out: str) -> None:
    """An option for each field of a spec but ``leave_out``; ``parser`` may be a group of one."""
    parser.add_argument("--device", choices=DEVICES, help="cpu or cuda (default: cuda if there)")
    add_arguments(parser, leave_out=(*leave_out, "device"))


def overrides(options: argparse.Namespace) -> dict[str, Any]:
    """Spec fields given on the command line; recipe and device are the commands' own affair."""
    names = [f.name for f in dataclasses.fields(Spec) if f.name not in ("recipe", "device")]
    found = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def seconds(text: str) -> float:
    """A number of seconds above 0, for argparse."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value
