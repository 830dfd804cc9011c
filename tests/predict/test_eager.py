"""Compiled rows: the eager row's prediction, with a note and a lower end that is wide enough."""

from __future__ import annotations

import dataclasses

from harness.planner import eager, pool, verdict
from harness.planner.plan.answer import answer, check_line
from harness.planner.plan.table import short_notes
from harness.system import cards
from tests.made.predictions import asked, prediction

CARD = cards.find("RTX-4090")
PAIR = "ddp+bf16", "ddp+bf16+compile"


def made(size: float) -> object:
    """A step of GiB, half of which stays between steps, and of products and elementwise work."""
    product = prediction(1).work[0]
    wide = {"kind": "memory", "dtype": "", "flops": 0, "bytes": 10**9, "count": 900}
    work = [dataclasses.replace(product, flops=10**13, count=9),
            dataclasses.replace(product, **wide)]  # fmt: skip
    found = prediction(size, work=work)
    return dataclasses.replace(found, between=found.reserved // 2)


def judged(size: float) -> list[verdict.Fit]:
    rows = [asked(recipe) for recipe in PAIR]
    return [verdict.judge(row, eager.told(row, made(size)), CARD) for row in rows]


def test_the_eager_row_is_the_recipe_without_compile():
    row = asked("zero2+bf16+checkpoint+compile:mode=reduce-overhead")
    plain = asked("zero2+bf16+checkpoint")
    assert eager.of(row).spec == plain.spec and eager.of(plain) is plain


def test_a_compiled_row_is_found_where_its_eager_row_was_kept(tmp_path):
    plain, row = (asked(recipe) for recipe in PAIR)
    pool._keep(made(5), pool.path_of(plain, tmp_path))
    assert pool.cached(row, tmp_path) == eager.told(row, pool.cached(plain, tmp_path))
    (found,) = pool.predict_all([row], tmp_path)
    assert found.recipe == str(row.recipe) and found.notes[0] == eager.NOTE


def test_its_figures_are_the_eager_row_s_and_its_lower_ends_are_lower():
    plain, compiled = judged(10)
    assert compiled.need_bytes == plain.need_bytes and compiled.most_bytes >= plain.most_bytes
    assert compiled.seconds.total == plain.seconds.total
    assert compiled.seconds.high == plain.seconds.high
    assert compiled.seconds.low < plain.seconds.low < plain.seconds.total
    assert compiled.low_bytes < 0.6 * compiled.need_bytes < plain.low_bytes


def test_the_note_stands_near_the_verdict_and_below_the_table():
    _, compiled = judged(10)
    assert f"  {eager.NOTE}" in answer([compiled]) and eager.NOTE in check_line(compiled, None)
    assert any(eager.NOTE in note for note in short_notes([compiled]))
    graphs = asked("ddp+bf16+compile:mode=reduce-overhead")
    assert "pool of its CUDA graphs is not counted" in eager.note_of(graphs)
