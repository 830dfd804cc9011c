"""Two supervisors of one launch on this host, with small commands in the place of a training."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from harness.nodes import preflight, sentry, supervisor, watch
from harness.nodes.files import End, Order, read, write
from harness.nodes.launched import Launched
from harness.nodes.local import own_folder
from harness.system import kernel, process


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path_factory):
    """Short times, and a disk that no launch beside these shares."""
    monkeypatch.setenv("HEADROOM_SCRATCH", str(tmp_path_factory.mktemp("disk")))
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(sentry, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(process, "LINGER_SECONDS", 0.5)


def launched(folder: Path, script: str, *, code: str = "", silence: float = 5.0):
    """What each node's command left as its end; the script gets rank, head and port."""
    order = Order(
        token="abc", nodes=2, processes=1, head="127.0.0.1", out=str(folder), timeout=20.0,
        words=["sh", "-c", script, "sh", "$NODE_RANK", "$HEAD", "$PORT"],
        environment={"GLOO_SOCKET_IFNAME": "$IFNAME", "CUDA_VISIBLE_DEVICES": ""},
        silence=silence, code=code or preflight.code(), versions=preflight.versions(),
        cpu=kernel.cpu_name(),
    )  # fmt: skip
    write(folder, order)
    seen = Launched(order, folder, lambda status: None)
    both = [threading.Thread(target=supervisor.serve, args=(folder, rank)) for rank in (0, 1)]
    for thread in both:
        thread.start()
    deadline = time.monotonic() + 40
    while any(thread.is_alive() for thread in both) and time.monotonic() < deadline:
        seen.look()
        if seen.go is None:
            seen.meet()
        time.sleep(0.05)
    return seen, [read(folder, End, rank, "abc") for rank in (0, 1)]


def test_each_node_runs_its_own_part_with_its_own_facts(tmp_path):
    seen, ends = launched(tmp_path, f'echo "$@" > {tmp_path}/$1.args; env > {tmp_path}/$1.env')
    assert all(end.well and end.stopped is None for end in ends) and seen.go.refused == ""
    told = [(tmp_path / f"{rank}.args").read_text().split() for rank in (0, 1)]
    assert [words[0] for words in told] == ["0", "1"] and told[0][1:] == told[1][1:]
    assert told[0][1] == "127.0.0.1" and int(told[0][2]) == seen.go.port
    variables = [
        dict(line.split("=", 1) for line in (tmp_path / f"{r}.env").read_text().splitlines())
        for r in (0, 1)
    ]
    assert {v["GLOO_SOCKET_IFNAME"] for v in variables} == {"lo"}
    assert {v["HEADROOM_TOKEN"] for v in variables} == {"abc"}
    assert {v["HEADROOM_GROUP_SECONDS"] for v in variables} == {"80.0"}, "after the deadline"
    assert len({v["HEADROOM_LOCAL"] for v in variables}) == 2
    assert int(variables[0]["OMP_NUM_THREADS"]) == kernel.cores()
    assert not any(Path(v["HEADROOM_LOCAL"]).exists() for v in variables)
    assert seen.records(dict(enumerate(ends)))[1].address == "127.0.0.1"


def test_one_nodes_failure_ends_the_others_part(tmp_path):
    _, ends = launched(tmp_path, '[ "$1" = 1 ] && exit 3; sleep 3600')
    assert (ends[1].exit_code, ends[1].stopped) == (3, None)
    assert ends[0].stopped == "peer" and ends[0].survivors == 0


def test_a_part_that_is_done_but_lingers_is_ended(tmp_path):
    _, ends = launched(tmp_path, f"touch {tmp_path}/result.json; sleep 3600")
    assert [end.stopped for end in ends] == ["lingered", "lingered"]


def test_a_node_with_other_sources_begins_nothing(tmp_path):
    seen, ends = launched(tmp_path, f"touch {tmp_path}/ran", code="other")
    assert "has other sources than the leader" in seen.go.refused and ends == [None, None]
    assert not (tmp_path / "ran").exists()


def test_a_child_is_ended_for_the_reason_that_is_given(tmp_path):
    ended = process.run_child(
        ["sleep", "3600"], cwd=tmp_path, env={}, log=tmp_path / "log", stop=lambda: "unreachable"
    )
    assert ended.stopped == "unreachable" and not ended.survivors


def test_what_a_dead_launch_left_is_removed_and_a_living_ones_folder_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADROOM_SCRATCH", str(tmp_path))
    dead = tmp_path / f"headroom-{os.getuid()}-0123456789ab-1"
    (dead / "nvme").mkdir(parents=True)
    (tmp_path / f"headroom-{os.getuid()}").mkdir()  # the probe's answers
    with own_folder("aaaaaaaaaaaa", 0) as living:
        assert not dead.exists() and (tmp_path / f"headroom-{os.getuid()}").exists()
        with own_folder("bbbbbbbbbbbb", 0) as other:
            assert living.exists() and other.exists()
    assert not living.exists() and not other.exists()
