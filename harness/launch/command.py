"""Command line and environment of a run, complete enough to start it by hand.

Only this module builds the launched command; ``more`` are further words for the worker.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import CLONE, ROOT
from harness.resolve import Resolved
from harness.system import gpus, machine
from strategies import users_launch

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""glibc settings that return freed blocks at once: resident size follows live tensors."""
GROUP_SECONDS = "HEADROOM_GROUP_SECONDS"
"""Variable with the timeout of a rank's process groups (``group_limit``)."""
AFTER_DEADLINE = 60
"""Seconds from a run's deadline to the timeout of its process groups."""
LONG_DEADLINE = 3600
"""Seconds. Under a longer deadline a hang should end by the groups' own, shorter timeouts."""
# Set in a shell or by an outer launcher, these would silently change how the processes start.
INHERITED = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "OMPI_", "PMI_", "MV2_", "MPI_", "PET_")
INHERITED_NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    "DS_ACCELERATOR",
}
RANK, HEAD, PORT, INTERFACE = "$NODE_RANK", "$HEAD", "$PORT", "$IFNAME"
CONF, LOCAL, MEETING = "$RDZV_CONF", "$ADDRESS", "$RDZV_ID"
"""Words and variables for facts that differ between nodes; ``as_node`` replaces them."""
ASKED = {
    RANK: "${NODE_RANK:?0 on the head, 1 and up on the others}",
    HEAD: "${HEAD:?address of node 0}",
    PORT: "${PORT:-29500}",
    INTERFACE: "${IFNAME:?network interface to the other nodes, as eth0}",
    CONF: "${RDZV_CONF:?is_host=1 on node 0, is_host=0 on the others}",
    LOCAL: "${ADDRESS:?address of this node}",
    MEETING: "${RDZV_ID:-headroom}",
}
"""The same placeholders for a shell, which stops with a message if a variable is missing."""


def command(resolved: Resolved, folder: Path, *, port: int, more: Sequence[str] = ()) -> list[str]:
    """Return the launcher's words, for the repository's root; port 0: accelerate takes any."""
    spec, file = resolved.spec, resolved.launch.engine.file
    meeting = {"main_process_port": str(port)}
    if spec.nodes > 1:
        meeting = {"num_machines": str(spec.nodes), "machine_rank": RANK, "main_process_ip": HEAD}
        # c10d lets only ranks of the same row meet, where the static rendezvous takes any.
        meeting |= {"main_process_port": PORT, "rdzv_backend": "c10d", "rdzv_conf": CONF}
    # The launcher in this interpreter's folder: another environment's would start another torch.
    python = Path(sys.executable)
    launcher = [_relative(python.parent / "accelerate")]
    if not (python.parent / "accelerate").exists():
        launcher = [_relative(python), "-m", "accelerate.commands.accelerate_cli"]
    return [
        *launcher,
        "launch",
        *("--config_file", _relative(file.path if file.own else folder / users_launch.YAML)),
        *("--num_processes", str(spec.processes)),
        *(word for name, value in meeting.items() for word in (f"--{name}", value)),
        *("--log_dir", os.devnull),  # otherwise torchrun leaves an empty folder in /tmp per run
        *resolved.words(_relative(folder)),
        *more,
    ]


def on_loopback(words: Sequence[str]) -> list[str]:
    """Return ``words`` of a single-machine command, run by ``harness.launch.on_loopback``."""
    launcher = [sys.executable, "-m", "harness.launch.on_loopback"]
    return [*launcher, *words[words.index("launch") :]]


def as_node(words: Sequence[str], facts: Mapping[str, str]) -> list[str]:
    """Return ``words`` of a command with one node's ``facts`` in place of ``RANK`` and the like."""
    return [facts.get(word, word) for word in words]


def environment(resolved: Resolved) -> dict[str, str]:
    """Return the variables that a run adds to the shell's; the threads are for a node as this."""
    spec = resolved.spec
    threads = max(1, machine.cores() // spec.local_processes)
    added = {
        # torchrun's default is one thread per process, which makes a CPU Adam very slow.
        "OMP_NUM_THREADS": str(threads),
        # The processes of one machine need no name service and no network.
        "GLOO_SOCKET_IFNAME": "lo" if spec.nodes == 1 else INTERFACE,
        **({"HF_HUB_OFFLINE": "1"} if resolved.offline else {}),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if spec.nodes > 1:  # options of torchrun that accelerate launch lacks
        added |= {"PET_RDZV_ID": MEETING, "PET_LOCAL_ADDR": LOCAL}
    on_cpu, on_gpu = {"CUDA_VISIBLE_DEVICES": "", **ALLOCATOR}, {gpus.ORDER: gpus.order()}
    added |= on_cpu if spec.device == "cpu" else on_gpu
    # The engine's variables override these, because its library may need another value.
    return added | resolved.launch.engine.environment(spec.device)


def display(resolved: Resolved, folder: Path, more: Sequence[str] = ()) -> str:
    """Return the line to paste into a shell at the repository's root, on each of several nodes."""
    added = [f"{key}={ASKED.get(value, value)}" for key, value in environment(resolved).items()]
    words = ["env", *added, *as_node(command(resolved, folder, port=0, more=more), ASKED)]
    for place, word in enumerate(words):
        # Within double quotes the shell expands a placeholder.
        asks = any(asked in word for asked in ASKED.values())
        words[place] = f'"{word}"' if asks else shlex.quote(word)
    return " ".join(words)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def inherited() -> dict[str, str]:
    """Return the shell's environment without the variables that decide how processes start."""
    names = [n for n in os.environ if n not in INHERITED_NAMES and not n.startswith(INHERITED)]
    return {name: os.environ[name] for name in names} | {gpus.ORDER: gpus.order()}


def group_seconds(deadline: float | None) -> float | None:
    """Return the seconds of the process groups' timeout, behind a short deadline; else None."""
    if deadline is None or deadline > LONG_DEADLINE:
        return None
    return deadline + AFTER_DEADLINE


def group_limit(deadline: float | None) -> dict[str, str]:
    """Return ``group_seconds`` as a variable for the ranks, which apply it (``worker.setup``)."""
    seconds = group_seconds(deadline)
    return {} if seconds is None else {GROUP_SECONDS: str(seconds)}


def _relative(path: Path) -> str:
    """Return ``path`` relative to the repository's root if it is inside a clone, else in full."""
    path = Path(os.path.abspath(path))
    return str(path.relative_to(ROOT)) if CLONE and path.is_relative_to(ROOT) else str(path)


# ---- recordings ----
# ``harness.worker.loop`` writes these files.


PROFILE = "profile"
"""Folder below the run's for a profiler's traces."""
HISTORY = "snapshot.rank{}.pickle"


def history_file(folder: Path, rank: int | str) -> Path:
    return folder / HISTORY.format(rank)


def left_in(folder: Path) -> list[str]:
    """Return the files for other tools below a run's ``folder``, relative to it."""
    paths = [*folder.glob(f"{PROFILE}/*.json*"), *folder.glob(HISTORY.format("*"))]
    return sorted(str(path.relative_to(folder)) for path in paths)
