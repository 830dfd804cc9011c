"""Addresses and interfaces of this machine, and whether another answers. IPv4, standard library.

A host's own name is no use: Debian maps it to 127.0.1.1. What counts is the address that the other
nodes reach, and the interface by which the kernel goes there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import selectors
import socket
import struct
import time
from collections.abc import Iterable

__all__ = ["Door", "answers", "interface_of", "interfaces", "reach", "resolved"]

SIOCGIFADDR = 0x8915
CONNECT_SECONDS = 3.0


def interfaces() -> dict[str, str]:
    """Interface -> its IPv4 address, for those that have one; loopback last."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(
                    fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)[20:24]
                )
    return dict(sorted(found.items(), key=lambda item: item[1].startswith("127.")))


def interface_of(address: str) -> str | None:
    """The interface of this machine that has ``address``."""
    return next((name for name, own in interfaces().items() if own == address), None)


def resolved(host: str) -> str | None:
    """The IPv4 address that a name stands for; None where there is none, or it is loopback's
    though the name is not."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    plain = host == "localhost" or host.startswith("127.")
    return address if plain or not address.startswith("127.") else None


class Door:
    """A port of this machine at which the other nodes may knock, to see that it is there."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("", 0), backlog=128)
        self.listening.setblocking(False)
        self.port: int = self.listening.getsockname()[1]

    def answer(self) -> None:
        """Take in who knocked since the last call; to be called now and then."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.listening.accept()[0].close()

    def close(self) -> None:
        self.listening.close()


def reach(
    hosts: Iterable[str], port: int, seconds: float = CONNECT_SECONDS
) -> tuple[str, str] | None:
    """(the first address of ``hosts`` that takes a connection, this machine's own on the way
    there); None where none does."""
    for address in filter(None, map(resolved, hosts)):
        with (
            contextlib.suppress(OSError),
            socket.create_connection((address, port), timeout=seconds) as way,
        ):
            return way.getpeername()[0], way.getsockname()[0]
    return None


def answers(address: str, port: int, seconds: float = CONNECT_SECONDS) -> bool:
    """Whether a machine takes a connection within so many seconds. A refusal counts: it is there,
    and only its supervisor has ended."""
    deadline = time.monotonic() + seconds
    with socket.socket() as way, selectors.DefaultSelector() as ready:
        way.setblocking(False)
        error = way.connect_ex((address, port))
        if error == errno.EINPROGRESS:
            ready.register(way, selectors.EVENT_WRITE)
            if not ready.select(max(0.0, deadline - time.monotonic())):
                return False
            error = way.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return error in (0, errno.ECONNREFUSED)  # an interface that is down fails at once
