"""Layers and blocks that adapters are told to stand in."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import part_named

from harness.resolve import resolve
from harness.worker.setup import edited_model
from strategies import initial
from strategies.adapters.beside import chosen_blocks, most_blocks, own
from strategies.adapters.coded import Coded
from strategies.base import BadInput
from tests.made.publics import miniature


@pytest.mark.parametrize(
    ("text", "chosen", "most"),
    [
        ("all", [0, 1, 2, 3, 4, 5], 0),
        ("1-2/5", [1, 2, 5], 6),
        ("first2/last1", [0, 1, 5], 2),
        ("4-8/4", [4, 5], 9),
    ],
)
def test_blocks_are_chosen_by_number_and_from_either_end(text, chosen, most):
    assert (chosen_blocks(text, 6), most_blocks(text)) == (chosen, most)


def adapted_in(recipe: str) -> set[str]:
    """The layers of a small Flux, two blocks of each group, that get adapters."""
    spec = miniature("flux-dev", f"single+bf16_pure+{recipe}")
    module, *_ = edited_model(resolve(spec))
    return {n.partition(".lora_")[0].partition(".oft_")[0] for n in own(module)}


def test_layers_of_a_public_model_are_chosen_by_part_and_by_name():
    first = "transformer_blocks.0."
    feeds = {f"{first}{ff}.net.{i}" for ff in ("ff", "ff_context") for i in ("0.proj", "2")}
    assert adapted_in("lora:targets=ffn,blocks=0") == feeds
    single = {f"single_transformer_blocks.1.attn.{name}" for name in ("to_q", "to_v")}
    assert adapted_in("oft:targets=to_q/to_v,blocks=last1") == single
    with pytest.raises(BadInput, match="none of the blocks last1 of flux-dev has a layer of"):
        adapted_in("lora:targets=ffn,blocks=last1")


def test_adapters_reach_layers_outside_of_the_blocks_by_the_endings_of_their_names():
    named = "lora:targets=to_q/to_out.0/linear_1,reach=model"
    within = {n for n in adapted_in("lora:targets=to_q/to_out.0") if "transformer_blocks" in n}
    beside = adapted_in(named) - within
    assert within < adapted_in(named) and {n.rpartition(".")[2] for n in beside} == {"linear_1"}
    assert not any("transformer_blocks" in name for name in beside)
    with pytest.raises(BadInput, match="that ends in linear_9; leave it out"):
        adapted_in("lora:targets=to_q/linear_9,reach=model")


# -- layers that ``cast`` stores in 8 bits, by its parameter ``layers`` --


def coded(train_here, recipe: str) -> set[str]:
    run = train_here(miniature("flux-dev", recipe), 1)
    facts = part_named(recipe, "cast").evidence(run)
    named = run.module.named_modules()
    names = {name.removesuffix(".base_layer") for name, m in named if isinstance(m, Coded)}
    assert facts["layers"] == len(names)
    return names


def test_all_layers_are_more_than_the_blocks(train_here):
    built = initial.build(resolve(miniature("flux-dev", "single")).subject, 0, "awake")
    linears = {name for name, m in built.named_modules() if type(m) is torch.nn.Linear}
    every = coded(train_here, "single+cast:layers=all+lora")
    assert coded(train_here, "single+cast+lora") < every and every == linears


def test_codes_need_no_bitsandbytes(train_here, monkeypatch):
    monkeypatch.setitem(sys.modules, "strategies.adapters.quantised_base", None)  # it imports that
    assert coded(train_here, "single+cast+lora")


@pytest.mark.parametrize(("recipe", "processes"), [("single+cast:layers=all+head", 1),
                                                   ("fsdp2+cast:layers=all+lora", 2)])  # fmt: skip
def test_where_only_the_blocks_are_coded(recipe, processes):
    found = resolve(miniature("flux-dev", recipe, processes=processes)).refusal
    assert "leave layers out" in str(found)
