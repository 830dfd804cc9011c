"""Counts and FLOPs in closed form against the built model, torch's counter and the paper."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects.dit.model import DiT
from harness.subjects.dit.presets import (
    PRESETS,
    Shape,
    forward_flops,
    parameter_count,
    shape_of,
    train_flops,
    trainable_count,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "reference_dit.json").read_text())
OTHER_PRODUCTS = ("lora", "dora", "head", "difffit", "controlnet", "prune_structured")


def built(shape: Shape, input_size=32, channels=4, classes=1000, learn_sigma=True) -> DiT:
    """The model on the meta device, where neither memory nor arithmetic is spent."""
    with torch.device("meta"):
        return DiT(
            input_size, shape.patch_size, channels, shape.hidden_size, shape.depth,
            shape.num_heads, shape.mlp_ratio, 0.1, classes, learn_sigma,
        )  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN["structure"]["counts"])
def test_counts_are_the_reference_s(name):
    assert parameter_count(PRESETS[name]) == GOLDEN["structure"]["counts"][name]
    assert trainable_count(PRESETS[name]) == GOLDEN["structure"]["trainable"][name]


@pytest.mark.parametrize(
    ("name", "size", "learn_sigma"), [("DiT-T/4", 32, True), ("DiT-XL/2", 64, False)]
)
def test_forward_flops_are_torch_s(name, size, learn_sigma):
    model = built(PRESETS[name], size, learn_sigma=learn_sigma)
    latents = torch.zeros(3, 4, size, size, device="meta")
    index = torch.zeros(3, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(latents, index, index)
    flops = forward_flops(PRESETS[name], size, batch=3, learn_sigma=learn_sigma)
    assert counter.get_total_flops() == flops > 0


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
    whole = train_flops(resolved.subject.shape, batch=len(latents))
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
