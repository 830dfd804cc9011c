"""Two "nodes" on this machine: network namespaces with process trees, host names and /dev/shm of
their own, one file system, and a link between them that can be cut or made slow. Needs root.

A node's processes are children of an init of their own, so that SIGKILL of that init is "power
off"; a link that is down is a power cut that sends nobody a word.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import ROOT
from tests.made.living import statuses, until

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TOOLS = ("ip", "nsenter", "unshare")
SETTINGS = "ip link set lo up; mount -t tmpfs none /dev/shm; hostname {name}"


def why_not() -> str:
    """Why this machine cannot have such nodes; empty where it can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"no {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid():
        return "network namespaces need root"
    name = f"hr{os.getpid() % 10000}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return "" if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


@dataclass
class Nodes:
    """``names`` of their namespaces; their hosts are n1 and n2."""

    names: tuple[str, str]
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(
        self, rank: int, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """Start a command on a node, as a machine that was just switched on."""
        inside = SETTINGS.format(name=f"n{rank + 1}") + '; exec "$@"'
        spaces = ["unshare", "--uts", "--pid", "--ipc", "--mount", "--fork", "--mount-proc"]
        enter = ["nsenter", f"--net=/run/netns/{self.names[rank]}"]
        init = ["--kill-child=SIGKILL", "bash", "-c", inside, "bash"]
        with log.open("ab") as stream:
            child = subprocess.Popen(
                [*enter, *spaces, *init, *words],
                cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
                stdout=stream, stderr=stream, start_new_session=True,
            )  # fmt: skip
        self.started.append(child)
        return child

    def run_on_both(self, words: Sequence[str], folder: Path) -> list[subprocess.Popen]:
        """The harness's command on each node, as a starter of one command a node does it."""
        folder.mkdir(parents=True, exist_ok=True)
        common = [sys.executable, "-m", "harness", *words, "--nodes", "2"]
        common += ["--rdzv-endpoint", f"{ADDRESSES[0]}:29511"]
        return [self.start(rank, common, folder / f"said{rank}.txt") for rank in (0, 1)]

    def link(self, up: bool) -> None:
        """Cut the link on the second node's side, or mend it."""
        words = ["ip", "-n", self.names[1], "link", "set", "eth0", "up" if up else "down"]
        subprocess.run(words, check=True)

    def power_off(self, child: subprocess.Popen) -> None:
        """Kill a node: everything on it dies at once."""
        child.send_signal(signal.SIGKILL)
        child.wait(10)

    def left(self) -> list[str]:
        """Command lines of processes that run in the namespaces."""
        pids = {pid for name in self.names for pid in _out("ip", "netns", "pids", name).split()}
        lines = []
        for pid in pids:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                lines.append(words.decode(errors="replace")[:200])
        return lines

    def close(self) -> None:
        for child in self.started:
            child.kill()
            child.wait()
        with contextlib.suppress(AssertionError):
            until(lambda: not self.left(), 5)
        for name in self.names:
            _out("ip", "netns", "delete", name)


def _out(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Two nodes and the link between them, for as long as the context lasts."""
    mark = uuid.uuid4().hex[:5]
    nodes = Nodes((f"hr{mark}a", f"hr{mark}b"))
    ends = (f"v{mark}a", f"v{mark}b")
    try:
        for name in nodes.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        pair = ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]
        subprocess.run(pair, check=True)
        for end, name, address in zip(ends, nodes.names, ADDRESSES, strict=True):
            subprocess.run(["ip", "link", "set", end, "netns", name, "name", "eth0"], check=True)
            inside = ["ip", "-n", name]
            subprocess.run([*inside, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
            subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
        yield nodes
    finally:
        nodes.close()


# ---- a row that both run ----


def steps(out: Path) -> list[int]:
    """The timed steps that ranks of both nodes are in; empty until all are."""
    said = [*statuses(out), *statuses(out / "node-1")]
    measured = [one["step"] for one in said if one["phase"] == "measure" and one["step"] > 2]
    return measured if len(said) == len(measured) == 2 else []
