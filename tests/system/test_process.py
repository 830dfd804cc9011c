"""Real children: whatever ends a run, nothing of it is left, and nothing else is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.system import process, tree
from harness.system.process import Ended, run_child
from tests.made.living import Looks, left, until

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def worker(mode: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.children.worker", mode, str(folder)]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(process, "LINGER_SECONDS", 0.5)


def launch(mode: str, folder: Path, **options) -> Ended:
    options = {"timeout": 300.0, "scratch": (folder / "nvme",), **options}
    return run_child(
        worker(mode, folder), cwd=ROOT, env=dict(os.environ), log=folder / "log.txt", **options
    )


def test_a_good_run_leaves_a_log_and_nothing_else(tmp_path):
    ended = launch("good", tmp_path)
    assert (ended.exit_code, ended.signal, ended.stopped, ended.left_behind) == (0, None, None, 0)
    assert ended.wall_seconds > 0 and (tmp_path / "log.txt").exists()
    assert not left(tmp_path)


def test_the_deadline_ends_a_child_that_ignores_sigterm(tmp_path):
    ended = launch("hang", tmp_path, timeout=0.8)
    assert ended.stopped == "timeout" and ended.survivors == 0 and not left(tmp_path)


@pytest.mark.parametrize("mode", ["daemon", "bare_daemon"])
def test_a_daemon_that_forked_away_is_found_and_ended(tmp_path, mode):
    ended = launch(mode, tmp_path)
    assert ended.exit_code == 0 and ended.left_behind == 1
    assert (tmp_path / "daemon.pid").exists() and not left(tmp_path)


def test_a_child_that_hangs_after_its_work_is_ended(tmp_path):
    done = tmp_path / "result.json"
    ended = launch("good_then_hang", tmp_path, finished=done.exists)
    assert ended.stopped == "lingered" and not left(tmp_path)


def test_a_foreign_process_of_the_same_name_is_not_touched(tmp_path):
    (tmp_path / "foreign").mkdir()
    foreign = subprocess.Popen(worker("hang", tmp_path / "foreign"), cwd=ROOT)
    segment = Path(f"/dev/shm/psm_foreign_{tmp_path.name}")
    try:
        until((tmp_path / "foreign" / "ready").exists)
        (tmp_path / "ours").mkdir()
        launch("hang", tmp_path / "ours", timeout=1.0, on_tick=lambda _: segment.touch())
        assert not left(tmp_path / "ours")
        assert foreign.poll() is None and segment.exists()
    finally:
        foreign.kill()
        foreign.wait()
        segment.unlink(missing_ok=True)


def test_shared_memory_and_swap_of_the_tree_are_removed(tmp_path):
    launch("shared_memory", tmp_path, on_tick=Looks(tmp_path))
    names = json.loads((tmp_path / "ready").read_text())
    assert len(names) == 2 and not any(Path(name).exists() for name in names)
    assert not (tmp_path / "nvme").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_harness_ends_the_tree_then_it(tmp_path, number):
    harness = start_harness("daemon_and_hang", tmp_path)
    harness.send_signal(number)
    said, _ = harness.communicate(timeout=120)
    assert harness.returncode == 7
    assert said.split() == ["interrupted", "by", number.name, "interrupted", "0"]
    assert not left(tmp_path)


def test_a_killed_harness_leaves_nothing_and_touches_nothing_else(tmp_path):
    """A folder's name may have a line feed, and the rest of it may look like another path."""
    victim = tmp_path / "victim"
    (victim / "nvme").mkdir(parents=True)
    folder = Path(f"{tmp_path}/x\n{victim}")
    folder.mkdir(parents=True)
    harness = start_harness("daemon_and_hang", folder)
    (folder / "nvme").mkdir()
    harness.kill()
    harness.wait()
    until(lambda: not (folder / "nvme").exists() and not left(folder))
    assert (victim / "nvme").exists()


def test_a_killed_guard_leaves_nothing(tmp_path):
    harness = start_harness("daemon_and_hang", tmp_path)
    until((tmp_path / "seen").exists)
    (guard,) = psutil.Process(harness.pid).children()
    guard.kill()
    assert harness.wait(120) == 0
    assert not left(tmp_path)


def test_a_killed_harness_leaves_no_shared_memory(tmp_path):
    harness = start_harness("shared_memory_and_hang", tmp_path)
    until((tmp_path / "seen").exists)
    harness.kill()
    harness.wait()
    names = json.loads((tmp_path / "ready").read_text())
    until(lambda: not left(tmp_path) and not any(Path(name).exists() for name in names))


def start_harness(mode: str, folder: Path) -> subprocess.Popen:
    argv = [sys.executable, "-m", "tests.children.killed", mode, str(folder)]
    harness = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    until((folder / "ready").exists)
    return harness


def test_a_stale_compile_lock_is_freed_and_a_held_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old = time.time() - 2 * tree.STALE_SECONDS
    paths = [tmp_path / "py" / name / "lock" for name in ("stale", "held", "young")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(paths[0], (old, old))
    os.utime(paths[1], (old, old))
    with subprocess.Popen(["sleep", "60"], stdin=paths[1].open()) as holder:
        assert tree.free_stale_locks() == [paths[0]]
        assert [path.exists() for path in paths] == [False, True, True]
        paths[2].unlink()
        assert tree.awaited().startswith("compiling held, ") and str(paths[1]) in tree.awaited()
        holder.kill()
    paths[1].touch()
    assert tree.awaited().startswith(f"waiting for {paths[1]}, ")


@pytest.mark.parametrize(
    ("named", "plain"),
    [("8.0;9.0a+PTX", "8.0;9.0+PTX"), ("12.0f 8.6", "12.0 8.6")],
)
def test_deepspeed_gets_architectures_that_it_can_read(named, plain, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    process.plain_architectures()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == plain
