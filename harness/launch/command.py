"""The command line of a run and the environment it adds: all it takes to start it by hand.

The one place where the launched command is made: whoever starts a worker with more words than a
spec has (a portrait, a training, a trial) gives them as ``more``.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import ROOT
from harness.resolve import Resolved
from harness.system import gpus, machine

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc's: freed blocks from that size on go back to the kernel at once, so that resident size
follows live tensors."""
GROUP_SECONDS = "HEADROOM_GROUP_SECONDS"
"""The variable with the timeout of a rank's process groups (``group_limit``)."""
AFTER_DEADLINE = 60
"""Seconds from a run's deadline to the timeout of its process groups."""
LONG_DEADLINE = 3600
"""Seconds: under a longer deadline a hang should end by the groups' own, shorter timeouts."""
# Set in a shell or by an outer launcher, these would silently change how the processes start.
INHERITED = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "OMPI_", "PMI_", "MV2_", "MPI_", "PET_")
INHERITED_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "DS_ACCELERATOR",
}
RANK, HEAD, PORT, INTERFACE = "$NODE_RANK", "$HEAD", "$PORT", "$IFNAME"
"""What differs from node to node, or is known only once they have met: whole words of the command
and values of the environment (``as_node`` puts the facts in their places)."""
ASKED = {
    RANK: "${NODE_RANK:?0 on the head, 1 and up on the others}",
    HEAD: "${HEAD:?address of node 0}",
    PORT: "${PORT:-29500}",
    INTERFACE: "${IFNAME:?network interface to the other nodes, as eth0}",
}
"""The same words for a shell, which asks for those that it does not know."""


def command(resolved: Resolved, folder: Path, *, port: int, more: Sequence[str] = ()) -> list[str]:
    """The launcher's words, for the repository's root; port 0 lets accelerate choose a free one."""
    spec, file = resolved.spec, resolved.launch.engine.file
    return [
        *_accelerate(),
        "launch",
        *("--config_file", _relative(file.path)),
        *("--num_processes", str(spec.processes)),
        *_of_nodes(spec.nodes, port),
        *("--log_dir", os.devnull),  # else torchrun leaves an empty folder in /tmp, run by run
        *("-m", "harness.train"),
        *spec.arguments(),
        *("--out", _relative(folder)),
        *more,
    ]


def on_loopback(words: Sequence[str]) -> list[str]:
    """``words`` of a command of one machine, by ``harness.launch.on_loopback``."""
    launcher = [sys.executable, "-m", "harness.launch.on_loopback"]
    return [*launcher, *words[words.index("launch") :]]


def _of_nodes(nodes: int, port: int) -> list[str]:
    if nodes == 1:
        return ["--main_process_port", str(port)]
    flags = {"num_machines": str(nodes), "machine_rank": RANK, "main_process_ip": HEAD}
    flags["main_process_port"] = PORT
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def as_node(words: Sequence[str], facts: Mapping[str, str]) -> list[str]:
    """``words`` of a command with one node's ``facts`` (``RANK`` and the like) in their places."""
    return [facts.get(word, word) for word in words]


def environment(resolved: Resolved) -> dict[str, str]:
    """The variables that a run adds to the shell's, threads for a node like this one."""
    spec = resolved.spec
    threads = max(1, machine.cores() // spec.local_processes)
    added = {
        # torchrun would give each process one thread, and a CPU Adam would crawl.
        "OMP_NUM_THREADS": str(threads),
        # The processes of one machine need no name service and no network.
        "GLOO_SOCKET_IFNAME": "lo" if spec.nodes == 1 else INTERFACE,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    on_cpu, on_gpu = {"CUDA_VISIBLE_DEVICES": "", **ALLOCATOR}, {gpus.ORDER: gpus.order()}
    added |= on_cpu if spec.device == "cpu" else on_gpu
    # The engine's own win: its library may need a variable otherwise.
    return added | resolved.launch.engine.environment(spec.device)


def display(resolved: Resolved, folder: Path, more: Sequence[str] = ()) -> str:
    """The line that can be pasted into a shell at the repository's root, and runs by itself; of
    several nodes, into one on each, which asks for the variables that it lacks."""
    added = [f"{key}={ASKED.get(value, value)}" for key, value in environment(resolved).items()]
    words = ["env", *added, *as_node(command(resolved, folder, port=0, more=more), ASKED)]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word for a shell; one that asks is left open to it, within double quotes."""
    asks = any(asked in word for asked in ASKED.values())
    return f'"{word}"' if asks else shlex.quote(word)


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def inherited() -> dict[str, str]:
    """The environment that every child process starts with: the shell's variables without those
    that decide how processes start. CUDA counts cards as nvidia-smi does, in every child alike."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in INHERITED_NAMES and not key.startswith(INHERITED)
    }
    return kept | {gpus.ORDER: gpus.order()}


def group_seconds(deadline: float | None) -> float | None:
    """Timeout of the process groups under a run's ``deadline``, both in seconds: later, so that the
    deadline certainly comes first. None where the groups keep their libraries' own."""
    behind = deadline is not None and deadline <= LONG_DEADLINE
    return deadline + AFTER_DEADLINE if behind else None


def group_limit(deadline: float | None) -> dict[str, str]:
    """``group_seconds`` as a variable for the ranks, which set it (``worker.setup``)."""
    seconds = group_seconds(deadline)
    return {} if seconds is None else {GROUP_SECONDS: str(seconds)}


def _accelerate() -> list[str]:
    """The launcher beside this interpreter: another environment's would start another torch."""
    beside = Path(sys.executable).parent / "accelerate"
    if beside.exists():
        return [_relative(beside)]
    return [_relative(Path(sys.executable)), "-m", "accelerate.commands.accelerate_cli"]


def _relative(path: Path) -> str:
    """``path`` from the repository's root where it lies inside it, else in full."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


# ---- recordings ----
# Where a recorded run leaves its files (``harness.worker.loop`` writes them), and which ones.


PROFILE = "profile"
"""The folder, below the run's, of a profiler's traces."""
HISTORY = "snapshot.rank{}.pickle"


def history_file(folder: Path, rank: int | str) -> Path:
    """The allocator's history of ``rank``."""
    return folder / HISTORY.format(rank)


def left_in(folder: Path) -> list[str]:
    """Files for other tools below a run's ``folder``, relative to it."""
    paths = [*folder.glob(f"{PROFILE}/*.json*"), *folder.glob(HISTORY.format("*"))]
    return sorted(str(path.relative_to(folder)) for path in paths)
