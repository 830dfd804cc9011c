"""Plans of several numbers of GPUs (a row each) and of several resolutions (the largest)."""

from __future__ import annotations

import json

import pytest

from harness import cli
from tests.made.predictions import GIB, made_up
from tests.made.publics import MINIATURES

SMALL = ["--model", "DiT-T/4", "--gpu", "H100-80GB"]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Plan, and return the rows as data. A need is the samples of a GPU, and the ranks, in GiB."""

    def rows(*words: str) -> list[dict]:
        file = tmp_path / "told.json"
        assert cli.main(["plan", *SMALL, *words, "--json", str(file)]) == 0
        return json.loads(file.read_text())["rows"]

    made_up(monkeypatch, lambda row: 5 + row.spec.processes / 1024)
    return rows


def test_each_row_is_the_plan_of_its_number(told, capsys):
    several = told("--recipes", "ddp", "--gpus", "8", "1024", "1")
    text = " ".join(capsys.readouterr().out.split())
    assert "Nothing above eight GPUs was ever compared with a measurement" in text
    asked = [(row["gpus"], row["recipe"], row["global_batch"]) for row in several]
    assert asked == [(1, "single", 32), (8, "ddp", 256), (1024, "ddp", 32 * 1024)]
    for row in several:
        (alone,) = told("--recipes", "ddp", "--gpus", str(row["gpus"]))
        assert alone == {name: row[name] for name in alone}
    assert len({row["need_bytes"] for row in several}) == 3


def test_a_number_that_cannot_be_is_told_and_the_others_are_planned(told, capsys):
    words = ["--recipes", "ddp", "--global-batch", "8", "--gpus", "3", "8"]
    first, second = told(*words)
    assert "3 GPUs: global_batch 8 does not divide" in " ".join(capsys.readouterr().out.split())
    assert first["refused"] and (second["gpus"], second["recipe"]) == (8, "ddp")


# ---- resolutions, on made-up memory ----


@pytest.fixture
def predicted(monkeypatch, sure) -> None:
    """A GiB an eighth of a side of each latent's area."""

    def need(row):
        space = row.subject.space
        return space.height * space.width / 32 + space.text / 1024

    made_up(monkeypatch, need)
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
