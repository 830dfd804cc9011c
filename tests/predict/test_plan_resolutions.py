"""``plan --resolution A,B`` on made-up memory: the largest is planned."""

from __future__ import annotations

import json

import pytest

from harness import cli
from harness.planner import pool
from tests.made.predictions import GIB, prediction
from tests.made.publics import MINIATURES

pytestmark = pytest.mark.usefixtures("sure")


@pytest.fixture
def predicted(monkeypatch) -> None:
    """A GiB an eighth of a side of each latent's area."""

    def predict_all(rows, folder, **more):
        space = [row.subject.space for row in rows]
        return [prediction(s.height * s.width / 32 + s.text / 1024) for s in space]

    monkeypatch.setattr(pool, "predict_all", predict_all)
    monkeypatch.setenv("COLUMNS", "120")


def plan(memory: str, *more: str) -> int:
    words = ["plan", "--model", "qwen-image", "--set", MINIATURES["qwen-image"][0]]
    words += ["--gpu-memory", memory, "--recipes", "single+bf16_pure", *more]
    return cli.main(words)


def test_of_several_resolutions_the_largest_is_planned(predicted, tmp_path, capsys):
    file, sizes = tmp_path / "plan.json", "64,128,128x64"
    assert plan("24GiB", "--resolution", sizes, "--text", "5", "--json", str(file)) == 0
    said = capsys.readouterr().out
    assert "qwen-image at 128x128, 5 tokens of text" in said and "Samples" not in said
    found = json.loads(file.read_text())
    assert [round(row["need_bytes"] / GIB, 1) for row in found["rows"]] == [8.7]
    assert plan("7GiB", "--resolution", sizes, "--check") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--resolution", "64,huge"), "resolution has 'huge'; write pixels, as 512,1024"),
        (("--resolution", "64,100,128"), "resolution is 100"),
        (("--model", "DiT-XL/2", "--set", "", "--resolution", "256,512"), "--resolution 512"),
    ],
)
def test_a_resolution_that_cannot_be_is_refused_before_a_prediction(more, words, predicted, capsys):
    assert plan("24GiB", *more) == 2
    caught = capsys.readouterr()
    assert words in caught.err and not caught.out
