"""Strategies of a run that draws samples: evidence shown, and lost where the effect is."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from conftest import DRAWN, SUBJECT

from harness.resolve import resolve
from harness.spec import Spec
from strategies import CATALOG, parse
from strategies.base import BadInput, Conflict, NotInForce
from strategies.evidence.rules import effects
from strategies.recipe import ABSENT, RecipeError
from strategies.sampling import eight_bits
from strategies.sampling.palettes import indices_of, pack, palettes, unpack
from strategies.sharding import sharding_kinds
from strategies.workloads import SAMPLE, TRAIN
from tests.made.recipes import DRAWN_HERE
from tests.made.stand_ins import STAND_INS
from tests.made.stubs import LOST_WHEN_DRAWN


def drawing(text: str) -> Spec:
    return dataclasses.replace(DRAWN, recipe=text)


@pytest.mark.parametrize("text", DRAWN_HERE)
def test_evidence_is_shown_by_samples_drawn(text, draw_here):
    drawn = draw_here(drawing(text))
    parts = parse(text, workload=SAMPLE).strategies
    for part in parts:
        assert effects(part.evidence(drawn)), f"{part} shows an effect"
    assert drawn.drawn.shape == (2, 4, 32, 32) and torch.isfinite(drawn.drawn).all()


@pytest.mark.parametrize("case", LOST_WHEN_DRAWN)
def test_evidence_is_lost_when_the_effect_is_stubbed(case, draw_here, monkeypatch):
    text, kind, stage, stub = LOST_WHEN_DRAWN[case]
    monkeypatch.setattr(kind, stage, stub)
    parts = parse(text, workload=SAMPLE).strategies
    with STAND_INS.get(kind.name, contextlib.nullcontext)():
        drawn = draw_here(drawing(text))
        part = next(p for p in parts if type(p) is kind)
        with pytest.raises((NotInForce, AttributeError)):
            part.evidence(drawn)


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        ("int8", 8, 8.5),
        ("nf4", 4, 4.6),
        ("palette:bits=3,rows=16", 3, 3.6),
    ],
)
def test_bits_a_weight_are_those_that_are_held(text, least, most, draw_here):
    drawn = draw_here(drawing(f"single+{text}"))
    (part,) = (p for p in drawn.resolved.recipe.strategies if text.startswith(p.name))
    facts = part.evidence(drawn)
    assert least <= facts["bits_per_weight"] <= most
    plain = resolve(DRAWN).subject.make()
    wanted = [plain.get_submodule(n) for n in eight_bits.linears(plain, drawn.resolved.subject)]
    assert facts["elements"] == sum(layer.weight.numel() for layer in wanted)
    assert facts["layers"] == len(wanted) == 5 * len(plain.blocks), "modulations too"


# ---- palettes ----


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 13, 4096])
def test_packed_indices_come_back(bits, count):
    indices = torch.randint(0, 2**bits, (count,), generator=torch.manual_seed(bits)).to(torch.uint8)
    packed = pack(indices, bits)
    assert packed.numel() == -(-count // 8) * bits and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, count), indices)


def test_palettes_are_those_of_k_means():
    """Against scikit-learn's on the same values, which begins many times."""
    from sklearn.cluster import KMeans

    values = torch.randn(2, 2048, generator=torch.manual_seed(0)) ** 3
    found = palettes(values, 4)
    near = found.gather(1, indices_of(values, found).long())
    for row, mine in zip(values, (values - near).square().sum(1), strict=True):
        best = KMeans(16, n_init=4, random_state=0).fit(row[:, None].numpy()).inertia_
        assert float(mine) <= 1.25 * best, "Lloyd's ends in a minimum, not always the least"
    away = (values[:, :, None] - found[:, None, :]).abs().argmin(2)
    same = (values - found.gather(1, away)).abs() - (values - near).abs()
    assert same.abs().max() < 1e-6, "each value goes to the nearest entry"


# ---- what makes no sense in a workload ----


@pytest.mark.parametrize("name", CATALOG)
def test_each_strategy_is_refused_where_it_has_no_effect(name):
    text = name if name in sharding_kinds() else f"single+{name}"
    kind = CATALOG[name]
    for workload in (TRAIN, SAMPLE):
        recipe = parse(text, workload=workload)
        launch = recipe.launch("cpu", 1, SUBJECT, workload=workload)
        part = next(part for part in recipe.strategies if part.name == name)
        said = part.out_of_place(launch)
        if name in sharding_kinds():
            assert bool(said) == (workload == SAMPLE and name != "single")
        else:
            assert bool(said) == (workload not in kind.workloads)
        assert not said or ("; " in said and "\n" not in said)


@pytest.mark.parametrize("name", [*ABSENT, "Flash-Decoding"])
def test_what_is_no_strategy_is_refused_with_the_reason(name):
    with pytest.raises(RecipeError, match=f"there is no {name}: .*; take "):
        parse(f"single+{name}", workload=SAMPLE)
    assert name.lower().replace("-", "_") not in CATALOG


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workload": "draw"}, ["workload is 'draw'", "train, sample"]),
        ({"workload": "train"}, ["sampler_steps is 2", "--workload sample"]),
        ({"objective": "epsilon", "sampler_steps": 1}, ["sampler_steps is 1", "2 to 1000"]),
        ({"class_dropout": 0.0}, ["trained without labels", "--cfg-scale 1"]),
        ({"weights": "nowhere.safetensors"}, ["nowhere.safetensors", "no such file"]),
        ({"model": "flux-dev", "data": "synthetic"}, ["conditions of its own"]),
    ],
)
def test_a_sampling_run_that_cannot_be_is_refused_by_name(fields, words):
    with pytest.raises((BadInput, Conflict)) as caught:
        resolve(dataclasses.replace(DRAWN, **fields))
    assert [word for word in words if word not in str(caught.value)] == []
