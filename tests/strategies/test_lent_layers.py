"""Streamed blocks with layers that code calls outside of them, as diffusers' DiT does."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import weights_digest

from harness.resolve import resolve
from tests.made.publics import MINIATURES, miniature

SIZES = MINIATURES["dit-xl-2"][0].replace("num_layers=2", "num_layers=4")
EMBEDDING = "transformer_blocks.0.norm1.emb"


def small(recipe: str):
    return miniature("dit-xl-2", recipe, set=SIZES)


@pytest.mark.parametrize("name", ["dit-xl-2", "flux-dev", "minimax-h3"])
def test_a_family_names_those_that_its_survey_finds(name):
    """A family names them, so that a launch is refused without torch."""
    subject = resolve(miniature(name, "single")).subject
    found = subject.survey.lent
    assert subject.lent == ((EMBEDDING,) if name == "dit-xl-2" else ())
    assert set(subject.lent) <= set(found)
    assert all(part.startswith(subject.lent) for part in found)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp2_offload", "hsdp"])
def test_a_block_that_is_sharded_again_is_refused(engine):
    """torch fails in the first forward with "got mixed torch.Tensor and DTensor"."""

    def refusal(recipe: str):
        few = {"processes": 4, "global_batch": 4}
        return resolve(dataclasses.replace(small(recipe), **few)).refusal

    why = str(refusal(f"{engine}+bf16"))
    assert f"calls {EMBEDDING} outside of its block" in why and "zero3" in why, why
    assert refusal(f"{engine}:reshard=off+bf16") is None
    assert refusal("zero3+bf16") is None


@pytest.mark.parametrize("more", ["", "+lora"])
def test_they_stay_on_the_device_and_train_alike(train_here, more):
    plain = train_here(small(f"single{more}"), 2)
    run = train_here(small(f"single+block_swap:blocks=4{more}"), 2)
    lent = {id(p) for p in run.module.get_submodule(EMBEDDING).parameters()}
    hosts = {id(p) for p in run.attached["block_swap"].hosts}
    assert lent and hosts and not lent & hosts
    assert run.log.losses == plain.log.losses
    assert weights_digest(run.module) == weights_digest(plain.module)
