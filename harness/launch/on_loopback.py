"""``accelerate`` with a rendezvous store that listens only on the loopback interface.

torch's TCPStore listens on every interface, even if all ranks are on one machine (torch 2.13,
TCPStoreLibUvBackend.cpp), and ranks unpickle the data of object collectives.
"""

from __future__ import annotations

import importlib
import re
import socket
import sys
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost")


def listen_on_loopback() -> None:
    """Restrict each store that this process opens on a loopback address to that address."""
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    # torch.distributed has a function of the same name as this module.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

    def store(
        host_name: str, port: int, world_size: Any = None, is_master: bool = False, *args: Any,
        **named: Any,
    ) -> TCPStore:  # fmt: skip
        if is_master and host_name in LOOPBACK:
            listening = socket.create_server(("127.0.0.1", port), backlog=128)
            named["master_listen_fd"] = listening.detach()  # the store closes it
        return TCPStore(host_name, port, world_size, is_master, *args, **named)

    rendezvous.TCPStore = static_tcp_rendezvous.TCPStore = store


def main() -> None:
    from accelerate.commands.accelerate_cli import main as accelerate

    listen_on_loopback()
    sys.argv[0] = re.sub(r"on_loopback\.py$", "accelerate", sys.argv[0])
    sys.exit(accelerate())


if __name__ == "__main__":
    main()
