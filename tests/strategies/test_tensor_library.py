"""Tensor parallelism of diffusers' models in miniature, on four ranks: losses, norms and updates of
ddp, evidence, broken sums, predicted memory; and which presets it reaches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Case, hold_apart, hold_equal, launched_together

from harness.resolve import resolve
from harness.result import Result, Status
from strategies.parallel.tensor.products import products
from tests.made.publics import miniature
from tests.sabotage.ranks import CUT

pytestmark = pytest.mark.thorough

FLUX = {"grad_clip": 0.25, "beta2": 0.99, "weight_decay": 0.01, "steps": 1, "ema": 0.9}
PLAIN = "fsdp2+tp"
EQUAL = [PLAIN]
REACHED = ["sd3.5-medium", "hunyuanvideo"]
"""Miniatures besides Flux whose blocks are found whole."""
REFUSED = {
    "cogvideox-5b": "transformer_blocks.0.attn1 (Attention) does not compute with a part",
    "wan2.1-1.3b": "blocks.0.attn1.norm_q normalizes over several heads",
    "sana-1.6b": "transformer_blocks.0.ff.conv_inverted (Conv2d) is no layer that it cuts",
    "mochi": "transformer_blocks.0.attn1 (MochiAttention) does not compute with a part",
    "z-image": "85 inner features of the MLP cannot be dealt to 2 ranks",
    "lumina2": "1 heads cannot be dealt to 2 ranks",
}


def flux(recipe: str, **more):
    return miniature("flux-dev", recipe, **(FLUX | {"processes": 4} | more))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    base = tmp_path_factory.mktemp("tensor")
    cases = {recipe: Case(flux(recipe)) for recipe in ("ddp", *EQUAL)}
    for name in ("products_not_summed", "gradients_not_summed"):
        cases[name] = Case(flux(PLAIN), ("--sabotage", name))
    for name in REACHED:
        cases[name] = Case(miniature(name, PLAIN, processes=4))
    return launched_together(cases, base), base


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_flux_is_cut_and_shows_it(row):
    assert [check for check in row.audit if not check.ok] == []
    facts = row.evidence["tp"]
    # A double block sums attention and MLP of the image and of the text, a single block once.
    assert facts["heads_inside"] == 1 and facts["sums_a_block"]["forward"] == 2.5


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_losses_gradients_and_updates_of_flux_are_those_of_whole_weights(row, runs):
    hold_equal(row, runs[0]["ddp"])


@pytest.mark.parametrize("name", REACHED)
def test_other_families_train_as_one_process_does(name, runs, train_here):
    found = runs[0][name]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    assert [check for check in found.audit if not check.ok] == []
    run, log = train_here(miniature(name, "single"), len(found.losses))
    assert found.losses == pytest.approx(log.all_losses(run), rel=1e-4)
    assert found.grad_norms == pytest.approx(log.all_norms(), rel=1e-4)


@pytest.mark.parametrize("name", ["products_not_summed", "gradients_not_summed"])
def test_a_missing_sum_of_flux_is_noticed(name, runs):
    hold_apart(runs[0][name], runs[0]["ddp"])
    failed = {check.name for check in runs[0][name].audit if not check.ok}
    assert any(check.startswith("evidence: tp") for check in failed) and name in CUT


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_by_the_module(name):
    said = str(resolve(miniature(name, PLAIN, processes=2)).refusal)
    assert said.startswith(f"tp: {REFUSED[name]}") and "leave tp out" in said


@pytest.mark.parametrize("name", ["flux-dev", "flux2-dev", "qwen-image"])
def test_the_rule_finds_what_diffusers_plans(name):
    """The library's own plan: name of a layer -> how it is cut."""
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs

    subject = resolve(miniature(name, "ddp", processes=2)).subject
    with torch.device("meta"):
        module = subject.make()
    names = {part: full for full, part in module.named_modules()}
    found = {
        f"{names[block]}.{layer}.weight": (cut.axis, list(cut.pieces))
        for block in subject.blocks(module)
        for layer, cut in products(block).items()
    }
    plan = resolve_tp_shard_specs(module, type(module)._tp_plan, 2)
    wanted = {key: (s.dim, s.block_sizes) for key, s in plan.items() if key.endswith("weight")}
    assert found == wanted
