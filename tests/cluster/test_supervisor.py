"""One node's supervisor: reasons to end, its watch of the other nodes, and its own part."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from harness.cluster import network, preflight, supervisor
from harness.cluster.leader import Launched
from harness.cluster.meeting import Beat, End, Go, Order, read, write
from harness.cluster.supervisor import GRACE_SECONDS, Progress, Sentry, own_folder, stop_reason
from harness.json_files import write_json
from harness.system import machine, process
from strategies import files

SILENCE = 60.0


@pytest.mark.parametrize(
    ("signs", "word"),
    [
        ({}, None),
        ({"quiet": {1: 59.0}}, None),
        ({"quiet": {1: 61.0, 2: 5.0}}, ("lost", [1])),
        ({"ended_badly": 9.0}, None),
        ({"ended_badly": 11.0}, ("peer", [])),
        ({"ended_badly": 11.0, "quiet": {1: 61.0}}, ("lost", [1])),
        ({"unreachable": 59.0}, None),
        ({"unreachable": 61.0}, ("unreachable", [0])),
        ({"unwritable": 31.0, "quiet": {1: 61.0}}, ("isolated", [])),
        ({"unwritable": 29.0}, None),
        ({"silent": True}, ("silent", [])),
    ],
)
def test_what_ends_a_part(signs, word):
    assert stop_reason(SILENCE, **{"quiet": {}, **signs}) == word


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def stepped(phases: list[tuple[str, int, float]]) -> tuple[Progress, Clock]:
    """Progress that saw (phase, step) at a time."""
    clock = Clock()
    progress = Progress(clock)
    for phase, step, clock.time in phases:
        progress.see([{"rank": 0, "phase": phase, "step": step}])
    return progress, clock


FAST = [("warmup", 0, 1.0), ("warmup", 1, 2.0), ("measure", 0, 2.5), ("measure", 1, 3.0)]
SLOW = [("warmup", 0, 1.0), ("warmup", 1, 31.0), ("measure", 0, 61.0), ("measure", 1, 91.0)]


@pytest.mark.parametrize(
    ("seen", "after", "silent"),
    [
        (FAST, 59.0, False),
        (FAST, 61.0, True),
        (SLOW, 61.0, False),  # steps of 30 s: twenty of them may pass
        (SLOW, 601.0, True),
        ([("load", 0, 1.0)], 900.0, False),  # a compiler, or data: the deadline bounds it
        ([("warmup", 0, 1.0)], 900.0, False),
        ([], 900.0, False),
    ],
)
def test_ranks_are_silent_where_steps_should_follow_one_another(seen, after, silent):
    progress, clock = stepped(seen)
    clock.time += after
    assert progress.silent(SILENCE) is silent


# ---- the watch, by files and probes ----

ORDER = Order(
    token="t", nodes=2, processes=1, head="n1", words=["true"], environment={}, out="/out",
    timeout=None, silence=20.0, code="c", versions={}, cpu="x",
)  # fmt: skip


class World:
    """A sentry of node 1 with a clock, the head's files, and a head that answers or not."""

    def __init__(self, folder, monkeypatch) -> None:
        self.folder, self.time, self.there, self.count = folder, 100.0, True, 0
        monkeypatch.setattr(network, "answers", lambda *a, **k: self.there)
        self.door = network.Door()
        (folder / "shared").mkdir()
        self.shared, self.local = folder / "shared", folder / "local"
        go = Go(token="t", head="10.0.0.1", door=1, port=2)
        self.sentry = Sentry(ORDER, go, self.shared, 1, self.local, self.door, lambda: self.time)

    def go_on(self, seconds: float, beats: bool = True, steps: bool = True) -> str | None:
        """Let time pass in ticks; the head writes and the own rank steps, or not."""
        for _ in range(int(seconds * 2)):
            self.time += 0.5
            self.count += 1
            if beats:
                write(self.shared, Beat(token="t", rank=0, count=self.count), 0)
            if steps:
                status = {"rank": 1, "phase": "measure", "step": self.count}
                write_json(self.local / "ranks" / "rank1.status.json", status)
            self.sentry.tick(5)
            if word := self.sentry.stop():
                return word
        return None


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    yield made
    made.door.close()


def test_all_is_well_as_long_as_all_give_signs(world):
    assert world.go_on(60) is None
    beat = read(world.shared, Beat, 1, "t")
    assert beat.count >= 25 and beat.statuses[0]["phase"] == "measure"


def test_a_node_without_a_sign_is_lost(world):
    world.go_on(5)
    assert world.go_on(19, beats=False) is None
    assert world.go_on(10, beats=False) == "lost" and world.sentry.lost == [0]


def test_a_head_that_is_cut_off_is_told_from_ranks_that_stand_still(world):
    world.go_on(5)
    assert world.go_on(40, steps=False) == "silent"
    world.there = False
    assert world.sentry.stop() == "unreachable"


def test_another_nodes_failure_is_left_a_grace(world):
    world.go_on(5)
    write(world.shared, End(token="t", rank=0, host="n1", exit_code=1), 0)
    assert world.go_on(GRACE_SECONDS - 1, beats=False) is None
    assert world.go_on(5, beats=False) == "peer"


def test_a_result_ends_the_watch(world):
    (world.shared / "result.json").write_text("{}")
    assert world.go_on(60, beats=False, steps=False) is None and world.sentry.finished()


def test_a_folder_that_takes_nothing_isolates(world, monkeypatch):
    def full(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    world.go_on(5)
    monkeypatch.setattr(supervisor, "write", full)
    assert world.go_on(9) is None and world.go_on(6) == "isolated"


def test_a_failed_rank_here_is_told_at_once(world):
    write_json(world.local / "ranks" / "rank1.failure.json", {"rank": 1, "message": "x"})
    world.go_on(3)
    assert world.sentry.finished() and read(world.shared, Beat, 1, "t").failed


def test_a_door_is_answered_and_a_closed_one_still_says_that_the_machine_is_there():
    door = network.Door()
    assert network.answers("127.0.0.1", door.port) and network.reach(["localhost"], door.port)
    door.answer()
    door.close()
    assert network.answers("127.0.0.1", door.port)
    assert network.reach(["127.0.0.1"], door.port) is None
    assert "lo" in network.interfaces() and network.interface_of("127.0.0.1") == "lo"


# ---- two supervisors on this host, with small commands ----


@pytest.fixture
def quick(monkeypatch, tmp_path_factory):
    """Short times, and a disk that no launch beside these shares."""
    monkeypatch.setenv("HEADROOM_SCRATCH", str(tmp_path_factory.mktemp("disk")))
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(process, "LINGER_SECONDS", 0.5)


def launched(folder: Path, script: str, *, code: str = "", silence: float = 5.0):
    """What each node's command left as its end; the script gets rank, head and port."""
    order = Order(
        token="abc", nodes=2, processes=1, head="127.0.0.1", out=str(folder), timeout=20.0,
        words=["sh", "-c", script, "sh", "$NODE_RANK", "$HEAD", "$PORT"],
        environment={"GLOO_SOCKET_IFNAME": "$IFNAME", "CUDA_VISIBLE_DEVICES": ""},
        silence=silence, code=code or preflight.code(), versions=preflight.versions(),
        cpu=machine.cpu_name(),
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
    seen.end(0.0)
    return seen, list(seen.ends.values())


def test_each_node_runs_its_own_part_with_its_own_facts(quick, tmp_path):
    seen, ends = launched(tmp_path, f'echo "$@" > {tmp_path}/$1.args; env > {tmp_path}/$1.env')
    assert all(end.well and end.stopped is None for end in ends) and seen.go.refused is None
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
    assert int(variables[0]["OMP_NUM_THREADS"]) == machine.cores()
    assert not any(Path(v["HEADROOM_LOCAL"]).exists() for v in variables)
    assert seen.records()[1].address == "127.0.0.1"


def test_one_nodes_failure_ends_the_others_part(quick, tmp_path):
    _, ends = launched(tmp_path, '[ "$1" = 1 ] && exit 3; sleep 3600')
    assert (ends[1].exit_code, ends[1].stopped) == (3, None)
    assert ends[0].stopped == "peer" and ends[0].survivors == 0


def test_a_part_that_is_done_but_lingers_is_ended(quick, tmp_path):
    _, ends = launched(tmp_path, f"touch {tmp_path}/result.json; sleep 3600")
    assert [end.stopped for end in ends] == ["lingered", "lingered"]


def test_a_node_with_other_sources_begins_nothing(quick, tmp_path):
    seen, ends = launched(tmp_path, f"touch {tmp_path}/ran", code="other")
    assert "has different sources from node 0's" in seen.go.refused.text and ends == [None, None]
    assert not (tmp_path / "ran").exists()


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


def test_a_scratch_folder_of_somebody_else_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADROOM_SCRATCH", str(tmp_path))
    left = tmp_path / f"headroom-{os.getuid()}-aaaaaaaaaaaa-0"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    left.symlink_to(tmp_path / "elsewhere")
    with own_folder("bbbbbbbbbbbb", 0) as folder:
        assert folder.stat().st_mode & 0o077 == 0
    assert left.is_symlink() and (tmp_path / "elsewhere" / "kept").exists()
    with pytest.raises(files.NotOurs), own_folder("aaaaaaaaaaaa", 0):
        pass
