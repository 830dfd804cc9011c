"""A subject that is no DiT under every strategy: each shows its evidence, or says which part it
needs that is not there."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import STRIP, SUBJECT, TINY, launchable, observe_here

from harness import ROOT
from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects import own_module
from harness.subjects.dit import presets
from strategies import parse
from strategies.activations import checkpoint, runners
from strategies.activations.block_parts import Recompute
from strategies.base import BadInput, NotInForce, Slot
from strategies.subject import PARTS, Subject
from tests.made.recipes import OTHERS, SETTINGS, TRAINED_HERE

MODEL = STRIP.model
NEEDS = {
    "difffit": ["halves"],
    "controlnet": ["token_blocks"],
    "controlnet:share=1.0": ["token_blocks"],
    "prune_structured": ["halves"],
    "prune_structured:fraction=0.25": ["halves"],
    "sparse_embedding": ["label_table"],
    "checkpoint:every=2": ["chain"],
    "checkpoint:every=sqrt": ["chain"],
    "checkpoint:keep=nothing": ["chain"],
    "checkpoint:every=2,keep=products": ["chain"],
    "attend:kernel=naive": ["attend"],
    "attend:kernel=flex": ["attend"],
    "sp": ["stripes"],
    **{text.removeprefix("single+"): ["sized"] for text in OTHERS["distill"]},
}
"""Part of a recipe -> the part of a subject without which it refuses."""
MORE = [
    "single+checkpoint:share=0.5",
    "single+checkpoint:keep=products",
    "single+attend:kernel=flash+bf16+checkpoint",
    "single+attend:kernel=math+compile:backend=aot_eager",
    "single+checkpoint+offload_activations:what=checkpoints",
    "single+compile:backend=aot_eager+checkpoint+bf16",
    "single+compile:backend=aot_eager+offload_activations",
    "single+qlora+checkpoint",
]
GENERATED = "single+compile"
"""Of which test_catalog has the code that is generated; here a subject is traced without it."""
FIRST = [texts[0] for texts in SETTINGS.values() if texts[0] in TRAINED_HERE]
"""A recipe of each strategy: its other settings are shown by test_catalog, of a DiT."""
TRIED = [t for t in FIRST if t != GENERATED] + MORE
WORKS = [t for t in TRIED if not any(part in NEEDS for part in t.split("+"))]


def here(train_here, text: str, steps: int = 2, **change):
    return train_here(dataclasses.replace(STRIP, recipe=text, **change), steps)


@pytest.mark.parametrize("text", launchable(WORKS, FIRST))
def test_it_trains_with_the_evidence_of_all_its_parts(text, train_here):
    run, log = here(train_here, text)
    observe_here(run, log, text)
    for part in parse(text).strategies:
        assert part.evidence(run.trained)
    assert all(loss.isfinite() for loss in log.losses)


@pytest.mark.parametrize("text", NEEDS)
def test_what_it_lacks_is_refused_by_name(text):
    two = {"recipe": f"ddp+{text}+sgd:momentum=0.0", "processes": 2}
    resolved = resolve(dataclasses.replace(STRIP, **two))
    words = str(resolved.refusal)
    (need,) = NEEDS[text]
    assert words.startswith(text.partition(":")[0]) and f"Strip has no {PARTS[need]}" in words
    assert "leave " in words or "take " in words
    whole = resolve(dataclasses.replace(TINY, **two))
    assert not whole.refusal, "a DiT has every part"


def test_a_strategy_that_needs_a_part_asks_for_it():
    asked = {need for needs in NEEDS.values() for need in needs}
    # Stages are of an engine, which test_pipeline has refuse. A model without "layers" is searched.
    # "projections" is another way to what "halves" serves.
    others = {"ends", "head", "layers", "projections", "vocabulary"}
    assert asked | others == set(PARTS)
    assert SUBJECT.parts | {"projections", "vocabulary"} == set(PARTS)


@pytest.mark.parametrize("stub", ["blocks left out", "recomputed nowhere"])
def test_evidence_is_lost_here_as_well(stub, train_here, monkeypatch):
    def half(module, subject, wrap):
        runners.surround(module, Half(subject), wrap)

    class Half:
        def __init__(self, subject):
            self.subject = subject

        def blocks(self, module):
            return self.subject.blocks(module)[::2]

    if stub == "blocks left out":
        monkeypatch.setattr(checkpoint, "surround", half)
    else:
        monkeypatch.setattr(Recompute, "part", lambda self, *given, **n: self._inside(*given, **n))
    run, _ = here(train_here, "single+checkpoint")
    with pytest.raises(NotInForce, match=r"of 5 blocks|bytes are kept"):
        parse("single+checkpoint").in_slot(Slot.RECOMPUTE).evidence(run.trained)


@pytest.mark.parametrize("model", ["DiT-T/8", "DiT-S/2:depth=3,width=128,heads=2", "DiT-B/4"])
@pytest.mark.parametrize("objective", ["epsilon", "flow"])
def test_a_dit_s_closed_forms_are_what_a_survey_finds(model, objective):
    spec = Spec(recipe="single", model=model, objective=objective, class_dropout=0.1)
    dit = resolve(spec).subject
    found = dit.survey
    assert found.parameters == dit.parameters and found.linears == dit.linears
    assert found.sizes._replace(weights=()) == dit.sizes._replace(weights=())
    assert sorted(found.sizes.weights) == sorted(dit.sizes.weights)
    # A survey tells no linear layer of an MLP from another.
    assert Subject.dimensions.fget(dit) == dit.dimensions._replace(inner=0)
    assert dit.dimensions.inner == dit.shape.mlp_size
    learn_sigma = objective == "epsilon"
    assert dit.train_flops(3) == presets.train_flops(dit.shape, batch=3, learn_sigma=learn_sigma)


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("nowhere.py:Strip", {}, "no file nowhere.py; write FILE.py:CLASS"),
        (MODEL.replace(":Strip", ""), {}, "'' in .* is no strategies.subject.Subject"),
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
