"""What really runs is killed, stopped, starved of disk and memory: nothing that was measured is
lost, nothing is left running, and the row says what happened. By hand: ``./run.sh test -m faults``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ROOT
from harness.result import Result, Status, load
from tests.made.living import left, ranks, until

pytestmark = pytest.mark.faults

SETTINGS = {
    "model": "DiT-T/8", "data": "synthetic", "global-batch": "4", "processes": "2", "device": "cpu",
    "warmup": "1", "noise-floor": "1",
}  # fmt: skip
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")


def start(out: Path, *recipes: str, runs: str | None = None, **options: str) -> subprocess.Popen:
    """``./run.sh run`` in a session of its own: as it is, or with rows that end at once but for the
    one that ``runs`` names (``tests.children.faked``)."""
    module = ["harness"] if runs is None else ["tests.children.faked", runs]
    words = ["run", "--recipes", *recipes, "--out", str(out), "--no-predictions"]
    for name, value in {**SETTINGS, **options}.items():
        words += [f"--{name}", value]
    return subprocess.Popen(
        [sys.executable, "-m", *module, *words],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def measuring(out: Path, count: int = 1, recipe: str = "ddp") -> dict[int, int]:
    until(lambda: len(ranks(out, recipe)) == count)
    return ranks(out, recipe)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rows(out: Path) -> dict[str, Result]:
    found = [load(path) for path in out.glob("runs/*/result.json")]
    return {result.spec.recipe: result for result in found}


def ended(child: subprocess.Popen, out: Path) -> str:
    """What it said, once nothing of it is left."""
    said = child.communicate(timeout=240)[0]
    until(lambda: not left(out))
    return said


def test_a_process_that_is_killed_fails_its_row_and_the_next_one_runs(tmp_path):
    """A rank of the first row, and the launcher of the second."""
    child = start(tmp_path, "ddp", "zero2", "single", steps="100")
    os.kill(measuring(tmp_path, 2)[1], signal.SIGKILL)
    os.kill(parent(measuring(tmp_path, 2, "zero2")[1]), signal.SIGKILL)
    said = ended(child, tmp_path)
    for row in (rows(tmp_path)[name] for name in ("ddp", "zero2")):
        assert row.status is Status.FAILED, said
        assert "SIGKILL" in row.reason and "measure" in row.reason and row.way_out
    assert child.returncode == 1
    assert rows(tmp_path)["single"].status is Status.OK, "as if nothing had been"
    assert "NOT the requested reference: ddp ended as failed" in " ".join(said.split())


def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    child = start(tmp_path / "out", "zero2", steps="2")
    said = ended(child, tmp_path / "out")
    assert child.returncode == 0, said
    own = f"headroom-{os.getuid()}"  # what is known of the machine, kept on purpose
    assert {path.name for path in (tmp_path / "tmp").iterdir()} <= {own}


def test_a_harness_that_is_killed_leaves_nothing_and_the_same_command_goes_on(tmp_path):
    child = start(tmp_path, "single", "ddp", runs="ddp")
    measuring(tmp_path)
    child.kill()
    child.wait()
    until(lambda: not left(tmp_path))
    assert rows(tmp_path)["single"].status is Status.OK, "what had ended is kept"
    again = start(tmp_path, "single", "ddp", runs="none")
    said = ended(again, tmp_path)
    assert again.returncode == 0 and "2 runs, 1 to do" in said, said


def test_a_rank_that_is_stopped_runs_into_the_deadline(tmp_path):
    child = start(tmp_path, "ddp", "single", runs="ddp", timeout="12")
    os.kill(measuring(tmp_path)[0], signal.SIGSTOP)
    said = ended(child, tmp_path)
    row = rows(tmp_path)["ddp"]
    assert (child.returncode, row.status) == (1, Status.TIMEOUT), said
    assert "not finished after 12 s: stopped in phase measure" in row.reason
    assert rows(tmp_path)["single"].status is Status.OK


def test_two_harnesses_notice_each_other(tmp_path):
    first = start(tmp_path / "one", "ddp", runs="ddp")
    measuring(tmp_path / "one")
    same = start(tmp_path / "one", "ddp", runs="none")
    said = same.communicate(timeout=120)[0]
    assert same.returncode == 2 and "another run is writing to" in said
    second = start(tmp_path / "two", "ddp", runs="good:ddp")
    said = " ".join(ended(second, tmp_path / "two").split())
    assert "another Headroom runs on this machine" in said
    (row,) = (load(path) for path in (tmp_path / "two").glob("runs/*/result.json"))
    assert ranks(tmp_path / "one")[0] in row.launch.others
    assert "another Headroom was at work meanwhile" in said
    first.send_signal(signal.SIGTERM)
    ended(first, tmp_path / "one")
    assert first.returncode == 130


# ---- disks and memory ----


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=96m", "headroom", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def filled(out: Path) -> list[str]:
    for size in (1 << 20, 4096, 1):
        path = out.parent / f"ballast-{size}"
        with path.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while stream.write(b"x" * size) == size:
                pass
    return ["true"]


def only_to_be_read(out: Path) -> list[str]:
    """Open files keep the disk itself from becoming so: each new one is met by a mount over it."""
    subprocess.run(["mount", "--bind", out, out], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", out], check=True)
    return ["umount", "-l", str(out)]


@root
@pytest.mark.parametrize(
    ("befalls", "said"),
    [(filled, "No space left on device"), (only_to_be_read, "Read-only file system")],
)
def test_a_disk_that_fails_mid_run_is_named_and_what_was_measured_is_kept(disk, befalls, said):
    child = start(disk / "out", "single", "ddp", runs="ddp")
    measuring(disk / "out")
    undo = befalls(disk / "out")
    try:
        child.send_signal(signal.SIGTERM)
        text = ended(child, disk / "out")
        assert child.returncode == 2 and said in text, text
        assert "Traceback" not in text and "Samples/s" in text, "what was measured is told"
        assert rows(disk / "out")["single"].status is Status.OK
    finally:
        subprocess.run(undo, check=True)


@root
def test_a_report_on_a_disk_that_may_only_be_read_prints_its_table(disk):
    shutil.copytree(ROOT / "tests" / "golden" / "report" / "cpu", disk / "set")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    words = [sys.executable, "-m", "harness", "report", str(disk / "set")]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1 and "Samples/s" in told.stdout and told.stderr == ""
    assert f"not written: {disk}/set/report.md: Read-only file system" in told.stdout


GROUPS = Path("/sys/fs/cgroup")
NAME = "headroom-faults"
LIMIT = 512 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with so little memory: of version 2, or of version 1."""
    folder = GROUPS / NAME if (GROUPS / "cgroup.controllers").exists() else GROUPS / "memory" / NAME
    limit = "memory.max" if folder.parent == GROUPS else "memory.limit_in_bytes"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT))
    except OSError as error:
        if folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@root
def test_a_container_limit_is_out_of_memory_with_its_size(tmp_path, group):
    child = start(tmp_path, "single", "ddp", runs="hungry:ddp")
    (group / "cgroup.procs").write_text(str(child.pid))
    said = ended(child, tmp_path)
    row = rows(tmp_path)["ddp"]
    assert (child.returncode, row.status) == (1, Status.HOST_OOM), said
    assert f"by the container's memory limit of {LIMIT / 2**30:.1f} GiB" in row.reason
    assert row.way_out and rows(tmp_path)["single"].status is Status.OK
