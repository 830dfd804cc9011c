"""Layers and blocks that adapters are told to stand in."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import TINY

from harness.resolve import resolve
from harness.worker.setup import Building
from strategies import parse
from strategies.adapters.beside import chosen_blocks, most_blocks, own
from strategies.base import BadInput
from strategies.recipe import RecipeError
from tests.made.publics import miniature

WRONG = {
    "lora:blocks=x": ["lora: blocks is 'x'", "0-9/12"],
    "dora:blocks=0/3-1": ["'3-1'", "first4"],
    "qlora:blocks=first0": ["'first0'"],
    "lora:blocks=last2-4": ["'last2-4'"],
    "lokr:blocks=": ["blocks is ''"],
    "loha:targets=to_q/": ["targets is 'to_q/'", "to_q/to_v"],
    "lokr:factor=0": ["factor is 0"],
    "loha:rank=two": ["rank is 'two'"],
    "oft:size=1": ["size is 1", "from 2"],
    "lora:reach=all": ["reach is 'all'", "blocks, or model"],
    "lora:reach=model,blocks=0": ["leave blocks=0 out"],
    "oft:dtype=bf16": ["dtype is 'bf16'", "fp32"],
}


@pytest.mark.parametrize("part", WRONG)
def test_a_bad_value_is_named_with_its_key_and_what_to_write(part):
    with pytest.raises(RecipeError) as error:
        parse(f"single+{part}")
    for word in WRONG[part]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "chosen", "most"),
    [
        ("all", [0, 1, 2, 3, 4, 5], 0),
        ("0", [0], 1),
        ("1-2/5", [1, 2, 5], 6),
        ("first2/last1", [0, 1, 5], 2),
        ("last9", [0, 1, 2, 3, 4, 5], 9),
        ("4-8/4", [4, 5], 9),
    ],
)
def test_blocks_are_chosen_by_number_and_from_either_end(text, chosen, most):
    assert (chosen_blocks(text, 6), most_blocks(text)) == (chosen, most)


def adapted_in(recipe: str) -> set[str]:
    """The layers of a small Flux, two blocks of each group, that get adapters."""
    building = Building(resolve(miniature("flux-dev", f"single+bf16_pure+{recipe}")))
    building.edit()
    return {n.partition(".lora_")[0].partition(".oft_")[0] for n in own(building.module)}


def test_layers_of_a_public_model_are_chosen_by_part_and_by_name():
    first = "transformer_blocks.0."
    feeds = {f"{first}{ff}.net.{i}" for ff in ("ff", "ff_context") for i in ("0.proj", "2")}
    assert adapted_in("lora:targets=ffn,blocks=0") == feeds
    single = {f"single_transformer_blocks.1.attn.{name}" for name in ("to_q", "to_v")}
    assert adapted_in("oft:targets=to_q/to_v,blocks=last1") == single
    with pytest.raises(BadInput, match="none of the blocks last1 of flux-dev has a layer of"):
        adapted_in("lora:targets=ffn,blocks=last1")


def test_what_is_trained_does_not_depend_on_how_blocks_are_named(train_here):
    """All blocks by their numbers train as all blocks do, bit by bit."""
    losses = []
    for blocks in ("all", "0-1/last2"):
        recipe = f"single+lora:blocks={blocks}"
        losses.append(train_here(dataclasses.replace(TINY, recipe=recipe), 2)[1].losses)
    assert [float(x) for x in losses[0]] == [float(x) for x in losses[1]]


def test_adapters_reach_layers_outside_of_the_blocks_by_the_endings_of_their_names():
    named = "lora:targets=to_q/to_out.0/linear_1,reach=model"
    within = {n for n in adapted_in("lora:targets=to_q/to_out.0") if "transformer_blocks" in n}
    beside = adapted_in(named) - within
    assert within < adapted_in(named) and {n.rpartition(".")[2] for n in beside} == {"linear_1"}
    assert not any("transformer_blocks" in name for name in beside)
    with pytest.raises(BadInput, match="that ends in linear_9; leave it out"):
        adapted_in("lora:targets=to_q/linear_9,reach=model")


@pytest.mark.parametrize("targets", ["all", "attention"])
def test_adapters_of_the_whole_model_train(targets, train_here):
    recipe = f"single+lora:targets={targets},reach=model"
    told = train_here(dataclasses.replace(TINY, recipe=recipe), 2)[1]
    assert len(told.losses) == 2


def test_layers_outside_of_the_blocks_need_a_whole_model_on_each_rank():
    recipe = "zero3+bf16+lora:reach=model"
    row = resolve(dataclasses.replace(TINY, recipe=recipe, processes=2))
    assert "take one GPU or ddp" in str(row.recipe.refusal(row.launch))
