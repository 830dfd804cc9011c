"""The workload that draws samples, launched as the harness launches it: its results, the distances
that a report makes of them, what they are refused a comparison for, and what was predicted."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DRAWN, Case, OnDemand, launched_together
from safetensors.torch import save_file

from harness import train
from harness.planner import pool
from harness.report.data.grouping import build
from harness.report.data.rows import SuiteHead
from harness.report.figures import samples as figures
from harness.resolve import resolve
from harness.result import Result, Status, load
from harness.spec import Spec, SpecError
from harness.worker import setup
from strategies import initial
from strategies.base import Conflict

PREDICTED = ("single", "single+int8")
RECIPES = (*PREDICTED, "single+nf4")
BASE = dataclasses.replace(DRAWN, model="DiT-T/4", warmup=1, steps=2)


def spec_of(recipe: str, **fields) -> Spec:
    return dataclasses.replace(BASE, recipe=recipe, processes=1, **fields)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("drawn")
    cases = {recipe: Case(spec_of(recipe)) for recipe in RECIPES}
    rows = OnDemand(lambda name: launched_together({name: cases[name]}, folder)[name])
    assert rows["single"] and (folder / "single" / "samples.png").stat().st_size > 1000
    return rows


def row(rows, recipe: str) -> Result:
    found = rows[recipe]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_audited_and_has_what_a_report_wants(recipe, rows):
    found = row(rows, recipe)
    assert [check for check in found.audit if not check.ok] == []
    names = {check.name for check in found.audit}
    assert {"samples", "calls of the model", "noise", "samples finite"} <= names
    (rank,), told = found.ranks, found.drawn
    assert len(rank.step_seconds) == 2
    assert {"load", "prepare", "first_step", "steady"} == set(rank.phases)
    assert rank.categories.total > rank.categories.parameters > 0
    assert rank.categories.gradients == rank.categories.optimizer_state == 0
    assert figures.latents(found).shape == (2, 4, 32, 32) and told.labels == [0, 1]
    assert told.evaluations == 4 and found.flops_per_step > 0 and found.losses == []


def test_the_report_compares_what_was_drawn(rows):
    results = [row(rows, recipe) for recipe in RECIPES]
    suite = SuiteHead(reference="single")
    report = build(results, [], suite)
    (group,) = report.groups
    verdicts = {r.label: r.versus.parity for r in group.rows}
    assert verdicts["single+int8"] == verdicts["single+nf4"] == "by design"
    away = {r.label: r.samples_distance for r in group.rows}
    assert away["single"] is None and "single" in {r.label for r in group.rows}
    assert 0 < away["single+int8"] < away["single+nf4"]


def test_a_row_that_promised_the_same_and_drew_otherwise_differs(rows):
    """The control: int8's samples, by a row that promised what is exact."""
    liar = dataclasses.replace(row(rows, "single+int8"), parity="exact")
    verdict = figures.against(liar, row(rows, "single"))
    assert verdict.word == "DIFFERS" and "rounding explains" in verdict.what
    latents = np.full_like(figures.latents(liar), np.nan).astype("<f4").tobytes()
    lost = dataclasses.replace(liar.drawn, latents=base64.b64encode(latents).decode())
    nothing = dataclasses.replace(liar, drawn=lost)
    assert figures.against(nothing, row(rows, "single")).word == "DIFFERS"
    same = dataclasses.replace(liar, drawn=row(rows, "single").drawn)
    assert figures.against(same, row(rows, "single")).word == "equal"
    assert figures.distance(same, row(rows, "single")) == 0


@pytest.mark.parametrize(("word", "value"), [("seed", 1), ("cfg_scale", 4.0)])
def test_rows_of_other_samples_are_refused_a_comparison_by_name(word, value, rows):
    reference = row(rows, "single")
    spec = dataclasses.replace(reference.spec, **{word: value})
    found = dataclasses.replace(reference, spec=spec)
    assert figures.not_comparable(found, reference).startswith(f"other {word}: ")
    assert figures.against(found, reference).word == "not comparable"
    groups = build([reference, found], [], SuiteHead(reference="single")).groups
    assert len(groups) == 2 and word in groups[1].unlike


def test_words_of_a_training_are_refused(tmp_path):
    words = [*BASE.arguments(), "--out", str(tmp_path), "--anatomy"]
    with pytest.raises(Conflict, match="anatomy is of a training, and the workload is sample"):
        train._check_words(BASE, train.parse_options(words))


def test_memory_is_predicted_within_one_percent(rows, tmp_path):
    found = pool.predict_all([resolve(spec_of(recipe)) for recipe in PREDICTED], tmp_path)
    for recipe, prediction in zip(PREDICTED, found, strict=True):
        assert prediction.method == "trace", f"{recipe}: {prediction.reason} {prediction.fault}"
        measured = row(rows, recipe).ranks[0].categories.total
        assert prediction.steady.bytes == pytest.approx(measured, rel=0.01), recipe
    assert found[1].steady.bytes < 0.7 * found[0].steady.bytes, "further apart than the error"


# ---- weights out of a file ----


def test_weights_of_a_file_are_taken_and_others_refused(tmp_path: Path, draw_here):
    spec = spec_of("single+bf16_pure", model="DiT-T/8")
    subject = resolve(spec).subject
    drawn = initial.build(subject, 5, "awake").named_parameters()
    state = {n: p for n, p in drawn if p.requires_grad}
    state = {name: p.detach().clone() for name, p in state.items()}
    assert "pos_embed" not in state, "what is frozen is not averaged"
    file = tmp_path / "averaged.safetensors"
    save_file(state, str(file))
    told = draw_here(dataclasses.replace(spec, weights=str(file)))
    for name, p in told.module.named_parameters():
        if name in state:
            assert torch.equal(p, state[name].bfloat16()), name
    state["blocks.0.attn.qkv.weight"] = torch.zeros(3, 3)
    save_file(state, str(file))
    with pytest.raises(SpecError, match=r"qkv.weight has the shape \[3, 3\]"):
        draw_here(dataclasses.replace(spec, weights=str(file)))
    del state["blocks.0.attn.qkv.weight"]
    save_file(state, str(file))
    with pytest.raises(SpecError, match=r"of another model than DiT-T/8: blocks\.0\."):
        draw_here(dataclasses.replace(spec, weights=str(file)))
    file.write_text("nothing")
    with pytest.raises(SpecError, match="train it anew"):
        setup.read(dataclasses.replace(spec, weights=str(file)))


def test_an_older_result_has_nothing_drawn(tmp_path):
    one = Result(status=Status.OK, spec=Spec(recipe="single"))
    data = dataclasses.asdict(one)
    del data["drawn"]
    for name in ("workload", "weights", "sampler_steps", "cfg_scale"):
        del data["spec"][name]
    (tmp_path / "result.json").write_text(json.dumps(data))
    old = load(tmp_path / "result.json")
    assert old.drawn is None and old.spec.key == one.spec.key
