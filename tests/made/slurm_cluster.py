"""A Slurm of two nodes on this machine: Debian's packages, one slurmd in each network namespace.

    apt-get install --no-install-recommends slurm-wlm munge

Needs root. No database: states come from ``scontrol`` and from what srun prints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT
from tests.made.living import until
from tests.made.two_nodes import Nodes, two_nodes
from tests.made.two_nodes import why_not as why_no_nodes

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
CONF = """
ClusterName=headroom
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
AuthInfo=socket={run}/munge.socket
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool.%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd.%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherFrequency=1
SlurmdTimeout=20
KillWait=12
ReturnToService=2
NodeName=n[1-2] NodeAddr=10.77.0.[1-2] CPUs=2 RealMemory=3000 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why this machine cannot have one; empty where it can."""
    missing = [name for name in DAEMONS if not shutil.which(name, path=_path())]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return why_no_nodes()


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class Cluster:
    """``nodes`` with their daemons; ``run`` holds configuration, state and logs."""

    def __init__(self, nodes: Nodes, run: Path) -> None:
        self.nodes, self.run = nodes, run
        python = {"HEADROOM_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        self.env = {**os.environ, "SLURM_CONF": str(run / "slurm.conf"), "PATH": _path(), **python}
        self.munged: subprocess.Popen | None = None

    def start(self) -> None:
        """All daemons, until both nodes are idle."""
        (self.run / "state").mkdir()
        (self.run / "slurm.conf").write_text(CONF.format(run=self.run))
        version = "v2" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "v1"
        (self.run / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/{version}\n")
        self._munged()
        self.nodes.start(0, ["slurmctld", "-D"], self.run / "ctld.out", self.env)
        for rank in (0, 1):
            (self.run / f"spool.n{rank + 1}").mkdir()
            words = ["slurmd", "-D", "-N", f"n{rank + 1}"]
            self.nodes.start(rank, words, self.run / f"slurmd{rank}.out", self.env)
        until(self._idle, 30, say=self._logs)

    def _munged(self) -> None:
        (self.run / "munge.key").write_bytes(os.urandom(128))
        (self.run / "munge.key").chmod(0o600)
        files = {name: self.run / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        words = [f"--{name}{'' if name == 'socket' else '-file'}={p}" for name, p in files.items()]
        words += [f"--key-file={self.run / 'munge.key'}", "--foreground", "--force"]
        with (self.run / "munged.out").open("ab") as log:
            command = ["munged", *words]
            self.munged = subprocess.Popen(command, stdout=log, stderr=log, env=self.env)
        until(files["socket"].exists, 10)

    def _idle(self) -> bool:
        said = self.ask("sinfo", "-h", "-p", "main", "-N", "-o", "%T")
        return said.split() == ["idle", "idle"]

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-800:] for path in self.run.glob("*.out"))

    def command(self, *words: str) -> list[str]:
        """Words that run on the first node's network, where a login node would be."""
        return ["nsenter", f"--net=/run/netns/{self.nodes.names[0]}", *words]

    def ask(self, *words: str) -> str:
        done = subprocess.run(self.command(*words), env=self.env, capture_output=True, text=True)
        return done.stdout

    def close(self) -> None:
        if self.munged:
            self.munged.kill()
            self.munged.wait()


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """A cluster of two idle nodes, for as long as the context lasts."""
    run = Path(tempfile.mkdtemp(prefix="headroom-slurm-", dir="/run"))
    run.chmod(0o755)
    with two_nodes() as nodes:
        cluster = Cluster(nodes, run)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
    shutil.rmtree(run, ignore_errors=True)
