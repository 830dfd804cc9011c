"""Who moves gradients and holds the shards: one file or folder an engine.

``ENGINES`` is the table of contents: to add one is a file here (or a folder, where one would be
long) and a line below.
"""

from __future__ import annotations

from pathlib import Path

from strategies.base import LazyTable
from strategies.engine import Engine
from strategies.launch_file import PIPELINE, LaunchFile, LaunchFileError, read

__all__ = ["ENGINES", "of_file"]

ENGINES = LazyTable(
    {
        "NO": "strategies.engines.alone:Alone",
        "MULTI_CPU": "strategies.engines.replicas:Replicas",
        "MULTI_GPU": "strategies.engines.replicas:Replicas",
        "DEEPSPEED": "strategies.engines.zero.engine:Zero",
        "FSDP": "strategies.engines.fsdp.engine:Fsdp",
    }
)
"""accelerate's distributed type, as a launch file spells it -> the engine. Its module is imported
when a launch file first names it."""


def of_file(path: Path) -> Engine:
    """The engine that the launch file at ``path`` names.

    A file that cannot be used takes away only the strategies that need it: its engine refuses
    every launch, and says why.
    """
    try:
        file = read(path)
        if file.kind not in ENGINES:
            known = ", ".join(sorted(ENGINES))
            raise LaunchFileError(f"{path}: distributed_type is {file.kind!r}; one of {known}")
        return (_pipeline(file) or ENGINES[file.kind]).of(file)
    except LaunchFileError as error:
        from strategies.engines.alone import Broken

        return Broken(LaunchFile(path=path, kind="", title="cannot be used"), str(error))


def _pipeline(file: LaunchFile) -> type[Engine] | None:
    """Return the kind of pipeline that a launch file names beside its distributed type, or None."""
    if PIPELINE not in file.content:
        return None
    from strategies.engines.pipeline.engine import named

    return named(file)
