"""Predictions that ship with the project: found by the code that made them, and by no other."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import random
import subprocess
import sys

import pytest
from rich.console import Console

from harness import ROOT, cli
from harness.planner import pool, records
from harness.planner.records import line_of
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects.library import families
from tests.made import recorded
from tests.made.predictions import prediction

SPEC = Spec(
    recipe="", model="pixart-sigma", data="synthetic", global_batch=2, processes=2, device="cuda"
)
PLAIN, CHECKPOINT = "zero2_offload+bf16", "zero2_offload+bf16+checkpoint"
CHEAP = 6
"""Records of the smallest models, of which one is traced anew."""


def row_of(recipe: str, **more) -> Resolved:
    return resolve(dataclasses.replace(SPEC, recipe=recipe, **more))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder of records with one for ``PLAIN`` and one for ``CHECKPOINT``, and no other cache."""
    monkeypatch.setattr(records, "FOLDER", tmp_path / "records")
    monkeypatch.setattr(pool, "ROOT", tmp_path)
    records._lines.cache_clear()
    monkeypatch.setattr(pool, "Run", lambda *given: pytest.fail("a process was started"))
    made = {}
    for gib, recipe in enumerate((PLAIN, CHECKPOINT), start=3):
        row = row_of(recipe)
        made[pool.name(row)] = line_of("2026-01-02", row.spec.to_dict(), "flash", prediction(gib))
    records.write(SPEC.model, made)
    yield
    records._lines.cache_clear()


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


def test_a_record_of_other_code_or_libraries_is_not_found(shipped, monkeypatch):
    plain = records._source

    def changed(name: str):
        def source(asked: str):
            one = plain(asked)
            return one._replace(hash="other") if asked == name and one else one

        records.reached.cache_clear()
        monkeypatch.setattr(records, "_source", source)
        return found(PLAIN), found(CHECKPOINT)

    assert changed("strategies.activations.checkpoint") == (3, None)
    assert changed("strategies.streaming.block_swap") == (3, 4)
    assert changed("harness.planner.tracing.allocator") == (None, None)
    assert changed("") == (3, 4)
    monkeypatch.setattr(records, "_versions", lambda: ("torch of another day",))
    assert found(PLAIN) is None
    records.reached.cache_clear()


def test_records_of_other_code_are_carried_over_if_a_trace_is_alike(shipped, monkeypatch):
    """The trace of one combination comes out alike, and that of the other does not."""
    assert list(recorded.told([SPEC.model])) == [
        "pixart-sigma: 2 records, 2 of them of today's code"
    ]
    monkeypatch.setattr(records, "_versions", lambda: ("torch of another day",))
    assert "0 of them" in next(recorded.told([SPEC.model])) and found(PLAIN) is None
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: [prediction(3)])
    recorded.carry([SPEC.model], Console(quiet=True))
    assert found(PLAIN) == 3 and found(CHECKPOINT) is None
    assert len(records.lines(SPEC.model)) == 1


def test_a_plan_of_records_starts_no_process(shipped, capsys):
    words = f"plan --model {SPEC.model} --gpus 2 --gpu RTX-4090 --recipes {PLAIN} {CHECKPOINT}"
    spec = {"ema": 0.0, "objective": "epsilon"}
    made = {
        pool.name(row_of(recipe, **spec)): line_of("2026-01-02", {}, "flash", prediction(3))
        for recipe in (PLAIN, CHECKPOINT)
    }
    records.write(SPEC.model, made)
    assert cli.main(words.split()) == 0
    told = capsys.readouterr().out
    assert "2 predictions recorded on 2026-01-02" in " ".join(told.split())
    assert "at a time" not in told


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_recipes_of_a_plan_are_resolved_without_building_the_model(gpus, monkeypatch):
    """Else a plan whose predictions are all recorded takes a quarter of a minute."""

    def built(subject):
        raise AssertionError(f"{subject.model} was built")

    monkeypatch.setattr("harness.subjects.library.subject._survey", built)
    rows = recorded.asked("flux-dev", gpus, "RTX-4090").resolved
    assert len(rows) > 50 and any("part=ffn" in str(row.recipe) for row in rows)


def test_prose_alone_is_left_out_of_a_digest():
    """Of every file: a comment is nothing to Python, and a text that goes is a statement."""
    for file in (f for room in ("harness", "strategies") for f in (ROOT / room).rglob("*.py")):
        text = file.read_text("utf-8")
        tree = ast.parse(text)
        uncommented = records.PROSE.sub(lambda m: "" if "#" in m[0].split('"')[0] else m[0], text)
        assert ast.dump(ast.parse(uncommented)) == ast.dump(tree), file
        texts = {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for match in records.PROSE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            assert match[0].lstrip().startswith("#") or line in texts, (file, match[0])
    assert records.plain('"""A."""\nA = 1\n') == records.plain("# b\nA = 1\n") == "A = 1\n"


@pytest.mark.thorough
def test_a_digest_covers_all_that_a_trace_loads():
    spec = dataclasses.replace(SPEC, recipe=f"{CHECKPOINT}+lora:rank=4", set="num_layers=2")
    words = [sys.executable, "-m", "tests.children.reached", json.dumps(spec.to_dict())]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    method, loaded = ran.stdout.splitlines()[-2:]
    assert method.strip() == "trace"
    reached = records.reached(records.roots(resolve(spec)))
    files = {
        file
        for name in reached
        for file in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py")
    }
    own = json.loads(loaded)
    assert len(own) > 50 and [one for one in own if one not in files] == []
    assert not any("fsdp" in name for name in reached if name.startswith("harness.planner"))


def test_a_sample_of_the_shipped_records_is_what_a_trace_gives():
    every = (one for model in families.table() for one in recorded.of_model(model))
    good = (one for one in every if one.name == one.today and one.row.spec.processes == 1)
    known = sorted(good, key=lambda one: one.row.subject.parameters)[:CHEAP]
    if not known:
        pytest.skip("no record is of today's code: python -m tests.made.recorded")
    one = random.Random(pool.code()).choice(known)
    assert recorded.same(one), one.record.spec
