"""Images encoded in the loop: shapes, determinism, the public VAE's size, and a real training."""

import dataclasses

import numpy as np
import pytest
import torch
from conftest import TINY, observe_here, part_named

from harness.data.datasets import Images, open_data
from harness.data.feed import check_data


def test_latents_have_an_eighth_of_the_side_and_depend_on_the_index_alone():
    facts = check_data("vae_small:64")
    assert facts.sample_shape == (4, 8, 8)
    one, other = open_data("vae_small:64", "cpu"), open_data("vae_small:64", "cpu")
    x, y = one.fetch(np.array([3, 5]))
    again, _ = other.fetch(np.array([5, 3]))
    assert x.shape == (2, 4, 8, 8) and x.dtype == torch.float32 and not x.requires_grad
    # A convolution of another batch order rounds differently.
    torch.testing.assert_close(x, again.flip(0), rtol=1e-4, atol=1e-6)
    assert x.std() > 1e-4 and y.dtype == torch.int64 and int(y.max()) < facts.classes


def test_it_has_the_public_shape():
    """The public sd-vae-ft holds 83.65 million parameters, 34.16 in its encoder."""
    facts = dataclasses.replace(check_data("vae:64"), size=1)
    with torch.device("meta"):
        vae = Images("vae", facts, "meta").vae
    assert sum(p.numel() for p in vae.encoder.parameters()) == 34_163_592
    assert sum(p.numel() for p in vae.parameters()) == 83_653_863


@pytest.mark.parametrize("name", ["vae:30", "vae:many"])
def test_sizes_that_cannot_be_encoded_are_refused(name):
    with pytest.raises(ValueError, match="multiple of 8"):
        check_data(name)


def test_the_encoder_s_attention_is_not_taken_for_the_model_s(train_here):
    """All of the suite fast_dit_table's rows were void by it: their model's is written out."""
    recipe = "single+bf16+attend"
    run = train_here(dataclasses.replace(TINY, data="vae_small:64", recipe=recipe), 1)
    observe_here(run, recipe)
    facts = part_named(recipe, "attend").evidence(run)
    assert facts["calls_in_forward"] > 0
    fused = [r for r in run.observed.ran if "scaled_dot_product" in r.name]
    assert fused and {r.phase for r in fused} == {"data"}
    assert "fetch" not in vars(run.feed.dataset), "as it was"
    assert run.log.losses[0].isfinite()
    assert not any(p.requires_grad for p in run.feed.dataset.vae.parameters())
