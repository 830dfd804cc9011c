"""Standard output that closes, fills up or knows ASCII alone, and signals: rows go on, what was
measured is reported."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

from harness import ROOT, cli
from tests.children.faked import faked
from tests.made.living import left, until

ROWS = ["ddp", "zero2"]


def words(out: Path, *recipes: str) -> list[str]:
    told = ["--data", "synthetic", "--noise-floor", "1", "--no-predictions", "--out", str(out)]
    return ["run", "--recipes", *(recipes or ROWS), *told]


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
    child = start("none", *words(tmp_path), preexec_fn=lambda: [os.close(n) for n in (0, 1)])
    said = child.communicate(timeout=120)[1]
    assert child.returncode == 0 and "Traceback" not in said, said
    assert kept(tmp_path) == ROWS and (tmp_path / "report.md").read_text().startswith("# Headroom")


# ---- signals ----


def start(hangs: str, *given: str, **more) -> subprocess.Popen:
    usual = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.children.faked", hangs, *given],
        cwd=ROOT, text=True, start_new_session=True, **usual | more,
    )  # fmt: skip


def hanging(out: Path) -> list[Path]:
    return list(out.glob("runs/zero2-*/ready"))


def test_a_closed_terminal_ends_the_suite_with_a_report(tmp_path):
    """The kernel sends SIGHUP, and what is then printed fails with EIO."""
    ours, theirs = os.openpty()

    def take() -> None:
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": take}
    child = start("zero2", *words(tmp_path), **ends)
    os.close(theirs)
    until(lambda: hanging(tmp_path))
    os.close(ours)
    assert child.wait(60) == 130
    assert "1 interrupted" in (tmp_path / "report.md").read_text() and kept(tmp_path) == ROWS
    until(lambda: not left(tmp_path))


def test_two_signals_do_not_cut_the_report_short(tmp_path):
    child = start("zero2", *words(tmp_path))
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
