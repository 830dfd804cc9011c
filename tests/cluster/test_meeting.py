"""Nodes that find one another: variables of starters, sessions in a folder, and their messages."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from harness.cluster import meeting, supervisor
from harness.cluster.meeting import (
    Allocation,
    Beat,
    End,
    Go,
    Order,
    Ready,
    Session,
    find,
    first_host,
    follow,
    read,
    write,
)
from harness.cluster.preflight import disagreement, head_address, mixed
from harness.json_files import write_json
from strategies.base import BadInput, Reason

SRUN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NUM_NODES": "2"}
SRUN |= {"SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_NODELIST": "n[1-2]"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}
BATCH |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_PROCID": "0"}
SHELL = {**BATCH, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1"}
TOLD = {
    "srun": (SRUN, 1, "n1"),
    "sbatch": (BATCH, None, ""),
    "salloc's interactive step": (SHELL, None, ""),
    "dstack": (
        {"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.4"},
        1, "10.0.0.4",
    ),
    "SkyPilot": (
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "1.1.1.1\n2.2"},
        0, "1.1.1.1",
    ),
    "Kubernetes": (
        {"PET_NODE_RANK": "1", "PET_NNODES": "2:2", "PET_MASTER_ADDR": "job-0.job"},
        1, "job-0.job",
    ),
    "plain": ({"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a"}, 1, "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_each_starter_tells(name):
    environ, rank, head = TOLD[name]
    found = find(environ, 2)
    assert (found.rank, found.head, found.nodes) == (rank, head, 2)


def test_what_is_given_by_hand_wins():
    assert find(SRUN, 2, 0, "10.0.0.1") == Allocation(
        nodes=2, rank=0, head="10.0.0.1", starter="by hand"
    )


@pytest.mark.parametrize(
    ("environ", "given", "words"),
    [
        ({}, (3,), "no variable has this machine's rank"),
        (SRUN, (3,), "started the command on 2.*give --nodes 2"),
        ({**SRUN, "SLURM_NODEID": "2"}, (2,), "started the command on 2"),
        (BATCH, (4,), "Slurm job 7 has 2; allocate with --nodes=4"),
        ({"SLURM_JOB_ID": "7"}, (2,), "has an unknown number"),
        ({"NODE_RANK": "0", "NNODES": "2"}, (2,), "does not name node 0"),
        ({}, (2, 1), "--head ADDRESS is missing"),
        ({}, (2, None, "a"), "--node-rank R .* is missing"),
        ({}, (2, 2, "a"), "node_rank is 2; give --node-rank 0 to 1"),
    ],
)
def test_what_is_missing_is_said(environ, given, words):
    with pytest.raises(BadInput, match=words):
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


# ---- sessions ----


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(meeting, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(meeting, "WORD_SECONDS", 0.05)


def led(out: Path, orders: list[str], nodes: int = 2) -> list[str]:
    """The launches that the followers of a session served, in order."""
    served = []

    def follower(rank: int) -> threading.Thread:
        serve = lambda folder: served.append(f"{folder.name}@{rank}")  # noqa: E731
        return threading.Thread(target=follow, args=(out, rank, 5.0, serve, 5.0))

    followers = [follower(rank) for rank in range(1, nodes)]
    for one in followers:
        one.start()
    session = Session(out, nodes)
    with session.open(print, 5.0):
        for name in orders:
            session.publish(out / name)
            wait(lambda n=name: sum(s.startswith(f"{n}@") for s in served) == nodes - 1)
    for one in followers:
        one.join(5.0)
        assert not one.is_alive()
    return served


def wait(until) -> None:
    deadline = time.monotonic() + 5
    while not until() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_followers_take_part_in_each_launch_once_and_are_sent_home(tmp_path):
    assert led(tmp_path, ["a", "b"]) == ["a@1", "b@1"]
    assert sorted(led(tmp_path, ["c"], nodes=3)) == ["c@1", "c@2"]


def test_an_earlier_runs_files_mislead_nobody(tmp_path):
    folder = tmp_path / "nodes"
    write_json(folder / "hello1.json", {"leader": "old"})
    word = {"leader": "old", "count": 3, "number": 4, "order": "/x"}
    write_json(folder / "session.json", {**word, "closed": True})
    assert led(tmp_path, ["a"]) == ["a@1"]


def test_a_follower_that_comes_late_takes_part_from_the_next_launch(tmp_path):
    served = []
    session = Session(tmp_path, 1)
    with session.open(print, 5.0):
        session.publish(tmp_path / "a")
        follower = threading.Thread(target=follow, args=(tmp_path, 1, 5.0, served.append, 5.0))
        follower.start()
        wait((tmp_path / "nodes" / "hello1.json").exists)
        session.publish(tmp_path / "b")
        wait(lambda: served)
    follower.join(5.0)
    assert served == [tmp_path / "b"]


def test_a_node_that_does_not_come_is_named(tmp_path):
    text = r"node 1, node 2 of 3 gave no sign"
    with pytest.raises(BadInput, match=text), Session(tmp_path, 3).open(print, 0.1):
        raise AssertionError("they have not met")


def test_a_follower_without_a_leader_ends(tmp_path):
    with pytest.raises(BadInput, match=r"node 1 found no living node 0"):
        follow(tmp_path, 1, 5.0, print, 0.1)


def test_a_leader_that_falls_silent_is_left(tmp_path):
    """Its file stays as it was: no word is new."""
    served, ended = [], []

    def followed() -> None:
        with pytest.raises(BadInput, match=r"node 0 gave no sign for 0\.3 s: this node stops too"):
            follow(tmp_path, 1, 0.3, served.append, 5.0)
        ended.append(True)

    follower = threading.Thread(target=followed)
    follower.start()
    session = Session(tmp_path, 2)
    with session.open(print, 5.0):
        session.publish(tmp_path / "a")
        wait(lambda: served)
        session._over.set()  # as a power cut
        follower.join(5.0)
        assert ended


# ---- files ----

ORDER = Order(
    token="new", nodes=2, processes=1, head="n1", words=["true"], environment={}, out="/out",
    timeout=9.0, silence=5.0, code="c", versions={"torch": "2.13"}, cpu="x",
)  # fmt: skip


def test_files_of_another_launch_are_not_read(tmp_path):
    write(tmp_path, End(token="old", rank=1, host="n2"), 1)
    write(tmp_path, Beat(token="old", rank=1, count=3), 1)
    assert read(tmp_path, End, 1, "new") is None and read(tmp_path, Beat, 1, "new") is None
    assert read(tmp_path, End, 1, "old").host == "n2"


def test_half_a_file_is_none(tmp_path):
    write(tmp_path, ORDER)
    assert read(tmp_path, Order) == ORDER
    whole = (tmp_path / "order.json").read_text()
    for text in (whole[:50], "[]", whole.replace('"nodes": 2', '"nodes": "2"')):
        (tmp_path / "order.json").write_text(text)
        assert read(tmp_path, Order) is None


# ---- all nodes together ----


def ready(rank: int, **more) -> Ready:
    facts = {"code": "c", "versions": {"torch": "2.13"}, "reached": "10.0.0.1" if rank else ""}
    return Ready(token="new", rank=rank, host=f"n{rank + 1}", **{**facts, "cpu": "x", **more})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"code": "d"}, "node 1 (n2) has different sources from node 0's"),
        ({"versions": {"torch": "2.9"}}, "node 1 (n2) has torch 2.9, the leader 2.13"),
        ({"lack": Reason("its GPU 0 is in use", "wait")}, "node 1 (n2): its GPU 0 is in use; wait"),
        ({"reached": ""}, "give --head ADDRESS on all nodes"),
    ],
)
def test_nodes_that_cannot_run_one_training_are_refused(other, words):
    found = disagreement(ORDER, [ready(0), ready(1, **other)])
    assert words in str(found or "") and bool(found) == bool(words)


def test_the_head_has_one_address_for_all():
    assert head_address([ready(0), ready(1), ready(2)]) == "10.0.0.1"
    assert head_address([ready(0), ready(1), ready(2, reached="10.0.1.1")]) == ""


def test_nodes_of_several_kinds_are_mixed():
    cards = [ready(0, devices=["A"] * 2), ready(1, devices=["A", "B"])]
    assert "n1: A; n2: A, B" in mixed(cards) and mixed(cards[:1]) == ""
    assert mixed([ready(0, cpu="x"), ready(1, cpu="y")])


def test_a_node_that_is_not_let_begin_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "READY_SECONDS", 3.0)
    monkeypatch.setattr(supervisor.preflight, "look", lambda order, rank: ready(rank))
    write(tmp_path, ORDER)
    write(tmp_path, Go(token="new", refused=Reason("node 1 lacks all")))
    assert supervisor.serve(tmp_path, 0) is None
    assert not (tmp_path / "log.node0.txt").exists()
