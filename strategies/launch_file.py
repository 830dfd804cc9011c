"""Accelerate's YAML launch files in ``launch_configs/``, and the layout of ranks.

The launch file alone sets engine, stage, offload and wrapping. Python reads these facts here and in
the engine that the file names, and reads them back from the objects as evidence.
"""

from __future__ import annotations

import copy
import functools
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strategies.base import BadInput
from strategies.files import LARGEST_CONFIG, parse_yaml, read_foreign

_HERE = Path(__file__).resolve().parent
FOLDER = _HERE / "launch_configs"  # an installed package has them here, a clone at its root
if not FOLDER.is_dir():
    FOLDER = _HERE.parent / "launch_configs"


PIPELINE = "megatron_lm_config"
"""Launch file block that makes its engine a pipeline."""


class LaunchFileError(BadInput):
    """Launch file that is unreadable or lacks a fact; the message names the file and the remedy."""


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """Contents of a launch file.

    ``kind``: accelerate's distributed type. ``settings``: the content of the engine's own file, if
    the YAML names one. ``own``: of ``FOLDER``, no user's (``strategies.users_launch``).
    """

    path: Path
    kind: str
    title: str = ""
    source: str = ""
    content: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    own: bool = True


def names(folder: Path = FOLDER) -> list[str]:
    """Return the names of the launch files in ``folder``, without reading them."""
    return [path.stem for path in sorted(folder.glob("*.yaml")) if "." not in path.stem]


def read(path: Path) -> LaunchFile:
    """Read an accelerate YAML. The function does not check that an engine of its kind exists.

    Raises:
        LaunchFileError: missing, not YAML, or without the required distributed type.
    """
    text = text_of(path)
    try:
        content = copy.deepcopy(_parsed(text))
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


_parsed = functools.lru_cache(parse_yaml)  # a plan reads each launch file hundreds of times


def text_of(path: Path) -> str:
    """Return the text of a launch file, or of a file that it names.

    Raises:
        LaunchFileError: it cannot be read.
    """
    try:
        return read_foreign(path, LARGEST_CONFIG)
    except (OSError, ValueError) as error:
        raise LaunchFileError(f"{path}: unreadable launch file ({error})") from None


# ---- rank layout ----


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism of a job; their product is the number of ranks.

    Only ``replicate`` and ``shard`` divide samples: ranks that differ in other degrees work on the
    same ones. Ranks are numbered as in torch's device meshes: ``tensor`` fastest, then
    ``sequence``, ``shard``, ``replicate`` and ``pipeline`` (accelerate 1.15,
    parallelism_config.py, ``mesh_order``).
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Number of processes of the job."""
        return self.data * self.tensor * self.sequence * self.pipeline

    @property
    def data(self) -> int:
        """Data-parallel degree: the number of shares of a global batch."""
        return self.replicate * self.shard

    @property
    def sharers(self) -> int:
        """Number of ranks over which sharded weights are cut."""
        return self.shard * self.sequence

    def share(self, rank: int) -> int:
        """Return the index of the share of a global batch that ``rank`` works on, of ``data``."""
        return rank // (self.tensor * self.sequence) % self.data

    def part(self, rank: int) -> int:
        """Return the index of the part of its samples that ``rank`` works on, of ``sequence``."""
        return rank // self.tensor % self.sequence

    def divided(self, sequence: int = 1, tensor: int = 1) -> Layout:
        """Return a layout in which groups of ``sequence`` ranks split the same samples, and groups
        of ``tensor`` neighbors the same weights; unchanged if the ranks do not divide so."""
        name = "shard" if self.shard > 1 else "replicate"
        groups, rest = divmod(getattr(self, name), sequence * tensor)
        return self if rest else replace(self, **{name: groups}, sequence=sequence, tensor=tensor)


def absolute_files() -> None:
    """Make the name of DeepSpeed's file absolute in the environment that accelerate launch set."""
    name = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    if name in os.environ:
        os.environ[name] = str(FOLDER.parent / os.environ[name])
