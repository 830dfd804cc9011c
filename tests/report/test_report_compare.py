"""Comparing two result sets: only what the noise does not explain is a change."""

from __future__ import annotations

import dataclasses
import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from harness.report import build, compare, render_comparison
from harness.report.data.compare import compare_reports
from harness.result import Result, Status, load_all

GOLDEN = Path(__file__).parents[1] / "golden" / "report"


def told(found) -> str:
    """The comparison as it is printed, in a line a paragraph."""
    stream = io.StringIO()
    render_comparison(found, Console(file=stream, width=400))
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


def grow(mib: int):
    def edit(result: Result) -> None:
        for rank in result.ranks:
            rank.categories.workspace += mib * 2**20

    return edit


def scaled(curve: str, share: float):
    """Losses or norms of gradients moved by a share."""
    return lambda result: setattr(result, curve, [x * (1 + share) for x in getattr(result, curve)])


def lost(result: Result) -> None:
    result.status, result.ranks = Status.HOST_OOM, []


def test_a_set_compared_with_itself_is_unchanged():
    found = compare(GOLDEN / "cpu", GOLDEN / "cpu")
    assert (found.changed, found.environment, len(found.changes)) == ([], [], 14)
    assert "0 changed beyond noise" in told(found)


@pytest.mark.parametrize(("recipe", "edit", "words"), [
    ("zero3", slow(1.3), "SLOWER"), ("zero3", slow(0.7), "faster"), ("zero3", slow(1.01), ""),
    ("zero3", grow(100), "MORE MEMORY"), ("zero3", grow(-100), "less memory"),
    ("zero3", grow(1), ""), ("zero3", scaled("losses", 0.01), "LOSS MOVED"),
    # Norms: by what the old row computed in, though no loss moved.
    ("zero3", scaled("grad_norms", 4e-5), "GRADIENTS MOVED"),
    ("zero3", scaled("grad_norms", 4e-6), ""), ("ddp+bf16", scaled("grad_norms", 4e-5), ""),
    ("ddp+bf16", scaled("grad_norms", 4e-3), "GRADIENTS MOVED"),
    ("zero3", lost, "ok -> host_oom"),
])  # fmt: skip
def test_what_counts_as_a_change(recipe, edit, words):
    change, found = after(edit, recipe)
    assert change.words == words and len(found.changed) == bool(words)
    assert (change.step_ratio is None) == (edit is lost) and words in told(found)


def test_distances_are_those_of_the_curves():
    change, found = after(scaled("grad_norms", 4e-5))
    assert change.grad_norm_distance == pytest.approx(4e-5, rel=0.01)
    assert change.loss_distance == 0 and " 4.0e-05" in told(found)
    assert after(scaled("losses", 0.01))[0].loss_distance == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("results_of", "factor", "words"),
    [(recorded, 1.04, "SLOWER"), (once, 1.04, ""), (once, 1.3, "SLOWER")],
)
def test_repetitions_show_what_the_spread_of_steps_would_hide(results_of, factor, words):
    change, found = after(slow(factor), results_of=results_of)
    assert change.words == words
    assert (change.step_limit_fraction is None) == (results_of is once)
    why = "neither set measured a row twice" if results_of is once else "by run-to-run variance"
    assert why in told(found)


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


def test_environment_is_listed_on_top():
    results = recorded()
    for result in results:
        versions = {**result.environment["versions"], "torch": "2.10.0"}
        result.environment = {**result.environment, "versions": versions, "changed_files": 7}
    found = compare_reports(build(recorded(), []), build(results, []))
    assert found.environment == [("versions.torch", "2.9.0", "2.10.0")]
    text = told(found)
    assert text.index("versions.torch") < text.index("Recipe")


def test_broken_files_are_named(tmp_path):
    shutil.copytree(GOLDEN / "cpu", tmp_path, dirs_exist_ok=True)
    (tmp_path / "runs" / "zero3" / "result.json").write_text("{")
    found = compare(GOLDEN / "cpu", tmp_path)
    assert len(found.skipped) == 1
    text = told(found)
    assert "only in the old set: zero3\n" in text and "skipped" in text


def test_rows_of_one_recipe_that_do_not_match_say_what_differs():
    others = recorded()
    for result in others:
        result.spec = dataclasses.replace(result.spec, global_batch=32, model="DiT-B/4")
    text = told(compare_reports(build(recorded(), []), build(others, [])))
    assert "model is 'DiT-S/4' and 'DiT-B/4'; global_batch is 16 and 32" in text
    assert "zero3" in text.split("not the same run")[1]
