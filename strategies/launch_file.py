"""Launch files: accelerate's YAML as it lies in ``launch_configs/``, read and checked.

The file is the one owner of engine, stage, offload and wrapping; Python reads those facts here and
in the engine that the file names, and reads them back from the objects as evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strategies.base import BadInput
from strategies.files import bounded_text, parse_yaml

__all__ = ["FOLDER", "LaunchFile", "LaunchFileError", "read", "text_of"]

FOLDER = Path(__file__).resolve().parent.parent / "launch_configs"


class LaunchFileError(BadInput):
    """A launch file that cannot be read or lacks a fact: names the file and the way out."""


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """What a launch file says.

    ``kind`` is accelerate's distributed type, which names the engine; ``settings`` is the content
    of the engine's own file, where the YAML names one.
    """

    path: Path
    kind: str
    title: str = ""
    source: str = ""
    content: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> LaunchFile:
    """Read an accelerate YAML; whether there is an engine of its kind is not asked here.

    Raises:
        LaunchFileError: missing, not YAML, or without the distributed type that it must name.
    """
    text = text_of(path)
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise LaunchFileError(f"{path}: {error}") from None
    kind = content.get("distributed_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise LaunchFileError(f"{path}: distributed_type is {kind!r}; name an engine, in quotes")
    comments = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    return LaunchFile(
        path=path,
        kind=kind,
        title=comments[0] if comments else path.stem,
        source=comments[1].removeprefix("Source: ") if len(comments) > 1 else "",
        content=content,
    )


def text_of(path: Path) -> str:
    """The text of a launch file, or of one that it names.

    Raises:
        LaunchFileError: it cannot be read.
    """
    try:
        return bounded_text(path)
    except (OSError, ValueError) as error:
        raise LaunchFileError(f"{path}: unreadable launch file ({error})") from None
