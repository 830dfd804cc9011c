"""Launch files: accelerate's YAML as it lies in ``launch_configs/``, read and checked.

The file is the one owner of engine, stage, offload and wrapping; Python reads those facts here and
in the engine that the file names, and reads them back from the objects as evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strategies.base import BadInput
from strategies.files import bounded_text, parse_yaml

FOLDER = Path(__file__).resolve().parent.parent / "launch_configs"


PIPELINE = "megatron_lm_config"
"""The block of a launch file that makes its engine a pipeline."""


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


def names(folder: Path = FOLDER) -> list[str]:
    """The sharding strategies that ``folder`` has launch files for; no file is read."""
    return [path.stem for path in sorted(folder.glob("*.yaml")) if "." not in path.stem]


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


# ---- layout ----
# How an engine uses the ranks of a job.


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks are used; the product of all degrees is the number of ranks.

    Samples are divided by ``replicate`` and ``shard`` alone: ranks that differ in the others work
    on the same samples. Ranks are counted as torch's device meshes count them, ``tensor`` fastest,
    then ``sequence``, ``shard``, ``replicate`` and ``pipeline``. Ranks that have parts of the same
    samples share weights as any others do: an engine shards over ``sharers``.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: int = 1
    pipeline: int = 1

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.data * self.tensor * self.sequence * self.pipeline

    @property
    def data(self) -> int:
        """The data-parallel degree: into how many shares a global batch is cut."""
        return self.replicate * self.shard

    @property
    def sharers(self) -> int:
        """Among how many ranks weights are cut, where they are."""
        return self.shard * self.sequence

    def share(self, rank: int) -> int:
        """Which of the ``data`` shares of a global batch ``rank`` works on."""
        return rank // (self.tensor * self.sequence) % self.data

    def part(self, rank: int) -> int:
        """Which of the ``sequence`` parts of its samples ``rank`` works on."""
        return rank // self.tensor % self.sequence

    @property
    def alike(self) -> int:
        """How many ranks hold the same of the weights: those among which gradients are averaged."""
        return self.ranks // (self.tensor * self.pipeline)

    def cut(self, parts: int, degree: str = "sequence") -> Layout:
        """The same ranks, of which so many neighbours have a part each of the same samples, or by
        another ``degree`` of the same weights; as it is where the ranks do not come in such
        groups."""
        name = "shard" if self.shard > 1 else "replicate"
        groups, rest = divmod(getattr(self, name), parts)
        if rest:
            return self
        return replace(self, **{name: groups, degree: getattr(self, degree) * parts})
