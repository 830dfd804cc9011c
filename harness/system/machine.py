"""What this machine has. Imports no torch.

``look`` reads the system and asks nvidia-smi: milliseconds. ``examine`` adds what only torch and
DeepSpeed know, from ``harness.system.probe`` in a child process, kept in a cache file that is keyed
by whatever could change the answer. Who uses the GPUs and how much disk is free is always fresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.json_files import BadFile, read_json, write_json
from harness.system import gpus, kernel, tree
from harness.system.gpus import Gpu
from harness.system.probe import PACKAGES, version

__all__ = ["Machine", "examine", "look", "recall"]

PROBE_SECONDS = 1200
"""Compiling three ops takes about two minutes on two free cores, and more on busy ones."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine has. ``probe``: the answer of ``harness.system.probe``; None where it was
    not asked. ``others``: of the other nodes of a run on several, what decides a measurement."""

    cores: int
    memory_bytes: int
    container_bytes: int | None
    gpus: tuple[Gpu, ...]
    disk_free_bytes: int
    folder: Path
    compiler: str | None
    ninja: str | None
    probe: dict[str, Any] | None = field(default=None, repr=False)
    others: tuple[Any, ...] = ()

    @property
    def device(self) -> str:
        """The device that runs use when none is asked for."""
        return "cuda" if self.gpus else "cpu"

    @property
    def blind(self) -> str:
        """Why torch sees none of the GPUs that nvidia-smi does; empty where it sees them, or was
        not asked. Runs would silently be on the CPU."""
        if not self.gpus or self.probe is None or self.probe["gpus"]:
            return ""
        errors = self.probe["errors"]
        asked = (self.probe.get("no_cuda"), errors.get("torch"), errors.get("probe"))
        return next(filter(None, asked), "no reason given")

    @property
    def device_names(self) -> list[str]:
        """One name a GPU, or none."""
        return [gpu.name for gpu in self.gpus]

    @property
    def smallest_gpu_bytes(self) -> int:
        """Memory of the GPU that a run has to fit, without a desktop's; 0 where there is none."""
        return min((gpu.free_bytes for gpu in self.gpus), default=0)

    @property
    def versions(self) -> dict[str, str | None]:
        """Versions of the packages that decide speed and memory."""
        return {name: version(name) for name in PACKAGES}


def look(folder: Path) -> Machine:
    """What can be seen without torch; ``folder`` is where results and swap files go."""
    return Machine(
        cores=kernel.cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        container_bytes=kernel.memory_kills().limit_bytes,
        gpus=gpus.visible(),
        disk_free_bytes=shutil.disk_usage(_existing(folder)).free,
        folder=folder,
        compiler=shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++"),
        ninja=shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent)),
    )


def examine(folder: Path, ops: Iterable[str] = (), *, fresh: bool = False) -> Machine:
    """``look``, and torch's and DeepSpeed's own view; ``ops`` are compiled if they are not yet.

    Returns what is known even where the probe fails: ``probe["errors"]`` then says why.
    """
    machine, wanted = look(folder), set(ops)
    path = _cache_path(machine)
    known = None if fresh else _cached(path, wanted)
    if known is None:
        known = _ask(wanted | _built(path))
        unseen = machine.gpus and not known["gpus"]  # a driver may be mended any time
        limited = known["errors"] and kernel.shell_limit()  # another shell may have none
        if "probe" not in known["errors"] and not unseen and not limited:
            _keep(path, known)
    return replace(machine, probe=known, gpus=_merged(machine.gpus, known["gpus"]))


def recall(folder: Path) -> Machine:
    """``look``, with the probe's answer if a cache has it: never starts a process of torch."""
    machine = look(folder)
    known = _cached(_cache_path(machine), set())
    if known is None:
        return machine
    return replace(machine, probe=known, gpus=_merged(machine.gpus, known["gpus"]))


SLICE = 0.9
"""Of a card: with less of its memory than that, what torch sees is a part of it (MIG)."""


def _merged(seen: tuple[Gpu, ...], known: list[dict[str, Any]]) -> tuple[Gpu, ...]:
    """torch decides which GPUs there are, in which order and how large they are; nvidia-smi adds
    who uses them. Where torch has none those of nvidia-smi stay: ``Machine.blind`` says why."""
    if not known:
        return seen
    return tuple(
        _as_known(place, gpu, _same(place, gpu, seen, len(known)))
        for place, gpu in enumerate(known)
    )


def _same(place: int, gpu: dict[str, Any], seen: tuple[Gpu, ...], count: int) -> Gpu | None:
    """The card of nvidia-smi's that torch calls ``gpu``, one of ``count``: by the identifier that
    both tell, for CUDA may count cards in another order (CUDA_DEVICE_ORDER); else by its place."""
    uuid = gpu.get("uuid", "")
    named = [card for card in seen if uuid and uuid in card.uuid]
    if named:
        return named[0]
    return seen[place] if len(seen) == count else None


def _as_known(place: int, gpu: dict[str, Any], card: Gpu | None) -> Gpu:
    """``card`` with the size that torch reads. nvidia-smi counts 353 to 564 MiB more, which no
    process can allocate, and has no size of a GPU that shares the host's memory (GB10, Jetson).
    If torch sees only a part of the card (MIG), the use of the whole card does not count."""
    size = gpu["total_bytes"]
    if card is not None and size > SLICE * card.total_bytes:
        return replace(card, total_bytes=size)
    return Gpu(index=place, name=gpu["name"], total_bytes=size)


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if p.exists())


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


VARIABLES = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", gpus.ORDER, "CFLAGS", "LDFLAGS")
PACKAGE_FILES = (
    "/var/lib/dpkg/status",
    "/var/lib/rpm/rpmdb.sqlite",
    "/var/lib/rpm",
    "/usr/include",
)
"""Files that change when a system package does: libaio may have come or gone."""


def _cache_path(machine: Machine) -> Path:
    """Keyed by Python, packages, compilers, GPUs and the state of the system's packages."""
    facts = [
        sys.executable,
        platform.python_version(),
        machine.versions,
        [machine.compiler, machine.ninja, shutil.which("nvcc")],
        [os.environ.get(n) for n in VARIABLES],
        machine.device_names,
        _text("/proc/driver/nvidia/version"),
        [os.stat(p).st_mtime_ns for p in PACKAGE_FILES if os.path.exists(p)],
        [_text(str(ROOT / "harness/system" / n)) for n in ("probe.py", "capability.py")],
    ]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"headroom-{os.getuid()}" / f"probe-{key}.json"


def _cached(path: Path, wanted: set[str]) -> dict[str, Any] | None:
    """The answer kept at ``path``, if it covers ``wanted`` and what was built is still there."""
    known = _read(path)
    if known is None:
        return None
    for name, op in known["ops"].items():
        if op["ok"] and name in wanted and not op["built"]:
            return None
        if op["file"] and not os.path.exists(op["file"]):
            return None
    return known


def _built(path: Path) -> set[str]:
    known = _read(path) or {"ops": {}}
    return {name for name, op in known["ops"].items() if op["built"]}


def _read(path: Path) -> dict[str, Any] | None:
    try:
        # The folder is shared: a file that another user put there is not trusted.
        if path.stat().st_uid != os.getuid():
            return None
        known = read_json(path, dict[str, Any])
        return known if isinstance(known.get("ops"), dict) else None
    except (OSError, BadFile):
        return None


def _keep(path: Path, known: dict[str, Any]) -> None:
    # A cache that cannot be kept only costs the next start two seconds.
    with contextlib.suppress(OSError):
        write_json(path, known, durable=False)


def _ask(build: set[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "harness.system.probe", "--build", *sorted(build)]
    empty = {"torch": None, "gpus": [], "backends": [], "bf16": {}, "ops": {}}
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
    try:
        said, errors = child.communicate(timeout=PROBE_SECONDS)
        return json.loads(said.splitlines()[-1])
    except subprocess.TimeoutExpired:
        reason = f"no answer in {PROBE_SECONDS} s (compiling DeepSpeed's ops?)"
    except (ValueError, IndexError):
        last = (errors.strip().splitlines() or ["nothing"])[-1][:200]
        reason = f"exit code {child.returncode}: {last}"
    finally:
        _end(child)
    return {**empty, "errors": {"probe": reason}}


def _end(child: subprocess.Popen[str]) -> None:
    """End the probe and its compilers: an interrupt first, at which torch releases its lock."""
    for sign in (signal.SIGINT, signal.SIGKILL):
        if child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=15)
