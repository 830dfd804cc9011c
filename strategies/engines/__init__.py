"""Engines: the libraries that move gradients and shard state, one file or folder for each.

``ENGINES`` lists them. To add one, add a file or folder and a line in the table.
"""

from __future__ import annotations

from pathlib import Path

from strategies import users_launch
from strategies.base import LazyTable
from strategies.engine import Engine
from strategies.launch_file import PIPELINE, LaunchFile, LaunchFileError, read

__all__ = ["ENGINES", "of_file", "of_users_file"]

ENGINES = LazyTable(
    {
        "NO": "strategies.engines.replicas:Alone",
        "MULTI_CPU": "strategies.engines.replicas:Replicas",
        "MULTI_GPU": "strategies.engines.replicas:Replicas",
        "DEEPSPEED": "strategies.engines.zero.engine:Zero",
        "FSDP": "strategies.engines.fsdp.engine:Fsdp",
    }
)
"""accelerate's distributed type in a launch file -> engine. A look-up imports the engine's
module."""


def of_file(path: Path) -> Engine:
    """Return the engine that the launch file at ``path`` names.

    An unusable file disables only the strategies that need it: its engine refuses every launch with
    the reason.
    """
    try:
        return _of(read(path))
    except LaunchFileError as error:
        from strategies.engines.replicas import Broken

        return Broken(LaunchFile(path=path, kind="", title="cannot be used"), str(error))


def of_users_file(path: Path) -> Engine:
    """Return the engine of a user's launch file.

    Raises:
        LaunchFileError: its library refuses it, or no engine runs it; names the keys.
    """
    return _of(users_launch.read(path)[0])


def _of(file: LaunchFile) -> Engine:
    if file.kind not in ENGINES:
        known = ", ".join(sorted(ENGINES))
        raise LaunchFileError(f"{file.path}: distributed_type is {file.kind!r}; one of {known}")
    kind: type[Engine] = ENGINES[file.kind]
    if file.own and PIPELINE in file.content:
        from strategies.engines.pipeline.engine import Pipeline, in_file

        kind = Pipeline if in_file(file) else kind
    return kind.of(file)
