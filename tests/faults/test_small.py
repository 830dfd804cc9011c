"""Resuming, time left, the search for a batch, hostile text, and other small promises."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from harness import cli
from harness.commands import max_batch, train
from harness.commands.progress import Progress
from harness.launch import checkpoints
from harness.launch.outcome import Facts, classify
from harness.report import build, write_report
from harness.report.rendering import pages
from harness.resolve import resolve
from harness.result import BadResult, LaunchRecord, Result, Status, load
from harness.spec import Spec
from harness.system.process import Interrupted
from harness.worker.status import Reporter
from strategies.base import BadInput
from tests.children.faked import faked
from tests.made.results import cpu_set, ok


def call(words: list[str]) -> int:
    try:
        with faked():
            return cli.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


# ---- resuming a training ----

TRAIN = ["train", "--recipe", "single", "--model", "DiT-T/8", "--steps", "20", "--resume"]
SPEC = Spec(recipe="single", model="DiT-T/8", objective="flow", steps=18, ema=0.998,
            learning_rate=2e-3, beta2=0.99)  # fmt: skip


def saved(folder: Path, step: int, *, cut: bool = False, **others) -> Path:
    """A checkpoint as a training leaves it; ``cut``: as a disk that filled up left it."""
    path = folder / f"step-{step:08d}"
    (path / "engine").mkdir(parents=True)
    (path / "engine" / "shard.pt").write_bytes(b"x" * 100)
    facts = {**checkpoints.terms(resolve(SPEC)), "step": step, "files": checkpoints.sizes(path)}
    (path / checkpoints.DONE).write_text(json.dumps(facts | others))
    if cut:
        (path / "engine" / "shard.pt").write_bytes(b"x" * 60)
    return path


def resume(folder: Path, *words: str) -> int:
    return call([*TRAIN, "--checkpoint", str(folder), "--out", str(folder / "run"), "--dry-run",
                 *words])  # fmt: skip


def test_a_cut_checkpoint_is_passed_over_and_said(tmp_path, capsys):
    older, newer = saved(tmp_path, 5), saved(tmp_path, 10, cut=True)
    assert checkpoints.newest_whole(tmp_path)[0] == older
    assert resume(tmp_path) == 0
    said = capsys.readouterr().out
    why = f"{newer.name} is incomplete: engine/shard.pt has 60 of 100 bytes"
    assert f"{why}\nresumes {older.name}" in said
    (newer / "engine" / "shard.pt").unlink()
    assert "is missing" in checkpoints.fault(newer)
    (newer / checkpoints.DONE).write_text("{half")
    assert "not readable" in checkpoints.fault(newer) and checkpoints.fault(older) == ""


def test_without_a_whole_checkpoint_nothing_begins_anew_unasked(tmp_path, capsys):
    saved(tmp_path, 5, cut=True)
    assert resume(tmp_path) == 2
    assert "has no checkpoint to resume (step-00000005 is in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "DiT-T/4"], "saved with model DiT-T/8, not DiT-T/4"),
        (["--recipe", "single+checkpoint"], "saved with recipe single, not single+checkpoint"),
        (["--global-batch", "32"], "saved with global_batch 16, not 32"),
        (["--seed", "3"], "saved with seed 0, not 3"),
        (["--objective", "epsilon"], "saved with objective flow, not epsilon"),
        (["--model", "DiT-T/8:heads=1"], "saved with model DiT-T/8, not DiT-T/8:heads=1"),
    ],
)
def test_another_training_is_refused_before_the_launch(words, said, tmp_path, capsys):
    saved(tmp_path, 5)
    assert resume(tmp_path, *words) == 2
    text = capsys.readouterr().err
    assert said in text and "; resume with the same, or start anew" in text


def test_a_training_of_so_many_steps_takes_so_many(tmp_path, capsys):
    assert call([*TRAIN[:-1], "--out", str(tmp_path), "--dry-run"]) == 0
    line = capsys.readouterr().out
    assert "--steps 18" in line and Spec(recipe="single").warmup == 2, "and two of warm-up"
    assert call([*TRAIN[:4], "DiT-T/8", "--steps", "2", "--out", str(tmp_path)]) == 2
    assert "give --steps at least 3" in capsys.readouterr().err
    saved(tmp_path / "checkpoint", 20)
    assert call([*TRAIN, "--out", str(tmp_path), "--dry-run"]) == 2
    assert "has already taken 20 steps" in capsys.readouterr().err


def test_a_short_training_s_first_and_last_losses_are_of_different_steps():
    assert train.ends([4.0, 3.0, 2.0, 1.0]) == (3.5, 1.5)
    assert train.ends([2.0]) == (2.0, 2.0)
    assert train.ends([float(step) for step in range(100)]) == (9.5, 89.5)


# ---- time left, and the search for a batch ----


def test_time_left_is_not_learnt_from_rows_that_were_killed():
    now = [0.0]
    progress = Progress(Console(file=io.StringIO()), lambda: now[0])
    progress.begin_suite("x", list("abc"), [True] * 3)
    for status, seconds, rest in (
        (Status.TIMEOUT, 1800, None),
        (Status.GPU_OOM, 3, None),
        (Status.OK, 60, 120),
    ):
        progress.begin_run("a", 1800)
        now[0] += seconds
        result = ok("ddp")
        result.status = status
        progress.end_run(result)
        progress.begin_run("b", None)
        assert progress.rest_seconds() == rest
        progress.done -= 1


def test_an_interrupted_search_keeps_what_it_knew(tmp_path, monkeypatch, capsys):
    def start(resolved, folder, **more) -> Result:
        if resolved.micro_batch == 64:
            raise Interrupted(2, None)
        status = Status.OK if resolved.micro_batch <= 20 else Status.HOST_OOM
        return Result(status=status, spec=resolved.spec, reason="full", way_out="less")

    search = max_batch.Search
    monkeypatch.setattr(max_batch, "Search", lambda **given: search(**given, start=start))
    words = ["max-batch", "--recipe", "single", "--device", "cpu", "--out", str(tmp_path)]
    assert call([*words, "--first", "16", "--most", "64"]) == 0
    assert "each probe is a run of its own: 16 to 64" in capsys.readouterr().out
    words[-1] = str(tmp_path / "cut")
    assert call([*words, "--first", "64", "--most", "256"]) == 130
    assert "interrupted: no probe had ended; the same command resumes" in capsys.readouterr().out
    monkeypatch.setattr(max_batch, "Search", lambda **given: search(
        **given, start=lambda resolved, folder, **more: dataclasses.replace(
            start(resolved, folder, **more), status=Status.OK)))  # fmt: skip
    assert call([*words, "--first", "16", "--most", "256"]) == 130
    assert "interrupted: 32 fits; the same command resumes" in capsys.readouterr().out
    kept = json.loads((tmp_path / "cut" / "max_batch.json").read_text())
    assert (kept["micro_batch"], kept["largest_known_to_fit"]) == (None, 32)


# ---- another Headroom ----


def test_another_headroom_at_work_is_said_in_the_row_and_in_the_report():
    results = list(cpu_set().values())
    done = next(r for r in results if r.spec.recipe == "zero2")
    done.launch = LaunchRecord(exit_code=0, wall_seconds=9.0, tree_peak_bytes=1, others=[4711])
    out = io.StringIO()
    progress = Progress(Console(file=out, width=100))
    progress.begin_suite("x", ["zero2"], [True])
    progress.begin_run("zero2", None)
    progress.end_run(done)
    assert "another Headroom was at work meanwhile (process 4711)" in out.getvalue()
    text = pages.render_markdown(build(results, []))
    assert "Another Headroom ran on the machine during zero2, so their times" in text
    done.launch.others = []
    assert "Another Headroom" not in pages.render_markdown(build(results, []))


# ---- hostile text ----


@pytest.mark.parametrize("depth", [60, 900, 100_000])
def test_a_result_nested_too_deep_is_skipped_by_name(depth, tmp_path):
    path = tmp_path / "runs" / "x" / "result.json"
    path.parent.mkdir(parents=True)
    data = dataclasses.asdict(cpu_set()["ddp"]) | {"configs": "HERE"}
    deep = "[" * depth + "]" * depth
    path.write_text(json.dumps(data).replace('"HERE"', f'{{"x": {deep}}}'))
    with pytest.raises(BadResult, match=r"result.json: (unreadable as JSON|nested deeper)"):
        load(path)
    (tmp_path / "suite.json").write_text("[" * depth)
    assert len(write_report(list(cpu_set().values()), [], tmp_path)) == 4


EVIL = "<img src=x onerror=alert(1)> [here](javascript:alert(1)) ```\n# no"


def test_markdown_holds_what_results_say_as_text(tmp_path):
    results = list(cpu_set().values())
    results[0].meter_notes = [EVIL]
    for result in results:
        result.environment = {**result.environment, "cpu": EVIL}
    results[0].command = f"echo {EVIL}"
    lost = Result(status=Status.FAILED, spec=results[1].spec, reason=EVIL, way_out=EVIL)
    text = pages.render_markdown(build([*results, lost], [f"x/result.json: {EVIL}"]))
    fences = re.findall(r"^(`{3,})sh\n(.*?)^\1$", text, re.S | re.M)
    assert len(fences) == 1 and "# no" in fences[0][1], "the block ends where it was ended by us"
    prose = text.replace(fences[0][1], "")
    bare = re.sub(r"`[^`]*`", "", prose)
    assert "&lt;img" in bare and "<img" not in bare and "](javascript" not in bare


# ---- values ----


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipes", "ddp", "--out", ""], "--out: the folder's name is empty"),
        (["train", "--recipe", "ddp", "--out", " "], "--out: the folder's name is empty"),
        (["report", ""], "the folder's name is empty"),
        (["--recipes", "ddp", "--seed", str(2**64)], f"give --seed at most {2**63 - 1}"),
        (
            ["train", "--recipe", "single+checkpoint:every=999", "--model", "DiT-T/4"],
            "every=999, and the model has 4 blocks; give at most 4",
        ),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(words, said, capsys):
    assert call(words) == 2
    text = capsys.readouterr().err
    assert said in text and len(text.splitlines()) == 1


def test_the_way_out_is_the_one_that_the_reason_has(tmp_path):
    said = BadInput("latents/3.npy holds values that are not finite; extract it again")
    failures = []
    for error in (said, ValueError(str(said))):
        Reporter(tmp_path, 1).failed(error)
        failures.append(json.loads((tmp_path / "ranks" / "rank1.failure.json").read_text()))
    ended = classify(Facts(failures=(failures[0],)))
    assert ended.reason.endswith("holds values that are not finite")
    assert ended.hint == "extract it again"
    other = classify(Facts(failures=(failures[1],)))
    assert "log.txt" in other.hint and "extract it again" in other.reason


def test_every_option_says_its_default():
    (commands,) = (a for a in cli._parser()._actions if a.dest == "command")
    silent = [
        f"{name} {action.option_strings[0]}"
        for name, parser in commands.choices.items()
        for action in parser._actions
        if action.option_strings and action.dest != "help" and not action.required
        and "default" not in (action.help or "")
    ]  # fmt: skip
    assert silent == []
