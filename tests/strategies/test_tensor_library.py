"""Tensor parallelism of diffusers' models in miniature, on four ranks: losses, norms and updates of
ddp, evidence, broken sums, checkpoints, predicted memory; and which presets it reaches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Case, hold_alike, hold_apart, hold_equal, launched_together
from safetensors.torch import load_file

from harness.planner import pool
from harness.resolve import resolve
from harness.result import Result, Status
from strategies.parallel.tensor.products import products
from tests.made.publics import MINIATURES, miniature
from tests.sabotage.ranks import CUT

pytestmark = pytest.mark.thorough

FLUX = {"grad_clip": 0.25, "beta2": 0.99, "weight_decay": 0.01, "steps": 1, "ema": 0.9}
PLAIN, HALF = "fsdp2+tp", "step-00000002"
EQUAL = [PLAIN, "fsdp2+tp+checkpoint"]
REACHED = [
    "chroma", "flux2-dev", "sd3.5-medium", "pixart-sigma", "dit-xl-2", "hunyuanvideo",
    "hunyuanvideo-1.5", "qwen-image", "qwen-image-edit-2511", "cogview4-6b", "auraflow", "krea-2",
    "ideogram-4",
]  # fmt: skip
"""Miniatures besides Flux whose blocks are found whole."""
EVEN = {
    "z-image": ("n_heads=2,n_kv_heads=2,dim=32", "n_heads=2,n_kv_heads=2,dim=48"),
    "lumina2": ("hidden_size=24", "hidden_size=32"),
}
"""Miniatures of odd sizes that are refused, and a change by which two ranks divide them."""
RECIPES = {"dit-xl-2": "fsdp2:reshard=off+tp"}
"""Recipes of families that FSDP2 refuses otherwise."""
REFUSED = {
    "cogvideox-5b": "transformer_blocks.0.attn1 (Attention) does not compute with a part",
    "wan2.1-1.3b": "blocks.0.attn1.norm_q normalizes over several heads",
    "ltx-video-2b": "transformer_blocks.0.attn1.norm_q normalizes over several heads",
    "ltx-2": "transformer_blocks.0.attn1.norm_q normalizes over several heads",
    "ltx-2.5": "transformer_blocks.0.attn1.to_gate_logits (Linear) is no layer that it cuts",
    "sana-1.6b": "transformer_blocks.0.ff.conv_inverted (Conv2d) is no layer that it cuts",
    "mochi": "transformer_blocks.0.attn1 (MochiAttention) does not compute with a part",
    "hidream-i1": "double_stream_blocks.0.block.attn1.to_q_t (Linear) is no layer",
    "qwen-image-2.1": "transformer_blocks.0.img_mlp.proj (Linear) is no layer that it cuts",
    "minimax-h3": "transformer_blocks.0.adaln_proj.linear (Linear) is no layer",
    "z-image": "85 inner features of the MLP cannot be dealt to 2 ranks",
    "lumina2": "1 heads cannot be dealt to 2 ranks",
}


def flux(recipe: str, **more):
    return miniature("flux-dev", recipe, **(FLUX | {"processes": 4} | more))


def deep():
    """A model that is predicted from shallow ones."""
    sizes = MINIATURES["flux-dev"][0]
    sizes = sizes.replace("num_layers=2,num_single_layers=2", "num_layers=9,num_single_layers=8")
    return flux("fsdp2+tp+checkpoint", set=sizes)


def even(name: str, recipe: str, **more):
    sizes = MINIATURES[name][0].replace(*EVEN.get(name, ("", "")))
    heads = ("num_attention_heads=3,num_kv_heads=1", "num_attention_heads=4,num_kv_heads=2")
    sizes = sizes.replace(*heads).replace("axes_dims=[8,4,4]", "axes_dims=[8,8,8]")
    return miniature(name, recipe, **{"processes": 4, "set": sizes, **more})


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[dict[str, Result], Path]:
    base = tmp_path_factory.mktemp("tensor")
    cases = {
        recipe: Case(flux(recipe)) for recipe in ("ddp", *EQUAL, "fsdp2+bf16", "fsdp2+tp+bf16")
    }
    for name in ("products_not_summed", "gradients_not_summed"):
        cases[name] = Case(flux(PLAIN), ("--sabotage", name))
    cases["deep"] = Case(deep())
    saved, again = base / "kept", base / "went on"
    words = ("--checkpoint", str(saved), "--save-every", "2", "--trained", str(base / "trained"))
    cases["saving"] = Case(flux(PLAIN, steps=3), words)
    again.mkdir()
    words = ("--checkpoint", str(again), "--save-every", "2", "--resume")
    cases["resumed"] = Case(flux(PLAIN, steps=3), words, ((saved / HALF, again / HALF),))
    for name in (*REACHED, *EVEN):
        cases[name] = Case(even(name, RECIPES.get(name, PLAIN)))
    return launched_together(cases, base), base


@pytest.mark.parametrize("row", [*EQUAL, "fsdp2+tp+bf16"], indirect=True)
def test_flux_is_cut_and_shows_it(row):
    assert [check for check in row.audit if not check.ok] == []
    facts = row.evidence["tp"]
    # A double block sums attention and MLP of the image and of the text, a single block once.
    assert facts["heads_inside"] == 1 and facts["sums_a_block"]["forward"] == 2.5


@pytest.mark.parametrize("row", EQUAL, indirect=True)
def test_losses_gradients_and_updates_of_flux_are_those_of_whole_weights(row, runs):
    hold_equal(row, runs[0]["ddp"])


def test_flux_in_bf16_is_near_whole_weights_in_bf16(runs):
    found, wanted = runs[0]["fsdp2+tp+bf16"], runs[0]["fsdp2+bf16"]
    assert found.losses == pytest.approx(wanted.losses, rel=2e-2)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=2e-2)


@pytest.mark.parametrize("name", [*REACHED, *EVEN])
def test_other_families_train_as_one_process_does(name, runs, train_here):
    found = runs[0][name]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    assert [check for check in found.audit if not check.ok] == []
    run, log = train_here(even(name, "single", processes=1), len(found.losses))
    assert found.losses == pytest.approx(log.all_losses(run), rel=1e-4)
    assert found.grad_norms == pytest.approx(log.all_norms(), rel=1e-4)


@pytest.mark.parametrize("name", ["products_not_summed", "gradients_not_summed"])
def test_a_missing_sum_of_flux_is_noticed(name, runs):
    hold_apart(runs[0][name], runs[0]["ddp"])
    failed = {check.name for check in runs[0][name].audit if not check.ok}
    assert any(check.startswith("evidence: tp") for check in failed) and name in CUT


def test_what_is_saved_of_flux_is_a_plain_model_s_and_goes_on(runs, train_here):
    (results, base), row = runs, runs[0]["saving"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    run, _ = train_here(flux("single", steps=3, processes=1), len(row.losses))
    hold_alike(load_file(base / "trained"), dict(run.trained.module.named_parameters()), 2e-6)
    again = results["resumed"]
    assert again.status is Status.OK, f"{again.reason}\n{again.log_tail}"
    assert again.losses == pytest.approx(row.losses, rel=1e-6)
    assert again.grad_norms == pytest.approx(row.grad_norms, rel=1e-6)


def test_memory_and_sums_of_flux_are_predicted(runs, tmp_path):
    rows = [runs[0][name] for name in (*EQUAL, "deep")]
    found = pool.predict_all([resolve(row.spec) for row in rows], tmp_path)
    for row, predicted in zip(rows, found, strict=True):
        assert predicted.method == "trace", predicted.reason
        # From shallow models a miniature under FSDP2, with or without tp, is predicted less well.
        close = 0.02 if row is rows[-1] else 0.005
        assert predicted.steady.bytes == pytest.approx(row.ranks[0].categories.total, rel=close)
    sent = (w for w in found[0].work if w.kind == "collective" and w.phase == "forward")
    within = [w for w in sent if w.stride == 1]
    image, text, width = 16, 8, 32
    # Two double blocks, and two single ones.
    values = (2 * 2 + 2) * (image + text) * width
    micro = rows[0].spec.global_batch // 2
    assert sum(w.bytes * w.count for w in within) == 2 * 4 * micro * values


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_by_the_module(name):
    said = str(resolve(miniature(name, PLAIN, processes=2)).refusal)
    assert said.startswith(f"tp: {REFUSED[name]}") and "leave tp out" in said


def test_every_family_is_reached_or_refused():
    assert {"flux-dev", *REACHED, *REFUSED} == set(MINIATURES)


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
