"""Resuming, time left, the search for a batch, hostile text, and other small promises."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness import cli
from harness.launch import checkpoints
from harness.launch.outcome import Facts, classify
from harness.report import build
from harness.report.rendering import pages
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import Spec
from harness.worker.status import Reporter
from strategies.base import BadInput
from tests.children.faked import faked
from tests.made.results import cpu_set


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
        (["--recipe", "single+checkpoint"], "saved with recipe single, not single+checkpoint"),
        (["--seed", "3"], "saved with seed 0, not 3"),
        (["--model", "DiT-T/8:heads=1"], "saved with model DiT-T/8, not DiT-T/8:heads=1"),
    ],
)
def test_another_training_is_refused_before_the_launch(words, said, tmp_path, capsys):
    saved(tmp_path, 5)
    assert resume(tmp_path, *words) == 2
    text = capsys.readouterr().err
    assert said in text and "; resume with the same, or start anew" in text


# ---- hostile text ----

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
