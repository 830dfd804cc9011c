"""Arguments of accelerate's launcher for a launch file, without a launch; for predictions."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any


def arguments(file: Path, processes: int) -> tuple[Namespace, Any]:
    """Return the parsed arguments of ``accelerate launch`` for ``processes``, and the file's
    defaults."""
    from accelerate.commands import launch

    words = ["--config_file", str(file), "--num_processes", str(processes)]
    words += ["--main_process_port", "0", "-m", "none"]
    args = launch.launch_command_parser().parse_args(words)
    args, defaults, _ = launch._validate_launch_command(args)
    return args, defaults
