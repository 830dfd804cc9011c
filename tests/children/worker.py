"""A stand-in for the worker: obeys its protocol, or breaks it in one named way.

python -m tests.children.worker MODE FOLDER, from the repository's root.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.json_files import write_json
from harness.result import Result, Status
from harness.spec import Spec

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
RANKS = FOLDER / "ranks"


def status(phase: str, step: int = 0, of: int = 0, peak: int = 1000) -> None:
    facts = {"rank": 0, "pid": os.getpid(), "phase": phase, "step": step, "of": of}
    write_json(RANKS / "rank0.status.json", {**facts, "peak_bytes": peak, "time": time.time()})


def failure(kind: str, message: str, phase: str = "measure", step: int = 3) -> None:
    facts = {"rank": 0, "phase": phase, "step": step, "type": kind, "message": message}
    write_json(RANKS / "rank0.failure.json", {**facts, "traceback": "", "peak_bytes": 7000})


def until_there(name: str) -> None:
    """Wait for a file of this folder: the tests' way to say go on, whatever the machine's load."""
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def good() -> None:
    status("measure", 2, 2)
    Result(status=Status.OK, spec=Spec(recipe="single"), losses=[1.0]).write(FOLDER / "result.json")
    status("done")


def good_once_seen() -> None:
    """A good run whose first step lasts until somebody has seen it."""
    status("measure", 1, 2)
    until_there("seen")
    good()


def good_then_exit_1() -> None:
    good()
    sys.exit(1)


def good_then_hang() -> None:
    good()
    time.sleep(600)


def torn() -> None:
    (FOLDER / "result.json").write_text('{"schema": 1, "sp')


def noisy() -> None:
    """Fails with an error whose text moves the cursor, clears the screen and turns text around."""
    print("10%\r20%\r\x1b[2J\x1b]0;title\x07 fine", flush=True)
    sys.exit("ValueError: \x1b[31mred\x1b[0m \x00 \x1b \u202e turned")


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status("measure", 4, 9, peak=5000)
    (FOLDER / "ready").touch()
    time.sleep(600)


def daemon(env: dict[str, str] | None = None) -> None:
    """A grandchild that forks away twice, in a session of its own, and ignores SIGTERM."""
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(FOLDER / "daemon.pid")], env=env, check=True)
    until_there("daemon.pid")


def bare_daemon() -> None:
    """A daemon with an empty environment."""
    daemon({})


def daemon_and_hang() -> None:
    daemon()
    hang()


def memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    status("load")
    try:
        bytearray(4 << 30)
    except MemoryError as error:
        failure("MemoryError", str(error), "load", 0)
        raise


def cuda_oom() -> None:
    status("warmup", 1, 2, peak=6000)
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
    failure("OutOfMemoryError", message, "warmup", 1)
    print(f"torch.OutOfMemoryError: {message}", file=sys.stderr)
    sys.exit(1)


def fail_and_hang() -> None:
    failure("ValueError", "the loss is nan")
    time.sleep(600)


def hungry() -> None:
    """Takes memory until a limit ends it, and 4 GiB at most."""
    status("measure", 5, 9)
    blocks = [b"x" * (64 << 20) for _ in range(64)]
    failure("RuntimeError", f"no limit came within {len(blocks)} blocks")


def killed_while_recorded() -> None:
    (FOLDER / "snapshot.rank0.pickle").write_bytes(b"x")
    killed()


def killed() -> None:
    status("measure", 5, 9)
    os.kill(os.getpid(), signal.SIGKILL)


def port_taken() -> None:
    tries = FOLDER / "tries"
    count = int(tries.read_text()) + 1 if tries.exists() else 1
    tries.write_text(str(count))
    if count < 3:
        failure(
            "DistNetworkError", "The server socket has failed to listen. EADDRINUSE", "start", 0
        )
        sys.exit(1)
    good()


def shared_memory() -> None:
    """Segments that stay: one held open till seen, one named after the pid, and a swap folder."""
    held = Path(f"/dev/shm/psm_headroom_{os.getpid()}")
    (FOLDER / "nvme").mkdir()
    (FOLDER / "nvme" / "swap").write_bytes(b"x")
    with held.open("wb") as stream:
        stream.write(b"x")
        Path(f"/dev/shm/torch_{os.getpid()}_1_2").write_bytes(b"x")
        (FOLDER / "ready").write_text(json.dumps([str(held), f"/dev/shm/torch_{os.getpid()}_1_2"]))
        until_there("seen")


def shared_memory_and_hang() -> None:
    shared_memory()
    time.sleep(600)


def environment() -> None:
    (FOLDER / "env.json").write_text(json.dumps(dict(os.environ)))
    good()


def compiling() -> None:
    """Leaves files where torch.compile would, and fails if it finds some."""
    caches = [os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")]
    assert not any(map(os.path.exists, caches))
    for cache in caches:
        os.makedirs(os.path.join(cache, "ab"))
    (FOLDER / "caches.json").write_text(json.dumps(caches))
    good()


if __name__ == "__main__":
    globals()[MODE]()
