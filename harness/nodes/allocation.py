"""Which of how many machines this is, by the variables of whatever started the command on each.

Slurm's ``srun``, dstack, SkyPilot and Kubernetes (Kubeflow's PET_ variables) all start one command
a node and say its rank and the head's address. A batch script or ``salloc`` of Slurm's starts one
command in all: that one starts a step a row (``by_steps``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from strategies.base import BadInput

__all__ = ["Allocation", "AllocationError", "find", "first_host"]


class AllocationError(BadInput):
    """Machines that cannot be told apart, or too few: what is missing, and what to type."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """This machine's place: ``rank`` of ``nodes``, the ``head`` (rank 0) by name or address.

    ``by_steps``: this process alone was started, inside a Slurm job whose nodes it reaches by
    ``srun``. ``starter`` says who told, for a reader.
    """

    nodes: int
    rank: int
    head: str
    starter: str
    by_steps: bool = False


@dataclass(frozen=True)
class Starter:
    """Names of the variables in which one starter says rank, number of nodes and the head."""

    name: str
    rank: str
    nodes: str
    head: str


STARTERS = (
    Starter("Slurm (srun)", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST"),
    Starter("dstack", "DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
    Starter("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    Starter("Kubernetes (PET_)", "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    Starter("the environment", "NODE_RANK", "NNODES", "MASTER_ADDR"),
)
"""Asked in this order."""
STEPS = "Slurm (a step a row)"
TYPE = (
    "start the same command on each node with --node-rank R --head ADDRESS, or inside a Slurm job "
    "(salloc, sbatch), or see docs/cluster.md"
)


def find(
    environ: Mapping[str, str], nodes: int, rank: int | None = None, head: str | None = None
) -> Allocation:
    """This machine's place among ``nodes``; ``rank`` and ``head`` were given by hand, or not.

    Raises:
        AllocationError: nobody told, or told of another number of machines.
    """
    if rank is not None or head is not None:
        return _by_hand(nodes, rank, head)
    for starter in STARTERS:
        there = _whole(environ.get(starter.nodes))
        own = _whole(environ.get(starter.rank))
        if own is None or there is None or (there == 1 and nodes > 1):
            continue  # an interactive step of one node lies in a job that may have more
        return _told(starter, nodes, there, own, environ.get(starter.head, ""))
    if "SLURM_JOB_ID" in environ:
        return _steps(environ, nodes)
    raise AllocationError(f"nodes is {nodes}, and nothing here says which of them this is; {TYPE}")


def first_host(hosts: str) -> str:
    """The first of a list as schedulers write it: ``n[01-04,7]``, ``a,b``, or one a line."""
    text = re.split(r"[\s,]", re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts.strip()))
    return text[0]


def _whole(text: str | None) -> int | None:
    """``2``, or the first number of torchrun's ``2:4``."""
    number = (text or "").partition(":")[0]
    return int(number) if number.isdigit() else None


def _by_hand(nodes: int, rank: int | None, head: str | None) -> Allocation:
    if rank is None or not head:
        missing = "--node-rank R (0 on the head)" if rank is None else "--head ADDRESS"
        raise AllocationError(f"nodes is {nodes}, and {missing} is missing; give both")
    if not 0 <= rank < nodes:
        raise AllocationError(f"node_rank is {rank} of {nodes} nodes; give 0 to {nodes - 1}")
    return Allocation(nodes=nodes, rank=rank, head=head, starter="by hand")


def _told(starter: Starter, nodes: int, there: int, rank: int, heads: str) -> Allocation:
    head = first_host(heads)
    if there != nodes or not rank < there:
        raise AllocationError(
            f"nodes is {nodes}, and {starter.name} started the command on {there} "
            f"({starter.nodes}); give --nodes {there}"
        )
    if not head:
        raise AllocationError(f"{starter.name} does not say who is node 0 ({starter.head}); {TYPE}")
    return Allocation(nodes=nodes, rank=rank, head=head, starter=starter.name)


def _steps(environ: Mapping[str, str], nodes: int) -> Allocation:
    there = _whole(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES"))
    if there is None or there < nodes:
        has = "does not say how many nodes it has" if there is None else f"has {there}"
        raise AllocationError(
            f"nodes is {nodes}, and Slurm job {environ['SLURM_JOB_ID']} {has}; "
            f"allocate with --nodes={nodes}"
        )
    head = first_host(environ.get("SLURM_JOB_NODELIST", ""))
    return Allocation(nodes=nodes, rank=0, head=head, starter=STEPS, by_steps=True)
