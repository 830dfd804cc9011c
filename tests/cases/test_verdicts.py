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


@pytest.mark.parametrize(("size", "errs", "sure"), [
    *((size, errs, False) for size, errs in ((1, "more"), (1, ""), (90, "less"), (90, ""))),
    *((size, errs, True) for size, errs in ((1, "less"), (90, "more"))),
])  # fmt: skip
def test_a_verdict_is_sure_only_if_what_is_left_out_cannot_turn_it(size, errs, sure):
    fit = verdict.judge(asked("ddp"), prediction(size), cards.find("RTX-4090"))
    assert fit.verdict == ("fits" if size == 1 else "no")
    found = verdict.with_uncounted(fit, [Uncounted("a setting", "a reason", errs)])
    assert found.verdict == (fit.verdict if sure else "tight")


NO_OFFLOAD = ("layer_offloading: true,", "")
THREE_BITS = (NO_OFFLOAD, ("quantize: false", "quantize: true, qtype: uint3"))


def planned(patch, folder: Path, gib: float, *words: str, changes=()) -> int:
    """The exit code of a plan of the trainer's file, changed, whose training needs so many GiB."""
    made_up(patch, lambda row: gib)
    patch.setenv("COLUMNS", "400")
    text = (FILES / "layer-offloading.yaml").read_text()
    for before, after in changes:
        text = text.replace(before, after)
    (folder / "a.yaml").write_text(text)
    return cli.main(["plan", "--from", str(folder / "a.yaml"), "--gpu", *words])


@pytest.mark.parametrize("more", [[], ["--check"]])
@pytest.mark.parametrize(("left_out", "changes"), [("layer_offloading", ()), ("uint3", THREE_BITS)])
def test_what_needs_less_than_is_counted_is_never_a_no(
    more, left_out, changes, monkeypatch, capsys, tmp_path
):
    code = planned(monkeypatch, tmp_path, 20.0, "RTX-3060", *more, changes=changes)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "cannot tell: " in line]
    assert "needs less than 20.7" in said and left_out in said and "not counted" in said
    assert code == bool(more)


@pytest.mark.parametrize("more", [[], ["--check"]])
@pytest.mark.parametrize(("changes", "need"), [((), 10.7), ([("cache_text_embeddings: true, ", "")],
                                                           18.2)])  # fmt: skip
def test_encoders_that_stay_are_in_the_verdicts_bytes(
    more, changes, need, monkeypatch, capsys, tmp_path
):
    """Qwen3-4B takes 7.5 GiB."""
    planned(monkeypatch, tmp_path, 10.0, "RTX-4090", *more, changes=[NO_OFFLOAD, *changes])
    assert f"needs {need}" in capsys.readouterr().out
