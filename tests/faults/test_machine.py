"""What really runs is killed, stopped, starved of disk and memory, its output closes or fills up:
nothing that was measured is lost, nothing is left running, and the row says what happened. Those of
real processes by hand: ``./run.sh test -m faults``.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from harness import ROOT, cli
from harness.result import Result, Status, load
from tests.children.faked import faked
from tests.made.living import left, ranks, until

SETTINGS = {
    "model": "DiT-T/8", "data": "synthetic", "global-batch": "4", "processes": "2", "device": "cpu",
    "warmup": "1", "noise-floor": "1",
}  # fmt: skip
by_hand = pytest.mark.faults
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")


def start(
    out: Path, *recipes: str, runs: str | None = None, how: dict | None = None, **options: str
) -> subprocess.Popen:
    """``./run.sh run`` in a session of its own; ``runs``: with rows of ``tests.children.faked``."""
    module = ["harness"] if runs is None else ["tests.children.faked", runs]
    words = ["run", "--recipes", *recipes, "--out", str(out), "--no-predictions"]
    for name, value in {**SETTINGS, **options}.items():
        words += [f"--{name}", value]
    return subprocess.Popen(
        [sys.executable, "-m", *module, *words],
        cwd=ROOT, text=True, start_new_session=True,
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
           **(how or {})},
    )  # fmt: skip


def measuring(out: Path, count: int = 1, recipe: str = "ddp") -> dict[int, int]:
    until(lambda: len(ranks(out, recipe)) == count)
    return ranks(out, recipe)


def rows(out: Path) -> dict[str, Result]:
    found = [load(path) for path in out.glob("runs/*/result.json")]
    return {result.spec.recipe: result for result in found}


def ended(child: subprocess.Popen, out: Path) -> str:
    """What it said, once nothing of it is left."""
    said = child.communicate(timeout=240)[0]
    until(lambda: not left(out))
    return said


@by_hand
def test_a_process_that_is_killed_fails_its_row_and_the_next_one_runs(tmp_path):
    """A rank of the first row, and the launcher of the second."""
    child = start(tmp_path, "ddp", "zero2", "single", steps="100")
    os.kill(measuring(tmp_path, 2)[1], signal.SIGKILL)
    os.kill(psutil.Process(measuring(tmp_path, 2, "zero2")[1]).ppid(), signal.SIGKILL)
    said = ended(child, tmp_path)
    for row in (rows(tmp_path)[name] for name in ("ddp", "zero2")):
        assert row.status is Status.FAILED, said
        assert "SIGKILL" in row.reason and "measure" in row.reason and row.way_out
    assert child.returncode == 1
    assert rows(tmp_path)["single"].status is Status.OK, "as if nothing had been"
    assert "NOT the requested reference: ddp ended as failed" in " ".join(said.split())


@by_hand
def test_nothing_is_left_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    child = start(tmp_path / "out", "zero2", steps="2")
    said = ended(child, tmp_path / "out")
    assert child.returncode == 0, said
    own = f"headroom-{os.getuid()}"  # what is known of the machine, kept on purpose
    assert {path.name for path in (tmp_path / "tmp").iterdir()} <= {own}


@by_hand
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


@by_hand
def test_a_rank_that_is_stopped_runs_into_the_deadline(tmp_path):
    child = start(tmp_path, "ddp", "single", runs="ddp", timeout="12")
    os.kill(measuring(tmp_path)[0], signal.SIGSTOP)
    said = ended(child, tmp_path)
    row = rows(tmp_path)["ddp"]
    assert (child.returncode, row.status) == (1, Status.TIMEOUT), said
    assert "not finished after 12 s: stopped in phase measure" in row.reason
    assert rows(tmp_path)["single"].status is Status.OK


@by_hand
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


@by_hand
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


@by_hand
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


@by_hand
@root
def test_a_container_limit_is_out_of_memory_with_its_size(tmp_path, group):
    child = start(tmp_path, "single", "ddp", runs="hungry:ddp")
    (group / "cgroup.procs").write_text(str(child.pid))
    said = ended(child, tmp_path)
    row = rows(tmp_path)["ddp"]
    assert (child.returncode, row.status) == (1, Status.HOST_OOM), said
    assert f"by the container's memory limit of {LIMIT / 2**30:.1f} GiB" in row.reason
    assert row.way_out and rows(tmp_path)["single"].status is Status.OK


# ---- standard output, and signals ----


ROWS = ["ddp", "zero2"]


def words(out: Path) -> list[str]:
    told = ["--data", "synthetic", "--noise-floor", "1", "--no-predictions", "--out", str(out)]
    return ["run", "--recipes", *ROWS, *told]


def call(given: list[str], stream, monkeypatch) -> int:
    monkeypatch.setattr(sys, "stdout", stream)
    with faked():
        return cli.main(given)


def kept(out: Path) -> list[str]:
    found = (json.loads(path.read_text()) for path in out.glob("runs/*/result.json"))
    return sorted(result["spec"]["recipe"] for result in found)


def test_a_reader_who_leaves_does_not_stop_the_rows(tmp_path, monkeypatch, capsys):
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as stream:
        assert call(words(tmp_path), stream, monkeypatch) == 0
    assert kept(tmp_path) == ROWS and (tmp_path / "report.md").exists()
    said = capsys.readouterr().err
    assert said.count("standard output was closed (Broken pipe): the run continues") == 1


def test_a_full_output_is_said_and_stops_no_row(tmp_path, monkeypatch, capsys):
    with open("/dev/full", "w") as stream:
        assert call(words(tmp_path), stream, monkeypatch) == 1, "not all of it was written"
    assert kept(tmp_path) == ROWS and (tmp_path / "report.html").exists()
    said = capsys.readouterr().err
    assert "standard output is incomplete: No space left on device" in said


def test_an_output_of_ascii_gets_escapes(tmp_path, monkeypatch):
    folder, raw = tmp_path / "Ergebnisse-\u00fc", io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    assert call(words(folder), stream, monkeypatch) == 0
    stream.flush()
    assert b"Ergebnisse-\\xfc/report.html" in raw.getvalue() and kept(folder) == ROWS


def test_closed_descriptors_are_not_taken_by_results(tmp_path):
    closed = {"preexec_fn": lambda: [os.close(n) for n in (0, 1)]}
    child = start(tmp_path, *ROWS, runs="none", how=closed)
    said = child.communicate(timeout=120)[0]
    assert child.returncode == 0 and "Traceback" not in said, said
    assert kept(tmp_path) == ROWS and (tmp_path / "report.md").read_text().startswith("# Headroom")


def hanging(out: Path) -> list[Path]:
    return list(out.glob("runs/zero2-*/ready"))


def test_a_closed_terminal_ends_the_suite_with_a_report(tmp_path):
    """The kernel sends SIGHUP, and what is then printed fails with EIO."""
    ours, theirs = os.openpty()

    def take() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": take}
    child = start(tmp_path, *ROWS, runs="zero2", how=ends)
    os.close(theirs)
    until(lambda: hanging(tmp_path))
    os.close(ours)
    assert child.wait(60) == 130
    assert "1 interrupted" in (tmp_path / "report.md").read_text() and kept(tmp_path) == ROWS
    until(lambda: not left(tmp_path))


def test_two_signals_do_not_cut_the_report_short(tmp_path):
    child = start(tmp_path, *ROWS, runs="zero2")
    until(lambda: hanging(tmp_path))
    child.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 130, child.communicate()
    assert "1 interrupted" in (tmp_path / "report.md").read_text()
    child.communicate()


def test_a_signal_between_rows_ends_as_ctrl_c_does(tmp_path, monkeypatch, capsys):
    from harness.suite import run as suite_run

    real, seen = suite_run.run_row, []

    def then_a_signal(*given):
        seen.append(real(*given))
        os.kill(os.getpid(), signal.SIGTERM)
        return seen[-1]

    monkeypatch.setattr(suite_run, "run_row", then_a_signal)
    with faked():
        assert cli.main(words(tmp_path)) == 130
    assert len(seen) == 1 and (tmp_path / "report.md").exists()
    assert "interrupted after" in capsys.readouterr().out


def test_a_report_is_there_before_the_predictions(tmp_path, monkeypatch, capsys):
    from harness.planner import pool

    def ends(*given, **more):
        assert (tmp_path / "report.md").exists(), "a kill in these minutes would lose it"
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "predict_all", ends)
    given = words(tmp_path)
    given.remove("--no-predictions")
    with faked():
        assert cli.main(given) == 130
    assert "interrupted after 2 of 2 runs" in capsys.readouterr().out
