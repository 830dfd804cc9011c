"""Which of how many machines this is, by the variables of each starter. No processes."""

from __future__ import annotations

import pytest

from harness.nodes.allocation import Allocation, AllocationError, find, first_host

SRUN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2"}
SRUN |= {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}
BATCH |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}
SHELL = {**BATCH, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}
TOLD = {
    "srun": (SRUN, 1, "n1", False),
    "sbatch": (BATCH, 0, "n1", True),
    "salloc's interactive step": (SHELL, 0, "n1", True),
    "dstack": (
        {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.4"},
        1, "10.0.0.4", False,
    ),
    "SkyPilot": (
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "1.1.1.1\n2.2"},
        0, "1.1.1.1", False,
    ),
    "Kubernetes": (
        {"PET_NODE_RANK": "1", "PET_NNODES": "2:2", "PET_MASTER_ADDR": "job-0.job"},
        1, "job-0.job", False,
    ),
    "plain": ({"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a"}, 1, "a", False),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_each_starter_tells(name):
    environ, rank, head, by_steps = TOLD[name]
    found = find(environ, 2)
    assert (found.rank, found.head, found.by_steps, found.nodes) == (rank, head, by_steps, 2)


def test_what_is_given_by_hand_wins():
    assert find(SRUN, 2, 0, "10.0.0.1") == Allocation(
        nodes=2, rank=0, head="10.0.0.1", starter="by hand"
    )


@pytest.mark.parametrize(
    ("environ", "given", "words"),
    [
        ({}, (3,), "nothing here says which of them this is"),
        (SRUN, (3,), "started the command on 2.*give --nodes 2"),
        ({**SRUN, "SLURM_NODEID": "2"}, (2,), "started the command on 2"),
        (BATCH, (4,), "Slurm job 7 has 2; allocate with --nodes=4"),
        ({"SLURM_JOB_ID": "7"}, (2,), "does not say how many"),
        ({"NODE_RANK": "0", "NNODES": "2"}, (2,), "does not say who is node 0"),
        ({}, (2, 1), "--head ADDRESS is missing"),
        ({}, (2, None, "a"), "--node-rank R .* is missing"),
        ({}, (2, 2, "a"), "node_rank is 2 of 2 nodes; give 0 to 1"),
    ],
)
def test_what_is_missing_is_said(environ, given, words):
    with pytest.raises(AllocationError, match=words):
        find(environ, *given)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"), ("n[1-2]", "n1"), ("gpu-[007-011,3]-ib,x", "gpu-007-ib"), ("a1,b[2-3]", "a1"),
        ("10.0.0.1\n10.0.0.2\n", "10.0.0.1"), ("", ""), ("r[10]n[03-04]", "r10n03"),
    ],
)  # fmt: skip
def test_the_first_of_a_list_of_hosts(hosts, first):
    assert first_host(hosts) == first
