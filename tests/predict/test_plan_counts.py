"""``plan --gpus A B C``: a row for each number of GPUs, each the plan of that number alone."""

from __future__ import annotations

import json

import pytest

from harness import cli
from harness.planner import pool
from tests.made.predictions import prediction

SMALL = ["--model", "DiT-T/4", "--gpu", "H100-80GB"]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Plan, and return the rows as data. A need is the samples of a GPU, and the ranks, in GiB."""

    def predict_all(rows, folder, *, kind, **more):
        return [prediction(5 + row.spec.processes / 1024) for row in rows]

    def rows(*words: str) -> list[dict]:
        file = tmp_path / "told.json"
        assert cli.main(["plan", *SMALL, *words, "--json", str(file)]) == 0
        return json.loads(file.read_text())["rows"]

    monkeypatch.setattr(pool, "predict_all", predict_all)
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


@pytest.mark.parametrize(
    "words", ["--check --recipes ddp", "--advise --recipes ddp", "--largest batch", "--nodes 2"]
)
def test_what_does_not_go_with_several_is_refused_by_name(words, capsys):
    assert cli.main(["plan", *SMALL, "--gpus", "1", "8", *words.split()]) == 2
    said = capsys.readouterr().err
    assert words.split()[0] in said and "give --gpus one number" in said


@pytest.mark.parametrize("option", ["--scale", "--claims", "--keep", "--regime"])
def test_an_ended_option_names_its_way_out(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", *SMALL, option, "8"])
    assert "take " in capsys.readouterr().err
