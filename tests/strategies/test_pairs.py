"""Strategies that people combine.

Each of HERE trains in this process and shows the evidence of all its parts; each of REFUSED says
why not and what to do. ``test_launched`` has those on two processes.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from conftest import FLAT, SUBJECT, TINY, launchable, observe_here, showing, weights_digest

from harness.memory.traced_step import trace_step
from harness.resolve import resolve
from harness.worker import setup, training
from harness.worker.audit import audit, collect_evidence
from harness.worker.loop import optimizer_step
from harness.worker.training import Training
from strategies import parse
from strategies.base import Parity, Slot
from strategies.evidence.readings import bytes_of

AOT = "compile:backend=aot_eager"
HERE = [
    "single+checkpoint:every=2,share=0.75+bf16",
    "single+bf16+checkpoint:keep=nothing+ema:place=cpu",
    "single+bf16_pure+checkpoint+adamw_bf16",
    "single+bf16_pure+adamw_bf16:write=kahan+accumulate",
    "single+bf16_pure+attend:kernel=math",
    "single+bf16+offload_activations+accumulate",
    "single+checkpoint:keep=nothing+offload_activations:what=checkpoints+bf16_pure",
    "single+offload_activations+optimizer_in_backward+adam8bit",
    f"single+{AOT}+checkpoint:every=2+accumulate",
    f"single+{AOT}+checkpoint:share=0.5",
    f"single+{AOT}+checkpoint+offload_activations:what=checkpoints",
    f"single+{AOT}+bf16_pure+adamw_bf16",
    "single+compile:backend=aot_eager,budget=0.3+accumulate",
    "single+compile:backend=aot_eager,scope=model+bf16+attend:kernel=flash",
    "single+fp8:emulate=on+attend:kernel=flash+adam8bit",
    "single+qlora+offload_activations",
    "single+bf16_pure+block_swap+lora+offload_activations",
    "single+bf16+block_swap:blocks=3+checkpoint:every=2+accumulate",
    "single+block_swap+head",
    "single+block_swap:blocks=3+cast:to=fp8+lora",
    "single+bf16+cast+lora+checkpoint+offload_activations:what=checkpoints",
    "single+bf16_pure:autocast=on+cast:to=fp8+lora:targets=attention,dtype=fp32",
    "single+cast+difffit",
    f"single+{AOT}+cast+lora",
    f"single+{AOT}+cast:dynamic=on+lora",
    "single+bf16_pure+cast:dynamic=on+lora:dtype=fp32+checkpoint",
    "single+lora+adam8bit+checkpoint",
    "single+lora+bf16+checkpoint:every=sqrt+ema:place=cpu",
    "single+lora+optimizer_in_backward+bf16",
    "single+lora+muon",
    "single+lora:targets=fc1/attn.proj,blocks=2+checkpoint:every=2+bf16",
    "single+qlora:blocks=last2+offload_activations+attend:kernel=naive",
    "single+bf16_pure+block_swap:blocks=3+cast+lokr+checkpoint",
    "single+cast+oft:blocks=first2+adam8bit",
    "single+block_swap:blocks=3+lora:blocks=last2",
    "single+bf16_pure:autocast=on+loha:dtype=fp32+checkpoint",
    f"single+{AOT}+oft",
    "single+dora+adafactor",
    "single+bf16_pure:autocast=on+dora:dtype=fp32+adam8bit",
    "single+qlora+checkpoint+bf16",
    "single+head+adam4bit+bf16",
    "single+difffit+checkpoint+ema",
    "single+difffit+adamw:impl=foreach+accumulate",
    "single+controlnet+checkpoint+adam8bit",
    "single+controlnet+attend:kernel=naive+checkpoint+offload_activations:what=checkpoints",
    "single+optimizer_in_backward+adam4bit+checkpoint+bf16",
    "single+optimizer_in_backward+adafactor",
    "single+adam8bit+ema:place=cpu+accumulate:steps=4",
    "single+sgd+accumulate+bf16",
    "single+bf16_pure+qlora+adam8bit",
    "single+bf16_pure+controlnet+optimizer_in_backward",
    "single+bf16_pure+muon+checkpoint",
    "single+lora+offload_activations+attend:kernel=naive",
    "single+fp8:emulate=on+lora",
    "single+prune+muon+accumulate",
    "single+prune+adam8bit+checkpoint",
    "single+prune+optimizer_in_backward",
    "single+prune_structured+bf16+checkpoint",
    "single+prune_structured+adam8bit+optimizer_in_backward",
    "single+sparse_embedding+sgd:momentum=0.0+accumulate",
]

BESIDE = ["single+lora", "single+dora", "single+controlnet", "single+difffit"]
"""What is trained stands beside the frozen model, and begins without effect."""

REFUSED = {
    "ddp+bf16_master+checkpoint": ["only DeepSpeed", "use zero1"],
    "zero3_offload+bf16_pure+checkpoint": ["CPU Adam", "bf16_master"],
    "ddp+bf16+adamw_bf16": ["no master", "add bf16_pure"],
    "ddp+checkpoint+offload_activations": ["take what=checkpoints"],
    "ddp+offload_activations:what=checkpoints": ["no checkpoints", "what=all"],
    "ddp+checkpoint+compile:scope=model": ["leave scope=model out"],
    "ddp+checkpoint:part=ffn+compile": ["as a whole", "leave part=ffn out"],
    "zero2_offload+adamw:impl=plain": ["CPU Adam", "leave impl=plain out"],
    "ddp+checkpoint:share=0.5+offload_activations:what=checkpoints": ["share=0.5", "leave it out"],
    "zero3+bf16+checkpoint:keep=products": ["in another order", "leave keep=products out"],
    "zero2+compile+checkpoint:keep=nothing": ["keep=nothing", "budget=0.5"],
    "zero2+compile:budget=0.5+checkpoint": ["leave budget=0.5"],
    "ddp+fp8:emulate=on+prune_structured": ["replaces the layers", "use bf16"],
    "ddp+fp8:emulate=on+sparse24": ["replaces the layers", "use bf16"],
    "ddp+fp8:emulate=on+qlora": ["replaces the layers", "use bf16"],
    "ddp+fp8:emulate=on,gather=fp8": ["only FSDP2", "take fsdp2"],
    "ddp+head+checkpoint": ["ends before the blocks", "leave"],
    "ddp+head+offload_activations": ["ends before the blocks", "leave"],
    "zero2+block_swap": ["holds shards", "zero3_offload"],
    "fsdp2+block_swap": ["holds shards", "fsdp2_offload"],
    "ddp+block_swap:blocks=5": ["4 blocks", "at most 4"],
    "ddp+block_swap+compile": ["compiled graph", "leave it out"],
    "ddp+block_swap+qlora": ["packed", "take lora"],
    "ddp+block_swap+bf16": ["16-bit copies", "add checkpoint"],
    "ddp+cast": ["lose their updates", "add lora"],
    "ddp+cast+qlora": ["4 bits", "take lora"],
    "ddp+cast+dora": ["weights themselves", "take lora"],
    "ddp+cast+controlnet": ["copies of these layers", "take lora"],
    "zero2+cast+lora": ["shard codes", "ddp or fsdp2"],
    "ddp+fp8:emulate=on+cast+lora": ["replaces the layers", "use bf16"],
    "ddp+block_swap+muon": ["steps the model's weights", "take adamw"],
    "ddp+block_swap+topk": ["changes gradients", "take adamw"],
    "single+block_swap+adafactor": ["host memory", "add optimizer_in_backward"],
    "single+block_swap+muon+optimizer_in_backward": ["two optimizers", "take adafactor"],
    "ddp+block_swap+optimizer_in_backward": ["buckets", "use single"],
    "single+adafactor:write=stochastic": ["lose no update", "add bf16_pure"],
    "ddp+compile:scope=model+offload_activations": ["leave compile out"],
    "ddp+optimizer_in_backward": ["buckets", "zero2"],
    "zero3+optimizer_in_backward": ["after backward", "single"],
    "single+optimizer_in_backward+accumulate": ["leave accumulation out"],
    "single+optimizer_in_backward+offload_adamw": ["by itself", "adamw"],
    "single+optimizer_in_backward+sgd:momentum=0.0+sparse_embedding": ["leave one"],
    "zero2+adafactor": ["flat shards", "ddp"],
    "zero2+came": ["flat shards", "ddp"],
    "zero2+prodigy": ["one rank's part", "ddp"],
    "single+bf16_pure+came": ["torch loads it as bfloat16", "adafactor"],
    "zero3+muon": ["orthogonalized the gradients", "fsdp2"],
    "zero2_offload+adam8bit": ["host memory", "without offload"],
    "zero3_offload+sgd": ["CPU Adam", "without"],
    "zero3+qlora": ["share a byte", "zero2"],
    "zero2+bf16+lora:dtype=fp32": ["casts adapters", "bf16_pure"],
    "zero3+lokr": ["has released", "zero2"],
    "single+lora:blocks=2-4": ["4 blocks", "from 0 to 3"],
    "single+dora:targets=to_q": ["ends in to_q", "fc1, fc2, proj, qkv"],
    "single+lora:blocks=3+checkpoint:keep=nothing": [
        "ends within the blocks",
        "leave keep=nothing",
    ],
    "single+lora:blocks=3+compile:budget=0.5": ["different shares", "leave budget=0.5"],
    "zero3+fp16+lora:dtype=fp32": ["casts adapters", "leave dtype out"],
    "fsdp2+bf16_pure:autocast=on+lora": ["in float32", "dtype=fp32"],
    "single+bf16_pure+lora:dtype=fp32+adamw_bf16": ["is float32", "use adamw"],
    "single+head+checkpoint": ["ends before the blocks", "leave"],
    "single+bf16_pure+difffit": ["cannot hold", "bf16"],
    "single+fp16+optimizer_in_backward": ["loss scale", "bf16"],
    "single+fp16+offload_adamw": ["loss scale", "bf16"],
    "ddp+fp16+topk": ["loss scale", "bf16"],
    "ddp+fp16+compress:kind=powersgd": ["loss scale", "bf16"],
    "single+head+muon": ["no matrix", "leave muon out"],
    "single+lora+prune": ["frozen", "leave prune out"],
    "single+lora+prune_structured": ["leave one"],
    "zero3+prune+adam8bit": ["master", "adamw"],
    "single+sparse24": ["16-bit", "bf16"],
    "single+compress": ["one process", "ddp"],
    "zero2+topk": ["engine reduces by itself", "ddp"],
    "ddp+sparse_embedding": ["Adam", "sgd:momentum=0.0"],
    "zero1+sparse_embedding+sgd:momentum=0.0": ["dense", "ddp"],
    "ddp+offload_adamw": ["averages", "single"],
    "zero2+offload_adamw": ["zero2_offload"],
}

ON_GPUS = {
    "ddp+attend:kernel=flash": ["16 bits", "add bf16"],
    "ddp+bf16+attend:kernel=flex+checkpoint": ["uncompiled", "kernel=flash"],
    "zero3+attend:kernel=cudnn": ["16 bits", "add bf16"],
}
EXACT_LOSSES = [
    "single+block_swap",
    "single+block_swap:blocks=3+checkpoint:every=2",
    "single+checkpoint:keep=nothing",
    "single+checkpoint:keep=products",
    "single+offload_activations",
    "single+checkpoint+offload_activations:what=checkpoints",
    "single+attend",
    "single+attend:kernel=math",
    f"single+{AOT}",
    f"single+{AOT}+checkpoint",
    "single+compile:backend=aot_eager,budget=0.2",
]


@pytest.mark.parametrize("text", launchable(HERE, HERE[::4]))
def test_it_trains_here_with_the_evidence_of_every_part(text, train_here):
    spec = showing(text)
    run, log = train_here(spec, 2)
    trained, resolved = run.trained, resolve(spec)
    _, checks = collect_evidence(resolved, trained)
    checks += audit(resolved, trained, log, log.all_losses(run), run.digest)
    assert [(c.name, c.asked, c.found) for c in checks if not c.ok] == []
    assert log.all_norms()[0] > 0


@pytest.mark.parametrize("text", [*REFUSED, *ON_GPUS])
def test_it_is_refused_with_the_way_out(text):
    device, wanted = ("cpu", REFUSED[text]) if text in REFUSED else ("cuda", ON_GPUS[text])
    recipe = parse(text)
    processes = 1 if text.startswith("single") else 2
    reason = str(recipe.refusal(recipe.launch(device, processes, SUBJECT)) or "not refused")
    assert [w for w in wanted if w not in reason] == []


@pytest.mark.parametrize(
    "text", ["single+optimizer_in_backward", "single+offload_adamw", "single+sparse_embedding"]
)
def test_clipping_is_refused_where_it_would_come_too_late(text):
    recipe = parse(text + ("+sgd:momentum=0.0" if "sparse" in text else ""))
    assert "--grad-clip 0" in str(recipe.refusal(recipe.launch("cpu", 1, SUBJECT, clips=True)))


# -- the same computation ---------------------------------------------------------------------


def curves(text, train_here, **changes):
    run, log = train_here(dataclasses.replace(TINY, recipe=text, **changes), 4)
    return run, log.all_losses(run), log.all_norms()


@pytest.mark.parametrize("optimizer", ["adamw", "adam8bit"])
def test_a_step_within_backward_is_the_same_step(optimizer, train_here):
    changes = {"learning_rate": 1e-3, "weight_decay": 0.01, "model": FLAT}
    _, losses, norms = curves(f"single+{optimizer}", train_here, **changes)
    text = f"single+{optimizer}+optimizer_in_backward"
    _, early, early_norms = curves(text, train_here, **changes)
    assert early == pytest.approx(losses, rel=1e-6)
    assert early_norms == pytest.approx(norms, rel=1e-5)
    assert losses[0] - losses[-1] > 1e-3, "something is learned"


STREAMED = [
    "block_swap:blocks=3+adamw", "block_swap:blocks=4+lora+adafactor",
    "bf16+block_swap:blocks=3+checkpoint+came+ema:place=cpu",
    "bf16_pure+block_swap:blocks=3+checkpoint+adafactor:write=stochastic",
    "bf16_pure+block_swap:blocks=4+checkpoint+adam8bit:write=kahan",
    "bf16_pure+block_swap:blocks=4+checkpoint:every=2+offload_activations:what=checkpoints+sgd",
]  # fmt: skip


@pytest.mark.parametrize("text", STREAMED)
def test_streamed_weights_step_within_backward_as_those_that_stay(text, train_here):
    found = []
    for recipe in (re.sub(r"block_swap:blocks=.\+", "", text), text):
        spec = dataclasses.replace(TINY, recipe=f"single+{recipe}+optimizer_in_backward")
        spec = dataclasses.replace(spec, learning_rate=1e-3, weight_decay=0.01)
        run, log = train_here(spec, 3)
        observe_here(run, log, spec.recipe)
        found.append((log.all_losses(run), log.all_norms(), weights_digest(run.trained.module)))
        facts, checks = collect_evidence(resolve(spec), run.trained)
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


def test_sparse_gradients_change_nothing(train_here):
    _, dense, dense_norms = curves("single+sgd:momentum=0.0", train_here, learning_rate=0.1)
    text = "single+sgd:momentum=0.0+sparse_embedding"
    _, sparse, sparse_norms = curves(text, train_here, learning_rate=0.1)
    assert sparse == pytest.approx(dense, rel=1e-6)
    assert sparse_norms == pytest.approx(dense_norms, rel=1e-5)


def test_what_must_not_change_the_computation_does_not(train_here):
    _, usual = train_here(TINY, 3)
    wanted = [float(loss) for loss in usual.losses]
    for text in EXACT_LOSSES:
        assert parse(text).parity is Parity.EXACT
        _, other = train_here(dataclasses.replace(TINY, recipe=text), 3)
        assert [float(x) for x in other.losses] == pytest.approx(wanted, rel=1e-5), text


def test_norms_are_logged_without_the_loss_scale(train_here):
    run, log = train_here(TINY, 1)
    usual, accelerator = float(log.norms[0]), run.trained.accelerator

    def unscale() -> None:
        for p in run.trained.module.parameters():
            if p.grad is not None:
                p.grad.div_(1024)

    accelerator.unscale_gradients = unscale
    optimizer_step(run, 0, log)
    assert float(log.norms[1]) == pytest.approx(usual / 1024, rel=0.1)


# -- bytes ------------------------------------------------------------------------------------


def test_optimizer_state_is_counted_by_its_true_bytes(train_here):
    held = {}
    for text in (
        "adamw", "adam8bit", "adam8bit:lib=torchao", "adam4bit", "adam16bit", "adafactor", "sgd",
    ):  # fmt: skip
        run, _ = train_here(dataclasses.replace(TINY, recipe=f"single+{text}"), 1)
        weights = sum(p.numel() for p in run.trained.module.parameters() if p.requires_grad)
        held[text] = (
            bytes_of(run.trained.engine.held(run.trained).tensors["optimizer_state"]) / weights
        )
    assert held["adamw"] == pytest.approx(8, abs=0.01) and held["sgd"] == 4
    assert held["adam16bit"] == pytest.approx(4, abs=0.01)
    assert 2 < held["adam8bit"] < 2.2 and 2 < held["adam8bit:lib=torchao"] < 2.2
    assert 1 < held["adam4bit"] < 1.2 and held["adafactor"] < 0.2


def test_freed_gradients_are_not_at_the_peak(train_here):
    found = {}
    for text in ("single+sgd:momentum=0.0", "single+sgd:momentum=0.0+optimizer_in_backward"):
        run, log = train_here(dataclasses.replace(TINY, recipe=text, global_batch=1), 1)
        found[text] = trace_step(run.trained, "cpu", lambda r=run, g=log: optimizer_step(r, 1, g))
    kept, freed = found.values()
    assert kept.gradients > 5e6 and freed.gradients < 1e6


# -- what was trained, by itself --------------------------------------------------------------


@pytest.mark.parametrize("text", ["single+qlora", *BESIDE])
def test_what_was_trained_is_saved_by_itself(text, train_here, tmp_path):
    spec = dataclasses.replace(TINY, recipe=text, learning_rate=1e-2)
    run, _ = train_here(spec, 2)
    file, resolved = tmp_path / "adapters.safetensors", resolve(spec)
    fit = Training(folder=None, trained=file)
    fit.finish(run, resolved)
    trainable = sum(p.numel() for p in run.trained.module.parameters() if p.requires_grad)
    assert file.stat().st_size < 4 * trainable + 20_000, "the frozen model is not in the file"
    again = setup.build_model(resolved)
    resolved.recipe.in_slot(Slot.ADAPT).edit_model(again, resolved.subject)
    saved, free = resolved.subject.load(file), dict(again.named_parameters())
    assert saved.keys() == {name for name, p in free.items() if p.requires_grad}
    again.load_state_dict(dict(saved), strict=False)
    mine = run.trained.module.state_dict()
    assert all(torch.equal(mine[k], v) for k, v in again.state_dict().items() if torch.is_tensor(v))


@pytest.mark.parametrize("text", ["single+lora+ema", "single+prune_structured"])
def test_samples_are_drawn_from_an_edited_model(text, train_here, tmp_path):
    spec = dataclasses.replace(TINY, recipe=text)
    run, _ = train_here(spec, 1)
    Training(folder=None, samples=tmp_path / "grid.png", sample_steps=2).finish(run, resolve(spec))
    assert (tmp_path / "grid.png").stat().st_size > 1000


# -- resumed ------------------------------------------------------------------------------------

RESUMED = [
    "single+adam8bit+lora", "single+adam8bit:lib=torchao", "single+adam4bit", "single+adafactor",
    "single+adam16bit", "single+came", "single+prodigy",
    "single+muon+optimizer_in_backward", "single+sgd", "single+prune+ema", "single+qlora",
    "single+bf16_pure+adamw_bf16", "single+bf16_pure+adamw_bf16:write=kahan",
    "single+bf16_pure+block_swap+checkpoint+adafactor:write=stochastic+optimizer_in_backward",
    "single+bf16_pure+adam8bit:write=kahan",
]  # fmt: skip


@pytest.mark.parametrize("text", RESUMED)
def test_a_training_goes_on_as_if_never_interrupted(text, train_here, tmp_path):
    model = TINY.model if "block_swap" in text else FLAT
    spec = dataclasses.replace(TINY, recipe=text, model=model, learning_rate=1e-3)
    run, log = train_here(spec, 2)
    folder = training.save(run.trained, tmp_path, {})
    optimizer_step(run, 2, log)
    again, later = train_here(spec, 0)
    training.restore(again.trained, folder, {})
    optimizer_step(again, 2, later)
    assert later.all_losses(again) == pytest.approx(log.all_losses(run)[2:], rel=1e-6)
    for mine, wanted in zip(
        again.trained.module.parameters(), run.trained.module.parameters(), strict=True
    ):
        assert torch.equal(mine, wanted)
    for part in parse(text).strategies:
        assert part.evidence(again.trained)
