"""Verdicts of a trainer's files on made-up memory: what is not predicted stands beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from harness.planner import verdict
from harness.planner.verdict import Uncounted
from harness.system import cards
from tests.made.predictions import asked, made_up, prediction

FILES = Path(__file__).parent / "trainers"


@pytest.fixture
def sizes(monkeypatch):
    """Predictions of as many GiB as the list's one item."""
    found = [1.0]
    made_up(monkeypatch, lambda row: found[0])
    monkeypatch.setenv("COLUMNS", "400")
    return found


@pytest.mark.parametrize(("size", "errs", "sure"), [
    *((size, errs, False) for size, errs in ((1, "more"), (1, ""), (90, "less"), (90, ""))),
    *((size, errs, True) for size, errs in ((1, "less"), (90, "more"))),
])  # fmt: skip
def test_a_verdict_is_sure_only_if_what_is_left_out_cannot_turn_it(size, errs, sure):
    fit = verdict.judge(asked("ddp"), prediction(size), cards.find("RTX-4090"))
    assert fit.verdict == ("fits" if size == 1 else "no")
    found = verdict.with_uncounted(fit, [Uncounted("a setting", "a reason", errs)])
    assert found.verdict == (fit.verdict if sure else "tight")


THREE_BITS = {"quantize: false": "quantize: true, qtype: uint3", "layer_offloading: true,": ""}


@pytest.mark.parametrize("more", [[], ["--check"]])
@pytest.mark.parametrize(("left_out", "given"), [("layer_offloading", {}), ("uint3", THREE_BITS)])
def test_what_needs_less_than_is_counted_is_never_a_no(
    more, left_out, given, sizes, capsys, tmp_path
):
    sizes[0], text = 20.0, (FILES / "layer-offloading.yaml").read_text()
    for old, new in given.items():
        text = text.replace(old, new)
    (tmp_path / "a.yaml").write_text(text)
    code = cli.main(["plan", "--from", str(tmp_path / "a.yaml"), "--gpu", "RTX-3060", *more])
    lines = capsys.readouterr().out.splitlines()
    (said,) = [line for line in lines if "cannot tell: " in line]
    assert "needs less than 20.7" in said and left_out in said and "not counted" in said
    assert code == (1 if more else 0)


@pytest.mark.parametrize("more", [[], ["--check"]])
def test_encoders_that_stay_are_in_the_verdicts_bytes(more, sizes, capsys, tmp_path):
    sizes[0] = 10.0
    text = (FILES / "layer-offloading.yaml").read_text().replace("layer_offloading: true,", "")
    told = []
    for cached in "cache_text_embeddings: true, ", "":
        given = text.replace("cache_text_embeddings: true, ", cached)
        (tmp_path / "a.yaml").write_text(given)
        cli.main(["plan", "--from", str(tmp_path / "a.yaml"), "--gpu", "RTX-4090", *more])
        told.append(capsys.readouterr().out)
    alone, both = told
    assert "needs 10.7" in alone and "needs 18.2" in both  # Qwen3-4B takes 7.5 GiB
