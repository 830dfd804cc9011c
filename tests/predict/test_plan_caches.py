"""``plan --data`` on made-up memory: planned for the largest samples of a cache, told for each."""

from __future__ import annotations

import json

import pytest

from harness import cli
from harness.planner import pool
from tests.made import caches
from tests.made.predictions import GIB, prediction
from tests.made.publics import MINIATURES

pytestmark = pytest.mark.usefixtures("sure")

SMALL, TALL, LARGE = (1, 8, 8), (1, 16, 8), (1, 16, 16)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> str:
    """One sample of each size but the smallest, of which there are two; a GiB an eighth of a side
    of each latent's area."""

    def predict_all(rows, folder, **more):
        space = [row.subject.space for row in rows]
        return [prediction(s.height * s.width / 32 + s.text / 1024) for s in space]

    monkeypatch.setattr(pool, "predict_all", predict_all)
    monkeypatch.setenv("COLUMNS", "120")
    sizes = {SMALL: 2, LARGE: 1, TALL: 1}
    return caches.musubi(tmp_path / "cache", "qwen-image", sizes, tokens=(5, 7))


def plan(cache: str, memory: str, *more: str) -> int:
    words = ["plan", "--model", "qwen-image", "--set", MINIATURES["qwen-image"][0]]
    words += ["--data", cache] if cache else []
    words += ["--gpu-memory", memory, "--recipes", "single+bf16_pure", *more]
    return cli.main(words)


def test_a_cache_is_planned_for_its_largest_and_told_for_each_size(cache, tmp_path, capsys):
    assert plan(cache, "24GiB", "--json", str(tmp_path / "plan.json")) == 0
    said = capsys.readouterr().out
    assert "qwen-image at 128x128, 5 tokens of text" in said
    assert "at each size; the plan above is for the largest:" in said
    found = json.loads((tmp_path / "plan.json").read_text())
    told = [(b["resolution"], b["samples"], round(b["need_bytes"] / GIB, 1))
            for b in found["buckets"]]  # fmt: skip
    assert told == [("128x128", 1, 8.7), ("128x64", 1, 4.7), ("64x64", 2, 2.7)]
    assert found["rows"][0]["need_bytes"] == found["buckets"][0]["need_bytes"]


def test_one_size_of_it_can_be_asked_for(cache, capsys):
    assert plan(cache, "24GiB", "--resolution", "64") == 0
    assert "qwen-image at 64x64, 7 tokens" in capsys.readouterr().out


def test_a_guard_judges_the_largest(cache, capsys):
    assert plan(cache, "9GiB", "--check") == 0
    assert "needs 8.7 (8.7 to 8.7) of 9.0 GiB" in capsys.readouterr().out
    assert plan(cache, "9GiB", "--check", "--resolution", "64") == 0
    assert "needs 2.7 (2.7 to 2.7) of 9.0 GiB" in capsys.readouterr().out


def test_of_several_resolutions_the_largest_is_planned(cache, tmp_path, capsys):
    file, sizes = tmp_path / "plan.json", "64,128,128x64"
    assert plan("", "24GiB", "--resolution", sizes, "--text", "5", "--json", str(file)) == 0
    said = capsys.readouterr().out
    assert "qwen-image at 128x128, 5 tokens of text" in said and "Samples" not in said
    found = json.loads(file.read_text())
    told = [(b["resolution"], round(b["need_bytes"] / GIB, 1)) for b in found["buckets"]]
    assert told == [("128", 8.7), ("128x64", 4.7), ("64", 2.7)]
    assert plan("", "7GiB", "--resolution", sizes, "--check") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--resolution", "64,huge"), "resolution has 'huge'; write pixels, as 512,1024"),
        (("--resolution", "64,100,128"), "resolution is 100"),
        (("--model", "DiT-XL/2", "--set", "", "--resolution", "256,512"), "--resolution 512"),
    ],
)
def test_a_resolution_that_cannot_be_is_refused_before_a_prediction(more, words, cache, capsys):
    assert plan("", "24GiB", *more) == 2
    caught = capsys.readouterr()
    assert words in caught.err and not caught.out


@pytest.mark.parametrize(
    ("data", "more", "words"),
    [
        ("synthetic", (), "a plan reads only caches (musubi:FOLDER, finetrainers:FOLDER)"),
        ("", ("--resolution", "96"), "which has no samples of 96; give --resolution"),
        ("", ("--model", "DiT-XL/2", "--set", ""), "a cache of a public model's latents"),
        ("", ("--model", "wan2.1-1.3b", "--set", ""), "model wan2.1-1.3b is not trained from"),
    ],
)
def test_what_cannot_be_is_refused(data, more, words, cache, capsys):
    assert plan(data or cache, "24GiB", *more) == 2
    assert words in capsys.readouterr().err
