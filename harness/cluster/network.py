"""The network between nodes: addresses, probes of the head, and measured all-reduces. IPv4.

    python -m harness.cluster.network --rank R --nodes N --head ADDRESS --port P --out FILE

measures one process a node by torch's own backend, because a slow link looks like a slow recipe: at
50 Mbit/s a small step takes 17 times as long. On GPUs the backend is NCCL, which chooses its own
way between the nodes. Host names do not serve: Debian maps a host's own name to 127.0.1.1.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil

from harness.json_files import write_json
from harness.result import Wire
from harness.system import process

CONNECT_SECONDS = 3.0
LARGEST = 1 << 26
SMALL, TIMES = 30, 4
SECONDS = 1.5
"""Time for the large all-reduces: over a slow link fewer bytes are sent."""
GROUP_SECONDS = 60


def interfaces() -> dict[str, str]:
    """Interface -> its IPv4 address, for those that have one; loopback last."""
    found = {
        name: own.address
        for name, addresses in psutil.net_if_addrs().items()
        for own in addresses
        if own.family == socket.AF_INET
    }
    return dict(sorted(found.items(), key=lambda item: item[1].startswith("127.")))


def interface_of(address: str) -> str | None:
    """Return the interface of this machine that has ``address``."""
    return next((name for name, own in interfaces().items() if own == address), None)


def _resolved(host: str) -> str | None:
    """Return the IPv4 address of a name; None without one, or if another name means loopback."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    plain = host == "localhost" or host.startswith("127.")
    return address if plain or not address.startswith("127.") else None


class Door:
    """A port of this machine that the other nodes probe, to see that the machine is there."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("", 0), backlog=128)
        self.listening.setblocking(False)
        self.port: int = self.listening.getsockname()[1]

    def answer(self) -> None:
        """Accept the probes since the last call; to be called now and then."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.listening.accept()[0].close()

    def close(self) -> None:
        self.listening.close()


def reach(hosts: Iterable[str], port: int) -> tuple[str, str] | None:
    """Return the first of ``hosts`` that takes a connection, and this machine's own address."""
    for address in filter(None, map(_resolved, hosts)):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), timeout=CONNECT_SECONDS) as way,
        ):
            return way.getpeername()[0], way.getsockname()[0]
    return None


def answers(address: str, port: int, seconds: float = CONNECT_SECONDS) -> bool:
    """Return whether a machine answers in time, if only by refusing the connection."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # no answer in time, or an interface that is down
        return False
    return True


# ---- measured ----


def main(argv: Sequence[str]) -> int:
    """Entry point: rank 0 writes a ``harness.result.Wire``."""
    import torch.distributed as dist

    process.die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m harness.cluster.network")
    for name in ("rank", "nodes", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(argv)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{options.head}:{options.port}",
        rank=options.rank,
        world_size=options.nodes,
        timeout=datetime.timedelta(seconds=GROUP_SECONDS),
    )
    latency, bandwidth, size = _measured(_timer(options.device), options.device, options.nodes)
    if options.rank == 0:
        found = Wire(backend=backend, latency_seconds=latency, bandwidth=bandwidth, size_bytes=size)
        write_json(options.out, vars(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _measured(timed: Callable[[int], float], device: str, nodes: int) -> tuple[float, float, int]:
    """Seconds of an all-reduce of 8 bytes, bytes a second sent in a large one, and its bytes."""
    import torch
    import torch.distributed as dist

    for _ in range(3):
        timed(8)
    latency = statistics.median(timed(8) for _ in range(SMALL))
    longest = torch.tensor([timed(1 << 20)], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # all nodes take the same size
    size = fitting_size(float(longest))
    seconds = min(timed(size) for _ in range(TIMES))
    return latency, 2 * (nodes - 1) / nodes * size / seconds, size  # a ring


def fitting_size(seconds_of_a_mib: float) -> int:
    """Return a power of two of bytes, 1 MiB to ``LARGEST``, that takes about ``SECONDS``."""
    mib = max(1.0, SECONDS / TIMES / seconds_of_a_mib)
    return min(LARGEST, 1 << (20 + int(mib).bit_length() - 1))


def _timer(device: str) -> Callable[[int], float]:
    """Return a function from bytes to the seconds of one all-reduce, begun together."""
    import torch
    import torch.distributed as dist

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def timed(size: int) -> float:
        data = torch.zeros(size // 4, device=device)
        dist.barrier()
        wait()
        began = time.perf_counter()
        dist.all_reduce(data)
        wait()
        return time.perf_counter() - began

    return timed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
