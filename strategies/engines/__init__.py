"""Who moves gradients and holds the shards: one file or folder an engine.

``ENGINES`` is the table of contents: to add one is a file here (or a folder, where one would be
long) and a line below.
"""

from __future__ import annotations

from pathlib import Path

from strategies.engine import Engine
from strategies.engines.alone import Alone, Broken
from strategies.engines.fsdp.engine import Fsdp
from strategies.engines.pipeline import engine as pipeline
from strategies.engines.replicas import Replicas
from strategies.engines.zero.engine import Zero
from strategies.launch_file import LaunchFile, LaunchFileError, read

__all__ = ["ENGINES", "of_file"]

ENGINES: dict[str, type[Engine]] = {
    kind: engine for engine in (Alone, Replicas, Zero, Fsdp) for kind in engine.kinds
}
"""accelerate's distributed type, as a launch file spells it -> the engine."""


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
        named = pipeline.named(file) or ENGINES[file.kind]
        return named.of(file)
    except LaunchFileError as error:
        return Broken(LaunchFile(path=path, kind="", title="cannot be used"), str(error))
