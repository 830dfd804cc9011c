"""Predictions that ship with the project: found by name, complete, and what a trace gives."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from harness.planner import pool, records
from harness.planner.edits import adapts
from harness.planner.records import line_of, record_of
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects.library import families
from strategies import launch_file
from tests import refill
from tests.made.predictions import prediction

SPEC = Spec(
    recipe="", model="pixart-sigma", data="synthetic", global_batch=2, processes=2, device="cuda"
)
PLAIN, CHECKPOINT = "zero2_offload+bf16", "zero2_offload+bf16+checkpoint"
SAMPLE = 8
"""Records that are traced anew: some 40 seconds of a core."""


def row_of(recipe: str, **more) -> Resolved:
    return resolve(dataclasses.replace(SPEC, recipe=recipe, **more))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder of records with one for ``PLAIN`` and one for ``CHECKPOINT``, and no other cache."""
    monkeypatch.setattr(records, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(pool, "ROOT", tmp_path)
    records._lines.cache_clear()
    records.made_by.cache_clear()
    monkeypatch.setattr(pool, "Worker", lambda *given: pytest.fail("a process was started"))
    made = {}
    for gib, recipe in enumerate((PLAIN, CHECKPOINT), start=3):
        row = row_of(recipe)
        made[records.name(row)] = line_of("2026-01-02", row.spec, "flash", prediction(gib))
    records.write(SPEC.model, made)
    yield
    records._lines.cache_clear()
    records.made_by.cache_clear()


def found(recipe: str, **more) -> float | None:
    kept = pool.cached(row_of(recipe, **more), pool.default_folder())
    return kept and kept.allocated / 2**30


def test_a_record_answers_for_its_spec_alone(shipped, tmp_path):
    (one,) = pool.predict_all([row_of(PLAIN)], pool.default_folder())
    assert one == dataclasses.replace(prediction(3), recorded="2026-01-02")
    assert found(CHECKPOINT) == 4
    assert found(CHECKPOINT, global_batch=4) is None
    assert pool.cached(row_of(CHECKPOINT), pool.default_folder(), "cudnn") is None
    assert pool.cached(row_of(CHECKPOINT), tmp_path) is None, "a folder of a caller's own"
    with pool.fresh():
        assert found(CHECKPOINT) is None
    assert found(CHECKPOINT) == 4


@pytest.mark.parametrize(("library", "version", "known"), [
    ("torch", "2.99.0", False), ("diffusers", "9.9", False), ("peft", "9.9", True),
    ("torch", f"{torch.__version__.split('+')[0]}1+other", True),
])  # fmt: skip
def test_a_record_counts_for_a_minor_version(shipped, monkeypatch, library, version, known):
    plain = records.version
    monkeypatch.setattr(records, "version", lambda n: version if n == library else plain(n))
    records.made_by.cache_clear()
    assert (found(PLAIN) == 3) is known


def test_a_record_of_another_trace_is_not_found_and_goes(shipped, monkeypatch):
    monkeypatch.setattr(records, "TRACE", records.TRACE + 1)
    records.made_by.cache_clear()
    assert found(PLAIN) is None
    assert refill.drop_old([SPEC.model]) == 2 and records.lines(SPEC.model) == {}


def test_an_edited_launch_file_has_other_predictions(tmp_path):
    folder = tmp_path / "launch_configs"
    shutil.copytree(launch_file.FOLDER, folder)
    yaml, json = folder / "zero2.yaml", folder / "zero2.json"
    yaml.write_text(f"# Another title.\n{yaml.read_text()}")
    json.write_text(json.read_text().replace("{", "{\n\n", 1))
    usual, moved = (launch_file.read(f / "zero2.yaml") for f in (launch_file.FOLDER, folder))
    assert records._launch(usual) == records._launch(moved), "comments and spaces decide nothing"
    json.write_text(json.read_text().replace("{", '{"steps_per_print": 7, "more": 1,', 1))
    assert records._launch(usual) != records._launch(moved)


def test_an_edited_model_of_ones_own_has_other_predictions(tmp_path):
    own = tmp_path / "strip.py"
    shutil.copy(Path(__file__).parents[1] / "made" / "strip.py", own)
    row = resolve(Spec(recipe="single", model=f"{own}:Strip", objective="flow", global_batch=4))
    before = records.name(row)
    own.write_text(own.read_text() + "\nMORE = 1\n")
    assert records.name(resolve(row.spec)) != before


def test_what_has_no_record_is_missing(shipped):
    assert refill.missing("--model pixart-sigma --gpus 2 --gpu RTX-4090").endswith("on 2 GPUs")


# ---- What ships ----


DEFAULT = [w for w in refill.of_pages() if re.search("--gpus [18] |^((?!--gpus).)*$", w)
           and not re.search("--(frames|resolution)", w)]  # fmt: skip
"""Questions of the pages at a model's usual size, on one GPU or eight."""


@pytest.mark.parametrize("words", DEFAULT)
def test_a_question_of_the_pages_has_records(words):
    lack = refill.missing(words)
    assert not lack, f"{lack} has no record: python -m tests.refill"


MODELS = sorted(families.table())
TODAY = random.Random(os.environ["TESTS_DAY"]).sample(MODELS, len(MODELS) // 3)
OTHERS = [model for model in MODELS if model not in TODAY]


@pytest.mark.parametrize("models", [TODAY, pytest.param(OTHERS, marks=pytest.mark.thorough)],
                         ids=["today", "others"])  # fmt: skip
def test_every_shipped_record_is_found_and_can_be_read(models):
    for model in models:
        for one in refill.of_model(model):
            assert one.found, f"{model}: {one.record.spec}: python -m tests.refill"
            assert records.find(model, one.name).method == "trace"


@pytest.mark.thorough
def test_a_sample_of_the_shipped_records_is_what_a_trace_gives(tmp_path):
    """One of each of some groups of engine, training and card, others each day."""
    draw = random.Random(os.environ["TESTS_DAY"])
    groups: dict[tuple, list[refill.Kept]] = {}
    for model in families.table():
        for one in refill.of_model(model):
            engine = one.record.spec["recipe"].partition("+")[0]
            groups.setdefault((engine, adapts(one.row), one.record.kind), []).append(one)
    odd = []
    with pool.kept_workers():
        for group in draw.sample(sorted(groups), SAMPLE):
            _, (day, spec, kind, known), row = draw.choice(groups[group])
            (made,) = pool.predict_all([row], tmp_path, kind=kind, jobs=1)
            again = record_of(line_of(day, row.spec, kind, made)).prediction
            for told in (again, known):
                told["work"].sort(key=str)
            odd += [spec] if again != known else []
    assert not odd, f"raise TRACE in harness/planner/records.py and refill: {odd}"
