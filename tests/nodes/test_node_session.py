"""Nodes that meet in a folder, without a network: followers, leaders, and files of earlier runs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from harness.commands.several import check_leader
from harness.json_files import write_json
from harness.nodes import session, supervisor
from harness.nodes.files import Beat, End, Go, Order, Ready, read, write
from harness.nodes.preflight import disagreement, head_address, mixed, skews
from harness.nodes.session import LeaderLost, MeetingError, Session, follow
from harness.nodes.survey import SurveyError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Words come often; a launch is only noted."""
    monkeypatch.setattr(session, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(session, "WORD_SECONDS", 0.05)
    monkeypatch.setattr(session._Hello, "say", _often)


def _often(hello) -> None:
    hello.count += 1
    write_json(hello.path, {"name": hello.name, "count": hello.count}, durable=False)


def led(out: Path, orders: list[str], nodes: int = 2) -> list[str]:
    """What the followers of a session took part in, in order."""
    served, said = [], []
    supervisor_serve = lambda folder, rank: served.append(f"{folder.name}@{rank}")  # noqa: E731
    followers = [
        threading.Thread(target=follow, args=(out, rank, 5.0, said.append, 5.0))
        for rank in range(1, nodes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "serve", supervisor_serve)
        for follower in followers:
            follower.start()
        meeting = Session(out, nodes)
        with meeting.open(said.append, 5.0):
            for name in orders:
                with meeting.published(out / name):
                    wait(lambda n=name: sum(s.startswith(f"{n}@") for s in served) == nodes - 1)
        for follower in followers:
            follower.join(5.0)
            assert not follower.is_alive()
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
    write_json(folder / "hello1.json", {"name": "dead", "count": 9})
    word = {"leader": "old", "count": 3, "members": {"1": "dead"}, "number": 4, "order": "/x"}
    write_json(folder / "session.json", {**word, "closed": True})
    assert led(tmp_path, ["a"]) == ["a@1"]


def test_a_node_that_does_not_come_is_named(tmp_path):
    meeting, said = Session(tmp_path, 3), []
    told = r"node 1, node 2 of 3 gave no sign"
    with pytest.raises(MeetingError, match=told), meeting.open(said.append, 0.1):
        raise AssertionError("they have not met")


def test_a_follower_that_nobody_calls_ends(tmp_path):
    with pytest.raises(MeetingError, match=r"node 1 was not called by node 0"):
        follow(tmp_path, 1, 5.0, print, 0.1)


def test_a_leader_that_falls_silent_is_left(tmp_path):
    """Its file stays as it was: no word is new."""
    ended = []

    def followed() -> None:
        try:
            follow(tmp_path, 1, 0.3, print, 5.0)
        except LeaderLost as error:
            ended.append(str(error))

    follower = threading.Thread(target=followed)
    follower.start()
    meeting = Session(tmp_path, 2)
    with meeting.open(print, 5.0):
        meeting._over.set()  # as a power cut
        follower.join(5.0)
        assert ended == ["node 0 gave no sign for 0.3 s: this node ends too"]


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
        ({"code": "d"}, "node 1 (n2) has other sources than the leader"),
        ({"versions": {"torch": "2.9"}}, "node 1 (n2) has torch 2.9, the leader 2.13"),
        ({"lack": "its GPU 0 is in use; wait"}, "node 1 (n2): its GPU 0 is in use; wait"),
        ({"reached": ""}, "give --head ADDRESS on all nodes"),
    ],
)
def test_nodes_that_cannot_run_one_training_are_refused(other, words):
    found = disagreement(ORDER, [ready(0), ready(1, **other)])
    assert words in found and bool(found) == bool(words)


def test_the_head_has_one_address_for_all():
    assert head_address([ready(0), ready(1), ready(2)]) == "10.0.0.1"
    assert head_address([ready(0), ready(1), ready(2, reached="10.0.1.1")]) == ""


def test_nodes_of_several_kinds_are_mixed():
    cards = [ready(0, devices=["A"] * 2), ready(1, devices=["A", "B"])]
    assert "n1: A; n2: A, B" in mixed(cards) and mixed(cards[:1]) == ""
    assert mixed([ready(0, cpu="x"), ready(1, cpu="y")])


def test_a_login_node_does_not_lead():
    check_leader("n1", ["n1", "n2"])
    with pytest.raises(SurveyError, match=r"on login, .*srun --nodes=2 --ntasks-per-node=1"):
        check_leader("login", ["n1", "n2"])


def test_a_clock_that_is_far_off_is_noted():
    notes = skews([(ready(0, written=100.0), 100.5), (ready(1, written=100.0), 109.0)])
    assert len(notes) == 1 and "node 1 (n2) differs by some 9 s" in notes[0]


def test_a_node_that_is_not_let_begin_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "READY_SECONDS", 3.0)
    monkeypatch.setattr(supervisor.preflight, "look", lambda order, rank: ready(rank))
    write(tmp_path, ORDER)
    write(tmp_path, Go(token="new", refused="node 1 lacks all"))
    assert supervisor.serve(tmp_path, 0) is None
    assert not (tmp_path / "log.node0.txt").exists()
