"""What a measured run writes down."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import TINY

from harness import presets
from harness.measure import Session, _flops
from harness.resolve import resolve


def flops(text: str, train_here) -> float:
    spec = dataclasses.replace(TINY, recipe=text)
    run, log = train_here(spec, 1)
    books = dict.fromkeys(("folder", "reporter", "meter"))
    return _flops(Session(resolved=resolve(spec), run=run, log=log, **books))


def test_flops_are_the_closed_form_s(train_here):
    facts = resolve(TINY).facts
    asked = presets.train_flops(
        presets.shape_of(TINY.model),
        facts.input_size,
        facts.channels,
        batch=TINY.global_batch,
        learn_sigma=True,
    )
    assert flops("single", train_here) == flops("single+checkpoint", train_here) == asked


@pytest.mark.parametrize("text", ["single+head", "single+difffit", "single+prune_structured"])
def test_no_flops_where_weights_are_frozen_or_removed(text, train_here):
    assert flops(text, train_here) == 0.0
