"""accelerate's launcher without a launch: what it makes of a launch file, for predictions."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any


def arguments(file: Path, processes: int) -> tuple[Namespace, Any]:
    """The arguments of ``accelerate launch`` for so many processes, and its defaults, both as it
    reads them in ``file``."""
    from accelerate.commands import launch

    words = ["--config_file", str(file), "--num_processes", str(processes)]
    words += ["--main_process_port", "0", "-m", "none"]
    args = launch.launch_command_parser().parse_args(words)
    args, defaults, _ = launch._validate_launch_command(args)
    return args, defaults
