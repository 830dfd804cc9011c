"""Facts about this machine: memory, cores, GPUs, packages, and kernel counters. Imports no torch.

``look`` reads the system and runs nvidia-smi, in milliseconds. ``examine`` adds torch's and
DeepSpeed's facts from ``harness.system.probe`` in a child process, and caches them under a key of
everything that could change them. Use of the GPUs and free disk space are always read anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from harness import ROOT
from harness.json_files import BadFile, read_json, write_json
from harness.system import gpus, tree
from harness.system.gpus import Gpu
from harness.system.probe import PACKAGES, version

# ---- kernel counters ----
# A process that the kernel kills for memory leaves no message. These counters, read before and
# after a run, are the only proof. Linux, control groups of version 2 and 1.

GROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # version 1 encodes "no limit" as a number near 2^63


@dataclass(frozen=True)
class MemoryKills:
    """Kills for memory since boot on the ``machine`` and in this control ``group``.

    ``limit_bytes`` is the memory limit of the group (the container's); None without one.
    """

    machine: int = 0
    group: int = 0
    limit_bytes: int | None = None

    def since(self, before: MemoryKills) -> MemoryKills:
        return MemoryKills(
            self.machine - before.machine, self.group - before.group, self.limit_bytes
        )


def memory_kills(proc: Path = Path("/proc"), groups: Path = GROUPS) -> MemoryKills:
    """Read the counters, and the tightest limit; a missing counter counts as 0."""
    lines = [line.split(":", 2) for line in _read_text(proc / "self" / "cgroup").splitlines()]
    own = next((path for _, kinds, path in lines if "memory" in kinds.split(",")), None)
    if own is not None:  # version 1
        root, kills, limit = groups / "memory", "memory.oom_control", "memory.limit_in_bytes"
    else:
        own = next((path for _, kinds, path in lines if not kinds), "")
        root, kills, limit = groups, "memory.events", "memory.max"
    # Inside a container the path is often the host's, and the group is mounted at the root.
    group = root / own.strip("/")
    group = group if group.is_dir() else root
    above = [group, *group.parents]
    words = [_read_text(folder / limit).strip() for folder in above[: above.index(root) + 1]]
    limits = [int(word) for word in words if word.isdigit() and int(word) < UNLIMITED]
    texts = (_read_text(proc / "vmstat"), _read_text(group / kills))
    found = (re.search(r"^oom_kill (\d+)$", text, re.MULTILINE) for text in texts)
    machine, inside = (int(one[1]) if one else 0 for one in found)
    return MemoryKills(machine, inside, min(limits, default=None))


def shell_limit() -> tuple[str, int] | None:
    """Return the command and the bytes of a shell limit on this process's memory, or None."""
    import resource

    kinds = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}
    found = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    known = ((name, size) for name, size in found.items() if size != resource.RLIM_INFINITY)
    return next(known, None)


def cores(groups: Path = GROUPS) -> int:
    """Return the number of cores that this process may use: by affinity and the quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _read_text(groups / "cpu.max").strip().partition(" ")
    if not period:
        quota = _read_text(groups / "cpu" / "cpu.cfs_quota_us").strip()
        period = _read_text(groups / "cpu" / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit():
        return max(1, min(allowed, int(quota) // int(period)))
    return allowed


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def cpu_name() -> str:
    found = re.search(r"^model name.*?:(.*)$", _read_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


PROBE_SECONDS = 1200
"""Seconds. Compiling three ops takes about two minutes on two free cores, and more on busy ones."""
POLL_SECONDS = 2.0
"""Seconds between two looks at what the probe waits for."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine's facts; ``probe`` is the answer of ``harness.system.probe``, or None."""

    cores: int
    memory_bytes: int
    container_bytes: int | None
    gpus: tuple[Gpu, ...]
    disk_free_bytes: int
    folder: Path
    compiler: str | None
    ninja: str | None
    probe: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def device(self) -> str:
        """Return the default device of runs."""
        return "cuda" if self.gpus else "cpu"

    @property
    def blind(self) -> str:
        """Return why torch sees none of the GPUs that nvidia-smi sees; empty if it sees them.

        Runs would silently use the CPU.
        """
        if not self.gpus or self.probe is None or self.probe["gpus"]:
            return ""
        errors = self.probe["errors"]
        known = self.probe.get("no_cuda") or errors.get("torch") or errors.get("probe")
        return known or "no reason given"

    @property
    def smallest_gpu_bytes(self) -> int:
        """Return the least memory that a run can use of a GPU; 0 without GPUs."""
        return min((gpu.free_bytes for gpu in self.gpus), default=0)

    @property
    def versions(self) -> dict[str, str | None]:
        """Return the versions of the packages that affect speed and memory."""
        return {name: version(name) for name in PACKAGES}


def look(folder: Path) -> Machine:
    """Return the facts available without torch; ``folder`` is for results and swap files."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    return Machine(
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        container_bytes=memory_kills().limit_bytes,
        gpus=gpus.visible(),
        disk_free_bytes=shutil.disk_usage(there).free,
        folder=folder,
        compiler=shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++"),
        ninja=shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent)),
    )


def examine(
    folder: Path,
    ops: Iterable[str] = (),
    *,
    on_wait: Callable[[str], None] = lambda words: None,
) -> Machine:
    """Return ``look`` with torch's and DeepSpeed's facts; compile missing ``ops``.

    If the probe fails, ``probe["errors"]`` has the reason. ``on_wait`` receives what it waits for.
    """
    machine, wanted = look(folder), set(ops)
    path = _cache_path(machine)
    known = _cached(path, wanted)
    if known is None:
        built = {name for name, op in (_read(path) or {"ops": {}})["ops"].items() if op["built"]}
        known = _ask(wanted | built, on_wait)
        unseen = machine.gpus and not known["gpus"]  # a driver may be repaired at any time
        limited = known["errors"] and shell_limit()  # another shell may have none
        # The compiler that this probe waited for was ended: the next probe compiles the op.
        missing = f"{tree.extensions_folder()}/"
        ended = any(missing in str(op.get("reason")) for op in known["ops"].values())
        if "probe" not in known["errors"] and not unseen and not limited and not ended:
            # Without a cache the next start only takes two seconds more.
            with contextlib.suppress(OSError):
                write_json(path, known, durable=False)
    return replace(machine, probe=known, gpus=_merged(machine.gpus, known["gpus"]))


def recall(folder: Path) -> Machine:
    """Return ``look`` with the probe's cached answer, if there is one. Starts no torch process."""
    machine = look(folder)
    known = _cached(_cache_path(machine), set())
    merged = _merged(machine.gpus, known["gpus"] if known else [])
    return replace(machine, probe=known, gpus=merged)


SLICE = 0.9
"""Share of a GPU's memory. If torch sees less, it sees a part of the GPU (MIG)."""


def _merged(seen: tuple[Gpu, ...], known: list[dict[str, Any]]) -> tuple[Gpu, ...]:
    """Merge torch's and nvidia-smi's GPUs.

    torch decides which exist, their order and their size; nvidia-smi adds their users. If torch has
    none, those of nvidia-smi stay: ``Machine.blind`` has the reason.
    """
    merged = []
    for place, gpu in enumerate(known):
        size, uuid = gpu["total_bytes"], gpu.get("uuid", "")
        # By the identifier that both report, since CUDA may number GPUs in another order
        # (CUDA_DEVICE_ORDER); else by their index.
        same = [card for card in seen if uuid and uuid in card.uuid]
        same = same or [card for card in seen[place : place + 1] if len(seen) == len(known)]
        # torch's size: nvidia-smi reports 353 to 564 MiB more, which no process can allocate, and
        # none for a GPU that shares the host's memory (GB10, Jetson). If torch sees a part of the
        # GPU (MIG), the use of the whole does not count.
        if same and size > SLICE * same[0].total_bytes:
            merged.append(replace(same[0], total_bytes=size))
        else:
            merged.append(Gpu(index=place, name=gpu["name"], total_bytes=size))
    return tuple(merged) or seen


VARIABLES = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", gpus.ORDER, "CFLAGS", "LDFLAGS")
PACKAGE_FILES = (
    "/var/lib/dpkg/status",
    "/var/lib/rpm/rpmdb.sqlite",
    "/var/lib/rpm",
    "/usr/include",
)
"""Files that change with a system package: libaio may be installed or removed."""


def _cache_path(machine: Machine) -> Path:
    """Return the cache file, keyed by Python, packages, compilers, GPUs and system packages."""
    facts = [
        sys.executable,
        platform.python_version(),
        machine.versions,
        [machine.compiler, machine.ninja, shutil.which("nvcc")],
        [os.environ.get(n) for n in VARIABLES],
        [gpu.name for gpu in machine.gpus],
        _read_text(Path("/proc/driver/nvidia/version")),
        [os.stat(p).st_mtime_ns for p in PACKAGE_FILES if os.path.exists(p)],
        [_read_text(ROOT / "harness/system" / n) for n in ("probe.py", "capability.py")],
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"headroom-{os.getuid()}" / f"probe-{key}.json"


def _cached(path: Path, wanted: set[str]) -> dict[str, Any] | None:
    """Return the stored answer, if ``wanted`` ops are built and no built file is gone."""
    known = _read(path)
    for name, op in (known or {"ops": {}})["ops"].items():
        unbuilt = op["ok"] and name in wanted and not op["built"]
        if unbuilt or (op["file"] and not os.path.exists(op["file"])):
            return None
    return known


def _read(path: Path) -> dict[str, Any] | None:
    """Return the answer stored at ``path``; a file of another user is not trusted."""
    with contextlib.suppress(OSError, BadFile):
        known = read_json(path, dict[str, Any]) if path.stat().st_uid == os.getuid() else {}
        return known if isinstance(known.get("ops"), dict) else None
    return None


def _ask(build: set[str], on_wait: Callable[[str], None]) -> dict[str, Any]:
    command = [sys.executable, "-m", "harness.system.probe", "--build", *sorted(build)]
    empty: dict[str, Any] = {"torch": None, "gpus": [], "backends": [], "ops": {}}
    tree.free_stale_locks()
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, gpus.ORDER: gpus.order()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PROBE_SECONDS
    reason = f"no answer in {PROBE_SECONDS} s (compiling DeepSpeed's ops?)"
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                said, errors = child.communicate(timeout=POLL_SECONDS)
                return json.loads(said.splitlines()[-1])
            on_wait(tree.awaited() or "loading torch and DeepSpeed")
    except (ValueError, IndexError):
        last = (errors.strip().splitlines() or ["nothing"])[-1][:200]
        reason = f"exit code {child.returncode}: {last}"
    finally:
        # Its compilers too; first by an interrupt, at which torch releases its lock.
        for sign in (signal.SIGINT, signal.SIGKILL):
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, sign)
                    child.communicate(timeout=15)
    return {**empty, "errors": {"probe": reason}}


def busy_now() -> float:
    """Return the core-seconds since boot in which this process's cores ran any process.

    Steal counts: time that a hypervisor gave to other machines. 0 if the kernel reports none.
    """
    allowed = os.sched_getaffinity(0)
    try:
        times = psutil.cpu_times(percpu=True)
    except OSError:
        return 0.0
    names = ("user", "nice", "system", "irq", "softirq", "steal")
    mine = (one for core, one in enumerate(times) if core in allowed)
    return sum(getattr(one, name, 0.0) for one in mine for name in names)
