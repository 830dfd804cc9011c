"""Strategies that people combine."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from conftest import FLAT, TINY, launchable, observe_here, showing, weights_digest
from safetensors.torch import load_file

from harness.resolve import resolve
from harness.worker import training
from harness.worker.audit import audit, collect_evidence
from harness.worker.loop import optimizer_step
from harness.worker.training import Training
from strategies import initial, parse
from strategies.base import Slot
from strategies.evidence.readings import bytes_of

AOT = "compile:backend=aot_eager"
HERE = [
    "single+checkpoint:every=2,share=0.75+bf16",
    "single+bf16+block_swap:blocks=3+checkpoint:every=2+accumulate",
    "single+bf16_pure:autocast=on+loha:dtype=fp32+checkpoint",
    "single+checkpoint:keep=nothing+offload_activations:what=checkpoints+bf16_pure",
    "single+fp8:emulate=on+attend:kernel=flash+adam8bit",
    "single+qlora+offload_activations",
    "single+bf16_pure+cast:dynamic=on+lora:dtype=fp32+checkpoint",
    "single+prune_structured+adam8bit+optimizer_in_backward",
    f"single+{AOT}+cast+lora",
]

BESIDE = ["single+lora", "single+dora", "single+controlnet", "single+difffit"]
"""What is trained stands beside the frozen model, and begins without effect."""

SAMPLE = {"workload": "sample", "objective": "flow"}
WORDS = {"model": "DiT-T/8:tokens=64", "objective": "masked", "data": "synthetic"}
SIX_HEADS, GPU = {"model": "DiT-S/8"}, {"device": "cuda"}
GRAPHS = "compile:mode=reduce-overhead"
REFUSED: list[tuple[str, int, list[str], dict[str, object]]] = [
    ("ddp+bf16_master+checkpoint", 2, ["only DeepSpeed", "use zero1"], {}),
    ("zero3_offload+bf16_pure+checkpoint", 2, ["CPU Adam", "bf16_master"], {}),
    ("ddp+bf16+adamw_bf16", 2, ["no master", "add bf16_pure"], {}),
    ("ddp+offload_activations:what=checkpoints", 2, ["no checkpoints", "what=all"], {}),
    ("zero3+bf16+checkpoint:keep=products", 2, ["in another order", "leave keep=products"], {}),
    ("ddp+fp8:emulate=on+prune_structured", 2, ["replaces the layers", "use bf16"], {}),
    ("ddp+head+checkpoint", 2, ["ends before the blocks", "leave"], {}),
    ("zero2+block_swap", 2, ["holds shards", "zero3_offload"], {}),
    ("ddp+block_swap+bf16", 2, ["16-bit copies", "add checkpoint"], {}),
    ("ddp+cast", 2, ["lose their updates", "add lora"], {}),
    ("ddp+block_swap+muon", 2, ["steps the model's weights", "take adamw"], {}),
    ("zero3+optimizer_in_backward", 2, ["after backward", "single"], {}),
    ("single+optimizer_in_backward", 1, ["--grad-clip 0"], {"grad_clip": 1.0}),
    ("zero2+adafactor", 2, ["flat shards", "ddp"], {}),
    ("zero2+bf16+lora:dtype=fp32", 2, ["casts adapters", "bf16_pure"], {}),
    ("zero3+bf16+lora:reach=model", 2, ["take one GPU or ddp"], {}),
    ("single+bf16_pure+difffit", 1, ["cannot hold", "bf16"], {}),
    ("single+sparse24", 1, ["16-bit", "bf16"], {}),
    ("ddp+sparse_embedding", 2, ["Adam", "sgd:momentum=0.0"], {}),
    ("ddp+attend:kernel=flash", 2, ["16 bits", "add bf16"], GPU),
    ("ddp+bf16+attend:kernel=flex+checkpoint", 2, ["uncompiled", "kernel=flash"], GPU),
    (f"single+{GRAPHS}", 1, ["leave mode=reduce-overhead out"], GPU | SAMPLE),
    (f"single+{GRAPHS}+accumulate", 1, ["leave accumulate or mode=reduce-overhead out"], GPU),
    (f"zero3+{GRAPHS}", 2, ["take ddp, zero1 or zero2"], GPU),
    ("ddp+distill+lora", 2, ["a student trains whole"], {}),
    ("ddp+distill:teacher=none.safetensors", 2, ["no file none.safetensors", "run.sh train"], {}),
    ("single+distill", 1, ["--model and --weights"], SAMPLE),
    ("ddp+distill:width=256,feature=1.0", 2, ["128 wide", "leave feature out"], {}),
    ("ddp+distill", 2, ["no depth and width"], WORDS),
    ("single+cross_entropy:kind=cut", 1, ["kind=fused, which runs on a CPU"], WORDS),
    ("single+cross_entropy", 1, ["DiT-T/8 has no layer over a vocabulary"], {}),
    # What has no effect in a workload.
    ("single+sgd", 1, ["sgd", "no optimizer", "leave it out"], SAMPLE),
    ("zero1", 1, ["zero1", "no optimizer state", "take single"], SAMPLE),
    ("single+fp16", 1, ["fp16", "no loss to scale", "fp16_pure"], SAMPLE),
    ("single+lora", 1, ["lora", "merge lora", "--weights"], SAMPLE),
    ("single+sp", 1, ["sp: samples are drawn by one process", "leave it out"], SAMPLE),
    ("ddp", 1, ["ddp: samples are drawn by one process", "take single"], SAMPLE),
    ("single+int8", 1, ["int8", "no gradient", "qlora"], {}),
    # Engines.
    ("single", 2, ["one process, not 2"], {}),
    ("fsdp2", 1, ["one process cannot shard; use single"], {}),
    ("hsdp", 2, ["2 processes are not 2 groups of two or more; use --processes 4"], {}),
    ("fsdp2+adam8bit", 2, ["take no DTensor; use adam8bit:lib=torchao, zero2 or ddp"], {}),
    ("hsdp+optimizer_in_backward", 4, ["averaged over the groups until backward has ended"], {}),
    ("fsdp2+compress", 2, ["this engine reduces by itself; use ddp"], {}),
    ("zero3+checkpoint+compile", 2, ["would recompute uncompiled; take fsdp2"], {}),
    # Ranks that share samples or weights.
    ("ddp+sp", 3, ["3 processes are not groups of 2", "--processes 2"], {}),
    ("ddp+sp:ranks=3", 3, ["4 rows", "ranks of 2 or 4"], {}),
    ("ddp+sp:ranks=4", 4, ["6 heads", "ranks of 2"], SIX_HEADS),
    ("ddp+sp+controlnet", 2, ["whole samples", "leave sp out"], {}),
    ("single+tp", 1, ["single does not shard", "take fsdp2"], {}),
    ("fsdp2_offload+tp", 4, ["host memory", "take fsdp2"], {}),
    ("fsdp2+tp", 3, ["3 processes are not groups of 2", "--processes 2"], {}),
    ("fsdp2+tp", 2, ["shards it with nobody", "--processes 4"], {}),
    ("fsdp2+tp:ranks=4", 8, ["6 heads", "ranks of 2 or 3 or 6"], SIX_HEADS),
    ("fsdp2+tp+compile", 4, ["leave compile out"], {}),
    ("fsdp2+tp+checkpoint:keep=products", 4, ["before ranks have summed it"], {}),
    ("fsdp2+tp+sp:ranks=4", 16, ["2 heads on each rank of tp:ranks=2"], {}),
    # Pipelines.
    ("pp", 3, ["3 processes are not 2 stages", "--processes 2, or stages=3"], {}),
    ("pp:stages=5,micro=6", 5, ["4 blocks are fewer than 5 stages have", "4 or fewer"], {}),
    ("pp:micro=3,stages=4", 4, ["1f1b fills 4 stages", "micro=4"], {}),
    ("pp:schedule=interleaved,stages=5,micro=16", 5, ["3 equal rounds", "micro=15 or 20"], {}),
    ("pp+sp", 2, ["not shown beside", "take ddp"], {}),
    ("pp+lora", 2, ["take no gradient", "take ddp"], {}),
]
"""Recipe, processes, words of the refusal, further fields of the spec."""
EXACT_LOSSES = [
    "single+block_swap:blocks=3+checkpoint:every=2",
    "single+checkpoint:keep=nothing",
    "single+checkpoint:keep=products",
    "single+offload_activations",
    "single+checkpoint+offload_activations:what=checkpoints",
    "single+attend",
    "single+attend:kernel=math",
    f"single+{AOT}+checkpoint",
]


@pytest.mark.parametrize("text", launchable(HERE, HERE[:3]))
def test_it_trains_here_with_the_evidence_of_every_part(text, train_here):
    spec = showing(text)
    run = train_here(spec, 2)
    _, checks = collect_evidence(run)
    checks += audit(run, run.all_losses())
    assert [(c.name, c.asked, c.found) for c in checks if not c.ok] == []
    assert run.all_norms()[0] > 0


@pytest.mark.parametrize(("text", "processes", "wanted", "more"), REFUSED)
def test_it_is_refused_with_the_way_out(text, processes, wanted, more):
    spec = dataclasses.replace(TINY, recipe=text, processes=processes, global_batch=240, **more)
    reason = str(resolve(spec).refusal or "not refused")
    assert [w for w in wanted if w not in reason] == [], reason


# -- the same computation ---------------------------------------------------------------------


def curves(text, train_here, **changes):
    run = train_here(dataclasses.replace(TINY, recipe=text, **changes), 4)
    return run, run.all_losses(), run.all_norms()


def test_a_step_within_backward_is_the_same_step(train_here):
    changes = {"learning_rate": 1e-3, "weight_decay": 0.01, "model": FLAT}
    _, losses, norms = curves("single", train_here, **changes)
    text = "single+optimizer_in_backward"
    _, early, early_norms = curves(text, train_here, **changes)
    assert early == pytest.approx(losses, rel=1e-6)
    assert early_norms == pytest.approx(norms, rel=1e-5)
    assert losses[0] - losses[-1] > 1e-3, "something is learned"


STREAMED = [
    "block_swap:blocks=3+adamw",
    "block_swap:blocks=4+lora+adafactor",
    "bf16_pure+block_swap:blocks=3+checkpoint+adafactor:write=stochastic",
]


@pytest.mark.parametrize("text", STREAMED)
def test_streamed_weights_step_within_backward_as_those_that_stay(text, train_here):
    found = []
    for recipe in (re.sub(r"block_swap:blocks=.\+", "", text), text):
        spec = dataclasses.replace(TINY, recipe=f"single+{recipe}+optimizer_in_backward")
        spec = dataclasses.replace(spec, learning_rate=1e-3, weight_decay=0.01)
        run = train_here(spec, 3)
        observe_here(run, spec.recipe)
        found.append((run.all_losses(), run.all_norms(), weights_digest(run.module)))
        facts, checks = collect_evidence(run)
        assert [(c.name, c.asked, c.found) for c in checks if not c.ok] == []
    assert found[0] == found[1]
    freed = facts["optimizer_in_backward"]
    assert freed["most_gradient_bytes"] < freed["all_gradient_bytes"] / 3


@pytest.mark.parametrize("text", BESIDE)
def test_what_is_added_changes_nothing_at_first(text, train_here):
    _, reference, _ = curves("single", train_here)
    _, losses, _ = curves(text, train_here, learning_rate=1e-2)
    assert losses[0] == pytest.approx(reference[0], rel=1e-6)
    assert losses[1] != pytest.approx(reference[0], rel=1e-4)


def test_what_must_not_change_the_computation_does_not(train_here):
    usual = train_here(TINY, 3)
    wanted = [float(loss) for loss in usual.log.losses]
    for text in EXACT_LOSSES:
        assert parse(text).parity == "exact"
        other = train_here(dataclasses.replace(TINY, recipe=text), 3)
        assert [float(x) for x in other.log.losses] == pytest.approx(wanted, rel=1e-5), text


def test_norms_are_logged_without_the_loss_scale(train_here):
    run = train_here(TINY, 1)
    gradients = [p for p in run.module.parameters() if p.requires_grad]
    run.accelerator.unscale_gradients = lambda: [p.grad.div_(1024) for p in gradients]
    optimizer_step(run, 0)
    assert float(run.log.norms[1]) == pytest.approx(float(run.log.norms[0]) / 1024, rel=0.1)


# -- bytes ------------------------------------------------------------------------------------


def test_optimizer_state_is_counted_by_its_true_bytes(train_here):
    held = {}
    for text in (
        "adamw", "adam8bit", "adam8bit:lib=torchao", "adam4bit", "adam16bit", "adafactor", "sgd",
    ):  # fmt: skip
        run = train_here(dataclasses.replace(TINY, recipe=f"single+{text}"), 1)
        weights = sum(p.numel() for p in run.module.parameters() if p.requires_grad)
        held[text] = bytes_of(run.engine.held(run).tensors["optimizer_state"]) / weights
    assert held["adamw"] == pytest.approx(8, abs=0.01) and held["sgd"] == 4
    assert held["adam16bit"] == pytest.approx(4, abs=0.01)
    assert 2 < held["adam8bit"] < 2.2 and 2 < held["adam8bit:lib=torchao"] < 2.2
    assert 1 < held["adam4bit"] < 1.2 and held["adafactor"] < 0.2


# -- what was trained, by itself --------------------------------------------------------------


@pytest.mark.parametrize("text", ["single+qlora", "single+dora", "single+controlnet"])
def test_what_was_trained_is_saved_by_itself(text, train_here, tmp_path):
    spec = dataclasses.replace(TINY, recipe=text, learning_rate=1e-2)
    run = train_here(spec, 2)
    file, resolved = tmp_path / "adapters.safetensors", resolve(spec)
    fit = Training(trained=file)
    fit.finish(run)
    trainable = sum(p.numel() for p in run.module.parameters() if p.requires_grad)
    assert file.stat().st_size < 4 * trainable + 20_000, "the frozen model is not in the file"
    again = initial.build(resolved.subject, spec.seed, spec.init)
    resolved.recipe.in_slot(Slot.ADAPT).edit_model(again, resolved.subject)
    saved, free = load_file(file), dict(again.named_parameters())
    assert saved.keys() == {name for name, p in free.items() if p.requires_grad}
    again.load_state_dict(dict(saved), strict=False)
    mine = run.module.state_dict()
    assert all(torch.equal(mine[k], v) for k, v in again.state_dict().items() if torch.is_tensor(v))


# -- resumed ------------------------------------------------------------------------------------

RESUMED = [
    "single+adam8bit+lora",
    "single+adam4bit",
    "single+muon+optimizer_in_backward",
    "single+prune+ema",
    "single+qlora",
    "single+bf16_pure+adamw_bf16:write=kahan",
    "single+bf16_pure+block_swap+checkpoint+adafactor:write=stochastic+optimizer_in_backward",
]


@pytest.mark.parametrize("text", RESUMED)
def test_a_training_goes_on_as_if_never_interrupted(text, train_here, tmp_path):
    model = TINY.model if "block_swap" in text else FLAT
    spec = dataclasses.replace(TINY, recipe=text, model=model, learning_rate=1e-3)
    run = train_here(spec, 2)
    folder = training.save(run, tmp_path, {})
    optimizer_step(run, 2)
    again = train_here(spec, 0)
    training.restore(again, folder, {})
    optimizer_step(again, 2)
    assert again.all_losses() == pytest.approx(run.all_losses()[2:], rel=1e-6)
    for mine, wanted in zip(again.module.parameters(), run.module.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    for part in parse(text).strategies:
        assert part.evidence(again)
