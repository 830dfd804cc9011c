"""The command line of a run and the environment it adds: all it takes to start it by hand."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from harness import kernel
from harness.resolve import project_root
from harness.spec import Spec
from strategies import parse

__all__ = ["command", "display", "environment", "free_port", "inherited"]

# Set in a shell or by an outer launcher, these would silently change how the processes start.
INHERITED = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "OMPI_", "PMI_", "MV2_", "MPI_")
INHERITED_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "DS_ACCELERATOR",
}


def command(spec: Spec, folder: Path, *, port: int) -> list[str]:
    """The launcher's words, for the repository's root; port 0 lets accelerate choose a free one.

    Raises:
        ValueError: the recipe is none.
    """
    file = _sharding(spec).path(spec.device)
    return [
        *_accelerate(),
        "launch",
        *("--config_file", _relative(file)),
        *("--num_processes", str(spec.processes)),
        *("--main_process_port", str(port)),
        *("-m", "harness.train"),
        *spec.arguments(),
        *("--out", _relative(folder)),
    ]


def environment(spec: Spec) -> dict[str, str]:
    """The variables that a run adds to the shell's."""
    threads = max(1, kernel.cores() // spec.processes)
    added = {
        # torchrun would give each process one thread, and a CPU Adam would crawl.
        "OMP_NUM_THREADS": str(threads),
        # The processes of one machine need no name service and no network.
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.device != "cpu":
        return added
    added |= {
        "CUDA_VISIBLE_DEVICES": "",
        # Freed memory goes back at once, so that resident size follows live tensors.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "131072",
    }
    if _sharding(spec).launch(spec.device, spec.processes).engine == "DEEPSPEED":
        return {**added, "DS_ACCELERATOR": "cpu"}
    # torchrun's launch does not pass on the file's use_cpu; under DeepSpeed it must stay unset,
    # for accelerate would silently train DDP.
    return {**added, "ACCELERATE_USE_CPU": "true"}


def display(spec: Spec, folder: Path) -> str:
    """The line that can be pasted into a shell at the repository's root, and runs by itself."""
    added = [f"{key}={value}" for key, value in environment(spec).items()]
    return shlex.join(["env", *added, *command(spec, folder, port=0)])


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def inherited() -> dict[str, str]:
    """The shell's variables, without those that decide how processes start."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in INHERITED_NAMES and not key.startswith(INHERITED)
    }


def _sharding(spec: Spec) -> Any:
    return parse(spec.recipe, ema=spec.ema > 0).sharding


def _accelerate() -> list[str]:
    """The launcher beside this interpreter: another environment's would start another torch."""
    beside = Path(sys.executable).parent / "accelerate"
    if beside.exists():
        return [_relative(beside)]
    return [_relative(Path(sys.executable)), "-m", "accelerate.commands.accelerate_cli"]


def _relative(path: Path) -> str:
    """``path`` from the repository's root where it lies inside it, else in full."""
    path = Path(os.path.abspath(path))
    root = project_root()
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
