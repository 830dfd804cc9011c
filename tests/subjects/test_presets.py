"""Counts and FLOPs of DiTs against the paper, and rows that have other products."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from harness.data.feed import check_data
from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects import subject_of
from harness.subjects.dit.model import DiT
from harness.subjects.dit.presets import PRESETS, Shape, shape_of

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reference_dit.json").read_text())
OTHER_PRODUCTS = ("lora", "dora", "head", "difffit", "controlnet", "prune_structured")


@pytest.mark.parametrize("name", GOLDEN["structure"]["counts"])
def test_counts_are_the_reference_s(name):
    survey = subject_of(name, check_data("synthetic")).survey
    assert survey.parameters == GOLDEN["structure"]["counts"][name]
    assert survey.sizes.total == GOLDEN["structure"]["trainable"][name]


@pytest.mark.parametrize("part", ["prune", *OTHER_PRODUCTS])
def test_a_row_has_flops_only_where_the_closed_form_is_what_runs(part):
    """Counted on a model that the part has edited."""
    resolved = resolve(Spec(recipe=f"single+{part}", model="DiT-T/8", data="synthetic"))
    with torch.random.fork_rng():
        model = DiT(32, 8, 4, 128, 4, 4, 4.0, 0.1, 1000, True)
    for strategy in resolved.recipe.strategies:
        strategy.edit_model(model, resolved.subject)
    latents = torch.zeros(resolved.spec.global_batch, 4, 32, 32, device="meta")
    index = torch.zeros(len(latents), dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.to("meta")(latents, index, index).sum().backward()
    whole = 3 * len(latents) * resolved.subject.survey.flops
    # Conv and first timestep layer take no gradient of their inputs.
    unneeded = 2 * len(latents) * (16 * 256 * 128 + 256 * 128)
    same = counter.get_total_flops() + unneeded == whole
    assert resolved.flops_per_step == (whole if same else 0)
    assert same == (part not in OTHER_PRODUCTS)


def test_a_preset_with_other_sizes():
    assert shape_of("DiT-S/4:depth=24,hidden=512,heads=8") == Shape(24, 512, 8, 4)
    assert shape_of("DiT-S/4:depth=24,width=512,heads=8") == Shape(24, 512, 8, 4)
    assert shape_of("DiT-XL/2:patch=8") == PRESETS["DiT-XL/8"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DiT-M/4", "unknown model 'DiT-M/4'; a DiT is DiT-T, DiT-S"),
        ("DiT-XL-2", "did you mean 'DiT-XL/2'"),
        ("DiT-S/4:dept=3", "no size 'dept'; did you mean 'depth'"),
        ("DiT-S/4:depth=0", "depth is '0'; a whole number from 1"),
        ("DiT-S/4:width=100", "width is 100; it must divide by heads (6)"),
        ("DiT-S/4:heads=5", "width is 384; it must divide by heads (5)"),
        ("DiT-S/4:width=512,hidden=512", "has its hidden twice; give it once"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(name, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        shape_of(name)
