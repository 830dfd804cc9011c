"""Comparing two result sets: only what the noise does not explain is a change."""

from __future__ import annotations

import dataclasses
import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from harness.report import build, compare, print_comparison
from harness.report.data.compare import compare_reports
from harness.result import Result, Status, load_all

GOLDEN = Path(__file__).parents[1] / "golden" / "report"
MIB = 2**20


def told(found) -> str:
    """The comparison as it is printed, in a line a paragraph."""
    stream = io.StringIO()
    print_comparison(found, Console(file=stream, width=400))
    return stream.getvalue()


def recorded() -> list[Result]:
    return load_all(GOLDEN / "cpu")[0]


def once() -> list[Result]:
    """The recorded set without its repetitions."""
    return [result for result in recorded() if not result.spec.repeat]


def after(edit, recipe: str = "zero3", results_of=recorded):
    """The comparison of the recorded set with one in which ``recipe`` is edited; its change."""
    results = results_of()
    for result in results:
        if result.spec.recipe == recipe:
            edit(result)
    found = compare_reports(build(results_of(), []), build(results, []))
    return next(c for c in found.changes if c.label == recipe), found


def slow(factor: float):
    def edit(result: Result) -> None:
        for rank in result.ranks:
            rank.step_seconds = [s * factor for s in rank.step_seconds]

    return edit


def grow(size: int):
    def edit(result: Result) -> None:
        for rank in result.ranks:
            for peak in rank.phases.values():
                peak.allocated += size
            rank.categories.workspace += size

    return edit


def test_a_set_compared_with_itself_is_unchanged():
    found = compare(GOLDEN / "cpu", GOLDEN / "cpu")
    assert found.changed == []
    assert found.environment == []
    assert len(found.changes) == 14
    assert "0 changed beyond noise" in told(found)


@pytest.mark.parametrize(("edit", "words"), [
    (slow(1.3), "SLOWER"), (slow(0.7), "faster"), (slow(1.01), ""),
    (grow(100 * MIB), "MORE MEMORY"), (grow(-100 * MIB), "less memory"), (grow(MIB), ""),
])  # fmt: skip
def test_what_counts_as_a_change(edit, words):
    change, found = after(edit)
    assert change.words == words
    assert len(found.changed) == bool(words)


@pytest.mark.parametrize(
    ("results_of", "factor", "words"),
    [(recorded, 1.04, "SLOWER"), (once, 1.04, ""), (once, 1.3, "SLOWER")],
)
def test_repetitions_show_what_the_spread_of_steps_would_hide(results_of, factor, words):
    change, found = after(slow(factor), results_of=results_of)
    assert change.words == words
    assert (change.step_limit_fraction is None) == (results_of is once)
    text = told(found)
    if results_of is once:
        assert "Steps are judged by their own spread: neither set measured a row twice." in text
        assert "Limit %" not in next(x for x in text.splitlines() if "Recipe" in x)
    else:
        assert "by run-to-run variance (old: ddp was measured 3 times (412.5, 410.1, 415.8" in text
        assert f" {100 * change.step_limit_fraction:.1f} " in text


def test_repetitions_far_apart_hide_what_steps_alone_would_show():
    """All of one run's steps are slow: no interval within a run knows of it."""

    def unsteady() -> list[Result]:
        results = recorded()
        for result in results:
            for rank in result.ranks:
                rank.step_seconds = [s * (1 + 0.2 * result.spec.repeat) for s in rank.step_seconds]
        return results

    change, _ = after(slow(1.3), results_of=unsteady)
    assert not change.intervals_overlap and change.words == ""
    assert after(slow(5.0), results_of=unsteady)[0].words == "SLOWER"


def shift_norms(share: float):
    def edit(result: Result) -> None:
        result.grad_norms = [norm * (1 + share) for norm in result.grad_norms]

    return edit


@pytest.mark.parametrize(("share", "recipe", "words"), [
    (4e-5, "zero3", "GRADIENTS MOVED"), (4e-6, "zero3", ""), (4e-5, "ddp+bf16", ""),
    (4e-3, "ddp+bf16", "GRADIENTS MOVED"),
])  # fmt: skip
def test_moved_gradients(share, recipe, words):
    """By what the old row computed in, though no loss moved."""
    change, found = after(shift_norms(share), recipe)
    assert change.words == words
    assert change.grad_norm_distance == pytest.approx(share, rel=0.01)
    assert change.loss_distance == 0
    assert f" {share:.1e}" in told(found)


def test_moved_loss():
    def edit(result: Result) -> None:
        result.losses = [x * 1.01 for x in result.losses]

    change, _ = after(edit)
    assert change.words == "LOSS MOVED"
    assert change.loss_distance == pytest.approx(0.01)


def test_status_change():
    def edit(result: Result) -> None:
        result.status, result.ranks = Status.HOST_OOM, []

    change, found = after(edit)
    assert change.words == "ok -> host_oom"
    assert change.step_ratio is None
    assert "ok -> host_oom" in told(found)


def test_environment_is_listed_on_top():
    results = recorded()
    for result in results:
        versions = {**result.environment["versions"], "torch": "2.10.0"}
        result.environment = {**result.environment, "versions": versions, "changed_files": 7}
    found = compare_reports(build(recorded(), []), build(results, []))
    assert found.environment == [("versions.torch", "2.9.0", "2.10.0")]
    text = told(found)
    assert text.index("versions.torch") < text.index("Recipe")


def test_broken_files_are_named_and_the_terminal_agrees(tmp_path):
    shutil.copytree(GOLDEN / "cpu", tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs" / "zero3" / "result.json").write_text("{")
    found = compare(GOLDEN / "cpu", tmp_path)
    assert len(found.skipped) == 1
    stream = io.StringIO()
    print_comparison(found, Console(file=stream, width=80))
    text = stream.getvalue()
    assert "only in the old set: zero3\n" in text
    assert "skipped" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "GRADIENTS" not in text and "run-to-run variance" in text


def test_rows_of_one_recipe_that_do_not_match_say_what_differs():
    others = recorded()
    for result in others:
        result.spec = dataclasses.replace(result.spec, global_batch=32, model="DiT-B/4")
    text = told(compare_reports(build(recorded(), []), build(others, [])))
    assert "model is 'DiT-S/4' and 'DiT-B/4'; global_batch is 16 and 32" in text
    assert "zero3" in text.split("not the same run")[1]
