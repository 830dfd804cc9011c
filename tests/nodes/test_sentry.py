"""One node's watch, by the files and knocks of the others. No processes but a port."""

from __future__ import annotations

import pytest

from harness.json_files import write_json
from harness.nodes import network, sentry
from harness.nodes.files import Beat, End, Go, Order, read, write
from harness.nodes.sentry import Sentry
from harness.nodes.watch import GRACE_SECONDS

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


def test_beats_of_another_launch_are_no_signs(world, monkeypatch):
    monkeypatch.setattr(sentry, "read", lambda f, k, r, token: read(f, k, r, "another"))
    assert world.go_on(30) == "lost"


def test_a_head_that_is_cut_off_is_told_from_ranks_that_stand_still(world):
    world.go_on(5)
    assert world.go_on(40, steps=False) == "silent"
    world.there = False
    assert world.sentry.stop() == "unreachable"


def test_a_head_that_cannot_be_reached_for_long(world):
    world.there = False
    assert world.go_on(18) is None
    world.there = True
    assert world.go_on(30) is None
    world.there = False
    assert world.go_on(40) == "unreachable"


def test_another_nodes_failure_is_left_a_grace(world):
    world.go_on(5)
    write(world.shared, End(token="t", rank=0, host="n1", exit_code=1), 0)
    assert world.go_on(GRACE_SECONDS - 1, beats=False) is None
    assert world.go_on(5, beats=False) == "peer"


def test_another_nodes_good_end_is_no_reason(world):
    write(world.shared, End(token="t", rank=0, host="n1", exit_code=0), 0)
    assert world.go_on(40, beats=False) is None


def test_a_result_ends_the_watch(world):
    (world.shared / "result.json").write_text("{}")
    assert world.go_on(60, beats=False, steps=False) is None and world.sentry.finished()


def test_a_folder_that_takes_nothing_isolates(world, monkeypatch):
    def full(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    world.go_on(5)
    monkeypatch.setattr(sentry, "write", full)
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
