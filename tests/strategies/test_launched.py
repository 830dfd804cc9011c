"""Strategies on two processes: started by accelerate, each with the evidence of all its parts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import HALF, STRIP, TINY, Case, OnDemand, launched_together
from safetensors.torch import load_file

from harness.planner import pool
from harness.resolve import resolve
from harness.result import Result, Status
from harness.spec import Spec
from strategies import parse
from tests.made.publics import MINIATURES, miniature

pytestmark = pytest.mark.thorough

DEEP = dataclasses.replace(TINY, processes=2, steps=1)
TWO = dataclasses.replace(DEEP, model=HALF)
LONGER = dataclasses.replace(TWO, global_batch=8, steps=2)
TOKENS = dataclasses.replace(
    TWO, model="DiT-T/8:depth=2,tokens=500", objective="masked", data="synthetic"
)
SPARSE = "sgd:momentum=0.0+sparse_embedding"
# A learning rate at which an adapter of zeros soon matters: at the usual one the losses of a
# model whose adapters never moved would agree too.
ADAPTING = dataclasses.replace(LONGER, learning_rate=2e-2)
TRAINED = "adapters.safetensors"

PAIRS = {
    "zero3+bf16_pure+lora:dtype=fp32+checkpoint": LONGER,
    "fsdp2+lora:blocks=1+checkpoint": LONGER,
    "zero3+bf16+oft+checkpoint": LONGER,
    "fsdp2+bf16+loha": LONGER,
    "zero3+prune": LONGER,
    "ddp+compress:kind=powersgd": LONGER,
    "ddp+topk+accumulate": LONGER,
    "zero2+bf16_master": TWO,
    "zero2+sp": TWO,
    "zero2+compile:backend=aot_eager+bf16+checkpoint": TWO,
    "zero3+attend:kernel=flash+checkpoint:keep=nothing+bf16_pure": TWO,
    "ddp+block_swap:blocks=3+accumulate": DEEP,
    "fsdp2_offload+bf16+checkpoint+accumulate": TWO,
    "fsdp2+bf16+checkpoint:share=0.5+compile:backend=aot_eager": TWO,
    "fsdp2+adam8bit:lib=torchao+offload_activations": TWO,
    "fsdp2+bf16_pure+muon": TWO,
    "ddp+prodigy+accumulate": LONGER,
    "fsdp2+controlnet": LONGER,
    "fsdp2+fp8:emulate=on,gather=fp8": dataclasses.replace(TWO, global_batch=2),
    "fsdp2+optimizer_in_backward": DEEP,
    f"ddp+{SPARSE}": dataclasses.replace(TWO, learning_rate=0.1),
    "ddp+cross_entropy+accumulate": TOKENS,
}
TAUGHT = "zero3+distill:depth=3,feature=0.5"
PAIRS[TAUGHT] = DEEP
SPLIT_ADAPTERS = [("zero3", "lora"), ("fsdp2", "dora"), ("fsdp2", "qlora")]
ADAPTERS = [f"{sharding}+{kind}" for sharding, kind in SPLIT_ADAPTERS]
ADAPTERS += [f"ddp+{kind}" for kind in dict.fromkeys(kind for _, kind in SPLIT_ADAPTERS)]
STRIPS = [
    "zero3+bf16+checkpoint",
    "ddp+bf16_pure+block_swap:blocks=4+cast+lora+checkpoint",
]
"""Recipes of a subject that is no DiT."""
UNLIKE = ("flux-dev", "wan2.1-1.3b", "z-image", "sana-1.6b", "mochi")
IN_TURN = itertools.cycle(("ddp", "zero2", "zero3", "ddp+lora", "ddp+checkpoint"))
FAMILIES = {
    f"{name} {recipe}": miniature(name, recipe, processes=2, steps=1)
    for name, recipe in (
        *zip(MINIATURES, IN_TURN, strict=False),
        # Two groups of blocks; a video; refiners; linear attention; trained rotary frequencies.
        *((name, "zero3+checkpoint") for name in UNLIKE),
        ("qwen-image", "zero2+lora"),  # weights that get no gradient
        ("sd3.5-medium", "zero3+lora:targets=attention"),  # a block that attends twice
    )
}
"""Each family of public models in miniature, and recipes of several kinds."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Mapping[str, Result], Path]:
    """Name -> result, run when it is read, and where the folders of those names are."""
    base = tmp_path_factory.mktemp("launched")

    def case(spec: Spec, recipe: str, *words: str) -> Case:
        return Case(dataclasses.replace(spec, recipe=recipe), words)

    cases = {recipe: case(spec, recipe) for recipe, spec in PAIRS.items()}
    for recipe in ADAPTERS:
        cases[recipe] = case(ADAPTING, recipe, "--trained", str(base / recipe / TRAINED))
    strip = dataclasses.replace(STRIP, processes=2)
    cases |= {f"strip-{recipe}": case(strip, recipe) for recipe in STRIPS}
    cases |= {name: Case(spec) for name, spec in FAMILIES.items()}
    return OnDemand(lambda name: launched_together({name: cases[name]}, base)[name]), base


@pytest.mark.parametrize("row", PAIRS, indirect=True)
def test_it_runs_on_two_processes_with_evidence(row):
    for part in parse(row.spec.recipe).strategies:
        assert row.evidence[part.name], f"{part} shows facts"
    assert len(row.ranks) == 2 and [check for check in row.audit if not check.ok] == []


@pytest.mark.parametrize("row", [f"ddp+{SPARSE}"], indirect=True)
def test_sparse_gradients_travel_between_two_processes(row, train_here):
    spec = dataclasses.replace(row.spec, recipe=f"single+{SPARSE}", processes=1)
    run = train_here(spec, 4)
    assert row.losses[:4] == pytest.approx(run.all_losses(), rel=1e-5)
    sent = row.evidence["sparse_embedding"]
    assert 0 < sent["place_bytes_sent"] < sent["gradient_bytes"] < 0.5 * sent["dense_bytes"]
    (kept,) = (p for p in parse(spec.recipe).strategies if p.name == "sparse_embedding")
    assert "place_bytes_sent" not in kept.evidence(run), "one process sends nothing"


ALIKE = [TAUGHT, "ddp+block_swap:blocks=3+accumulate", "fsdp2+optimizer_in_backward"]


@pytest.mark.parametrize("row", ALIKE, indirect=True)
def test_it_trains_on_two_processes_as_on_one(row, train_here):
    """Taught, or by gradients that go another way than DDP's buckets."""
    part = row.spec.recipe.partition("+")[2] if row.spec.recipe == TAUGHT else "adamw"
    alone = dataclasses.replace(row.spec, recipe=f"single+{part}", processes=1)
    run = train_here(alone, 2)
    assert row.losses[:2] == pytest.approx([float(loss) for loss in run.log.losses], rel=1e-5)
    assert row.grad_norms[:2] == pytest.approx([float(norm) for norm in run.log.norms], rel=1e-4)


@pytest.mark.parametrize(("sharding", "adapter"), SPLIT_ADAPTERS)
def test_an_adapter_on_split_weights_learns_what_it_does_under_ddp(sharding, adapter, runs):
    """Wrong results have been reported of ZeRO-3's pair: peft 2500, DeepSpeed 5109."""
    rows, base = runs
    reference, row = (rows[f"{name}+{adapter}"] for name in ("ddp", sharding))
    for result in (reference, row):
        assert result.status is Status.OK, f"{result.reason}\n{result.log_tail}"
    assert row.losses == pytest.approx(reference.losses, rel=1e-5)
    assert row.grad_norms == pytest.approx(reference.grad_norms, rel=1e-3)
    assert reference.grad_norms[-1] > 2 * reference.grad_norms[0], "the adapters act by then"
    learnt, wanted = (load_file(base / one.spec.recipe / TRAINED) for one in (row, reference))
    assert learnt.keys() == wanted.keys() and learnt
    for name, value in wanted.items():
        torch.testing.assert_close(learnt[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("row", [f"strip-{recipe}" for recipe in STRIPS], indirect=True)
def test_it_is_launched_and_audited_like_any_other(row, train_here):
    text = row.spec.recipe
    assert {part.name for part in parse(text).strategies} <= set(row.evidence)
    alone = "+".join(["single", *text.split("+")[1:]])
    run = train_here(dataclasses.replace(STRIP, recipe=alone), 2)
    losses = run.all_losses()
    # ZeRO rounds the weights themselves to bfloat16, autocast a copy.
    close = 1e-2 if "bf16" in text else 1e-5
    assert len(losses) == 2 and row.losses[:2] == pytest.approx(losses, rel=close)


def test_memory_is_predicted_of_own_subjects_students_and_early_steps(runs, tmp_path):
    names = [*(f"strip-{recipe}" for recipe in STRIPS), TAUGHT, ALIKE[2]]
    rows = [runs[0][name] for name in names]
    predicted = pool.predict_all([resolve(row.spec) for row in rows], tmp_path)
    for row, found in zip(rows, predicted, strict=True):
        assert found.method == "trace", found.reason
        assert found.steady.bytes == pytest.approx(row.ranks[0].categories.total, rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("row", FAMILIES, indirect=True)
def test_a_family_trains_on_two_processes_as_it_does_alone(row, train_here):
    assert [check.name for check in row.audit if not check.ok] == []
    assert {part.name for part in parse(row.spec.recipe).strategies} <= set(row.evidence)
    parts = row.spec.recipe.split("+")[1:]
    alone = "+".join(["single", *(part for part in parts if part != "checkpoint")])
    spec = dataclasses.replace(row.spec, recipe=alone, processes=1)
    run = train_here(spec, 2)
    assert row.losses[:2] == pytest.approx(run.all_losses(), rel=1e-4)
    assert row.grad_norms[:2] == pytest.approx(run.all_norms(), rel=1e-4)
    assert row.losses[0] != row.losses[1], "it learned nothing"
