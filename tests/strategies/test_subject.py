"""A subject that is no DiT shows each strategy's evidence, or the part that it lacks is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import STRIP, TINY, launchable, observe_here

from harness import ROOT
from harness.resolve import resolve
from harness.subjects import own_module, subject_of
from strategies import parse
from strategies.base import BadInput
from strategies.subject import PARTS, DataFacts, Subject

MODEL = STRIP.model
NEEDS = {
    "controlnet": "token_blocks",
    "prune_structured": "halves",
    "sparse_embedding": "label_table",
    "checkpoint:every=2": "chain",
    "attend:kernel=naive": "attend",
    "sp": "stripes",
    "distill": "sized",
}
"""Part of a recipe -> the part of a subject without which it refuses."""
WORKS = [
    "single+accumulate", "single+offload_activations", "single+block_swap:blocks=3",
    "single+cast+lora", "single+dora", "single+head", "single+prune", "single+adam8bit",
    "single+optimizer_in_backward", "single+attend:kernel=flash+bf16+checkpoint",
    "single+attend:kernel=math+compile:backend=aot_eager", "single+qlora+checkpoint", "single+muon",
]  # fmt: skip
"""Of each kind of strategy: others are shown by test_catalog, of a DiT."""


def test_a_part_that_is_not_where_it_is_said_to_be_is_named():
    subject = resolve(STRIP).subject
    with pytest.raises(BadInput, match=r"Strip\.parts has head at .*'leave'"):
        subject.part(torch.nn.Module(), "head")


@pytest.mark.parametrize("text", launchable(WORKS, WORKS[:-3]))
def test_it_trains_with_the_evidence_of_all_its_parts(text, train_here):
    run = train_here(dataclasses.replace(STRIP, recipe=text), 2)
    observe_here(run, text)
    for part in parse(text).strategies:
        assert part.evidence(run)
    assert all(loss.isfinite() for loss in run.log.losses)


@pytest.mark.parametrize("text", NEEDS)
def test_what_it_lacks_is_refused_by_name(text):
    two = {"recipe": f"ddp+{text}+sgd:momentum=0.0", "processes": 2}
    resolved = resolve(dataclasses.replace(STRIP, **two))
    words = str(resolved.refusal)
    assert words.startswith(text.partition(":")[0])
    assert f"Strip has no {PARTS[NEEDS[text]]}" in words
    assert "leave " in words or "take " in words
    whole = resolve(dataclasses.replace(TINY, **two))
    assert not whole.refusal, "a DiT has every part"


DATA = [(32, 4, 1000), (16, 3, 7), (64, 4, 10)]


@pytest.mark.parametrize("sizes", DATA)
@pytest.mark.parametrize(("model", "objective", "dropout"), [("DiT-T/8", "flow", 0.1),
                         ("DiT-S/8:width=32,heads=2", "epsilon", 0.0),
                         ("DiT-T/8:tokens=64", "masked", 0.1)])  # fmt: skip
def test_a_dit_s_closed_forms_are_what_a_survey_finds(model, objective, dropout, sizes):
    side, channels, classes = sizes
    data = DataFacts(256, channels, side, classes)
    dit = subject_of(model, data, objective=objective, class_dropout=dropout)
    # A survey tells no linear layer of an MLP from another.
    found = Subject.survey.fget(dit)
    assert found._replace(inner=dit.shape.mlp_size) == dit.survey
    assert dit.parameters == found.parameters and found.flops > 0


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("nowhere.py:Strip", {}, "no file nowhere.py; write FILE.py:CLASS"),
        (MODEL.replace("Strip", "Net"), {}, "'Net' in .* is no strategies.subject.Subject"),
        (MODEL, {"objective": "epsilon"}, "cannot be trained to 'epsilon'; give --objective flow"),
        ("BROKEN", {}, "line 1: ZeroDivisionError"),
    ],
)
def test_a_file_that_names_no_subject_is_bad_input(model, change, words, tmp_path):
    if model == "BROKEN":
        (tmp_path / "broken.py").write_text("1 / 0")
        model = f"{tmp_path}/broken.py:Strip"
    with pytest.raises(BadInput, match=words):
        resolve(dataclasses.replace(STRIP, model=model, **change))


def test_a_file_s_content_is_part_of_its_identity(tmp_path):
    file = tmp_path / "own.py"
    file.write_text((ROOT / "tests/made/strip.py").read_text())
    before = own_module.identity(f"{file}:Strip")
    file.write_text(file.read_text() + "\n# another\n")
    assert before != own_module.identity(f"{file}:Strip") and own_module.identity("DiT-S/4") == ""
