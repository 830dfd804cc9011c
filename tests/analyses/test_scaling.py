"""Weak and strong scaling: which rows belong together, what is left of a perfect growth, and what
the story says of rows and predictions that were made up."""

from __future__ import annotations

import pytest

from harness.report import build
from harness.report.data.rows import SuiteHead
from harness.report.figures import numbers, units
from harness.report.figures.numbers import Point
from harness.report.rendering import analyses
from tests.made.predictions import prediction_of
from tests.made.results import row

HEAD = SuiteHead(reference="single", story="scale", order=("single", "ddp", "zero3"))
GIB = 2**30


def at(recipe: str, count: int, batch: int, seconds: float | None = 1.0, **more) -> Point:
    return Point(recipe=recipe, count=count, batch=batch, seconds=seconds, **more)


POINTS = [
    *(at("single", 1, 8), at("single", 1, 32, 4.0)),
    *(at("ddp", 2, 16), at("ddp", 2, 32, 2.0), at("ddp", 4, 32)),
    *(at("zero3", 2, 16, 2.0), at("zero3", 4, 32, 2.0)),
]


@pytest.mark.parametrize(
    ("regime", "batches"), [("weak", [[16, 32], [16, 32]]), ("strong", [[32, 32]])]
)
def test_rows_of_one_recipe_belong_together_by_what_is_kept(regime, batches):
    """Of zero3 one row alone has 32 samples: with plain training of as many it is a line too."""
    found = numbers.lines([p for p in POINTS if p != at("zero3", 4, 32, 2.0)] + POINTS[-1:], regime)
    of = {line.recipe: [p.batch for p in line.points] for line in found}
    assert list(of.values())[: len(batches)] == batches
    assert {line.base.recipe for line in found} == {"single"}
    assert {line.base.batch for line in found} == {8 if regime == "weak" else 32}


def test_a_recipe_without_another_number_of_processes_is_no_line():
    assert numbers.lines([at("single", 1, 8), at("zero3", 2, 24)], "weak") == []


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [("zero3+bf16", "single+bf16"), ("ddp+sp+checkpoint", "single+checkpoint"),
     ("hsdp:replicate=4+bf16", "single+bf16"), ("single", "single")],
)  # fmt: skip
def test_plain_training_leaves_out_what_wants_several_ranks(recipe, wanted):
    assert numbers.plain(recipe) == wanted


def test_efficiency_is_of_a_process_and_on_shared_cores_of_all():
    """Weak: twice the samples in the same time is all of it; on shared cores it would be twice."""
    base, point = at("single", 1, 8), at("ddp", 2, 16)
    assert numbers.efficiency(point, base) == (1.0, 1.0, 1.0)
    assert numbers.efficiency(point, base, shared=True) == (2.0, 2.0, 2.0)
    assert numbers.efficiency(at("ddp", 4, 8, 0.5), base)[1] == 0.5
    assert numbers.efficiency(at("ddp", 4, 8, None), base) is None


def test_an_efficiency_lies_between_equal_ends_of_both():
    """Slow links cost the row alone; a slow card costs both, and cancels."""
    base = at("single", 1, 8, 1.0, ends=(0.8, 1.3))
    point = at("ddp", 8, 64, 1.25, ends=(1.6, 1.3))
    assert numbers.efficiency(point, base) == (0.5, 0.8, 1.0)


def test_without_plain_training_that_has_a_time_the_fewest_that_have_one_are_the_base():
    points = [at("single", 1, 64, None), at("zero3", 2, 64, None), at("zero3", 4, 64)]
    (line,) = numbers.lines([*points, at("zero3", 8, 64)], "strong")
    assert line.base == points[2]


def test_what_a_ring_sends_of_what_is_handed_over():
    sent = {"backward": {"allreduce float32": 400}, "forward": {"allgather_base bfloat16": 100}}
    assert numbers.ring_bytes(sent, 4) == 2 * 400 * 3 // 4 + 3 * 100
    assert numbers.ring_bytes({"forward": {"reduce_scatter_base float32": 400}}, 4) == 300
    assert numbers.ring_bytes({"forward": {"broadcast float32": 4}}, 4) is None


# ---- measured ----


def measured(recipe: str, count: int, batch: int, beyond: float = 100.0, **facts):
    found = row(recipe, beyond, processes=count, global_batch=batch)
    found.evidence |= {recipe: facts} if facts else {}
    return found


def told(results, head=HEAD, predictions=None):
    return {g.key: g for g in analyses.tables(build(results, [], head, predictions or {}))}


SET = [("single", 1, 8), ("single", 1, 32), ("ddp", 2, 16), ("ddp", 2, 32), ("ddp", 16, 32)]


def test_the_story_has_a_table_a_regime_and_tells_no_speed_beyond_the_cores():
    """The made-up machine has 8 cores: 16 processes take turns on them."""
    grids = told([measured(*one) for one in SET])
    assert list(grids) == ["scale_weak", "scale_strong"]
    strong = grids["scale_strong"]
    assert [line[:3] for line in strong.lines] == [
        ["single", "1", "32"], ["ddp", "2", "16"], ["ddp", "16", "2"],
    ]  # fmt: skip
    kept = [line[strong.heads.index("Kept %")] for line in strong.lines]
    assert kept[0] == "100.0" and float(kept[1]) > 0 and kept[2] == units.NONE
    assert strong.lines[2][3] == units.NONE and strong.lines[2][5] != units.NONE
    assert "the same 8 cores" in strong.note and "is not told" in strong.note


def test_predicted_memory_and_bytes_stand_beside_the_measured_ones():
    from harness.prediction import Work

    facts = {"sent_bytes": {"backward": {"allreduce float32": 3 << 20}}}
    results = [measured(*SET[0]), measured(*SET[2], **facts)]
    work = [Work(phase="backward", kind="overlapped", dtype="", flops=0, bytes=6 << 20, count=1)]
    predictions = {r.spec.key: prediction_of(r, work=work) for r in results}
    (grid,) = told(results, predictions=predictions).values()
    cells = dict(zip(grid.heads, grid.lines[1], strict=True))
    assert cells["Peak MiB"] == cells["Predicted MiB"] and cells["Error %"] == "0.0"
    assert (cells["Sent MiB"], cells["Sent, predicted MiB"]) == ("3.00", "3.00")
