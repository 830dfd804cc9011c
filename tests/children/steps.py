"""A rank that only steps with its peer, as a collective does: ``python -m tests.children.steps RANK
HEAD PORT [STEPS]``. Without a word from the other it waits for ever. Standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path


def main() -> None:
    rank, head, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    folder = Path(os.environ["HEADROOM_LOCAL"]) / "ranks"
    folder.mkdir(parents=True, exist_ok=True)
    peer = meet(rank, head, port)
    for step in range(int((sys.argv[4:] or ["100000"])[0])):
        peer.sendall(b"x")
        if not peer.recv(1):
            raise ConnectionError("Connection reset by peer")
        facts = {"rank": rank, "phase": "measure", "step": step, "of": 100_000, "pid": os.getpid()}
        (folder / ".new").write_text(json.dumps(facts))
        (folder / ".new").replace(folder / f"rank{rank}.status.json")
        time.sleep(0.05)


def meet(rank: int, head: str, port: int) -> socket.socket:
    if rank == 0:
        with socket.create_server(("", port)) as door:
            return door.accept()[0]
    while True:
        try:
            way = socket.create_connection((head, port), timeout=5)
            way.settimeout(None)
            return way
        except OSError:
            time.sleep(0.1)


main()
