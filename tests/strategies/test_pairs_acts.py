"""Strategies that people combine: precision, attention, recompute, offload and compile, with each
other and with the rest.

Each of HERE trains in this process and shows the evidence of all its parts; each of REFUSED says
why not and what to do. ``test_launched`` has those on two processes.
"""

from __future__ import annotations

import dataclasses

import pytest
from conftest import SUBJECT, TINY, showing

from harness.resolve import resolve
from harness.worker.loop import optimizer_step
from strategies import parse
from strategies.base import Parity

AOT = "compile:backend=aot_eager"
HERE = [
    "single+bf16+checkpoint",
    "single+bf16+checkpoint:keep=products",
    "single+checkpoint:share=0.5",
    "single+checkpoint:every=2,share=0.75+bf16",
    "single+bf16+checkpoint:keep=nested+ema:place=cpu",
    "single+bf16+checkpoint:every=2,reentrant=on+accumulate",
    "single+bf16_pure+checkpoint+adamw_bf16",
    "single+bf16_pure+adamw_bf16:write=kahan+accumulate",
    "single+bf16_pure+adam8bit",
    "single+bf16_pure+optimizer_in_backward",
    "single+bf16+attend:kernel=flash",
    "single+bf16+attend+checkpoint:every=2",
    "single+bf16_pure+attend:kernel=math",
    "single+attend:kernel=flash+offload_activations",
    "single+bf16+offload_activations+accumulate",
    "single+checkpoint:keep=nothing+offload_activations:what=checkpoints",
    "single+checkpoint:keep=nested+offload_activations:what=checkpoints+bf16_pure",
    "single+offload_activations+optimizer_in_backward+adam8bit",
    f"single+{AOT}+checkpoint+bf16",
    f"single+{AOT}+checkpoint:every=2+accumulate",
    f"single+{AOT}+checkpoint:share=0.5",
    f"single+{AOT}+attend:kernel=flash+bf16",
    f"single+{AOT}+attend",
    f"single+{AOT}+offload_activations+bf16",
    f"single+{AOT}+checkpoint+offload_activations:what=checkpoints",
    f"single+{AOT}+bf16_pure+adamw_bf16",
    f"single+{AOT}+lora+bf16",
    "single+compile:backend=aot_eager,budget=0.3+accumulate",
    "single+compile:backend=aot_eager,scope=model+bf16+attend:kernel=flash",
    "single+fp8:emulate=on+checkpoint",
    "single+fp8:emulate=on+attend:kernel=flash+adam8bit",
    "single+lora+checkpoint:keep=nested+bf16",
    "single+qlora+offload_activations",
    "single+prune+checkpoint:keep=products",
    "single+bf16_pure+block_swap+lora+offload_activations",
    "single+bf16+block_swap:blocks=3+checkpoint:every=2+accumulate",
    "single+block_swap+checkpoint:keep=nested",
    "single+block_swap+head",
    "single+block_swap:blocks=3+cast:to=fp8+lora",
    "single+bf16+cast+lora+checkpoint+offload_activations:what=checkpoints",
    "single+bf16_pure:autocast=on+cast:to=fp8+lora:targets=attention,dtype=fp32",
    "single+cast+difffit",
    f"single+{AOT}+cast+lora",
    "single+block_swap+difffit+attend:kernel=flash",
]
REFUSED = {
    "ddp+bf16_master+checkpoint": ["only DeepSpeed", "use zero1"],
    "zero3_offload+bf16_pure+checkpoint": ["CPU Adam", "bf16_master"],
    "ddp+bf16+adamw_bf16": ["no master", "add bf16_pure"],
    "ddp+checkpoint+offload_activations": ["what=checkpoints"],
    "ddp+checkpoint:share=0.5+offload_activations:what=checkpoints": ["share=0.5", "leave it out"],
    "zero2+compile+checkpoint:keep=nothing": ["keep=nothing", "budget=0.5"],
    "zero2+compile+checkpoint:reentrant=on": ["records a graph", "leave reentrant=on"],
    "ddp+checkpoint:reentrant=on+lora": ["needs a gradient", "leave reentrant=on"],
    "zero2+compile:budget=0.5+checkpoint": ["leave budget=0.5"],
    "ddp+fp8:emulate=on+prune_structured": ["replaces the layers", "use bf16"],
    "ddp+fp8:emulate=on+sparse24": ["replaces the layers", "use bf16"],
    "ddp+fp8:emulate=on+qlora": ["replaces the layers", "use bf16"],
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
    "ddp+block_swap+optimizer_in_backward": ["within backward", "take adamw"],
    "ddp+compile:scope=model+offload_activations": ["leave scope=model out"],
}
ON_GPUS = {
    "ddp+attend:kernel=flash": ["16 bits", "add bf16"],
    "ddp+bf16+attend:kernel=flex+checkpoint": ["uncompiled", "kernel=flash"],
    "zero3+attend:kernel=cudnn": ["16 bits", "add bf16"],
}
EXACT_LOSSES = [
    "single+block_swap",
    "single+block_swap:blocks=3+checkpoint:every=2",
    "single+checkpoint:keep=nested",
    "single+checkpoint:keep=nothing",
    "single+checkpoint:keep=products",
    "single+checkpoint:reentrant=on",
    "single+offload_activations",
    "single+checkpoint+offload_activations:what=checkpoints",
    "single+attend",
    "single+attend:kernel=math",
    f"single+{AOT}",
    f"single+{AOT}+checkpoint",
    "single+compile:backend=aot_eager,budget=0.2",
]


@pytest.mark.parametrize("text", HERE)
def test_they_train_together_with_evidence(text, train_here):
    spec = showing(text)
    assert resolve(spec).refusal is None
    run, log = train_here(spec, 2)
    assert len(log.losses) == 2 and all(loss.isfinite() for loss in log.losses)
    for part in parse(text).strategies:
        assert part.evidence(run.trained), f"{part} shows facts"


@pytest.mark.parametrize("text", [*REFUSED, *ON_GPUS])
def test_they_refuse_each_other_with_the_way_out(text):
    device, wanted = ("cpu", REFUSED[text]) if text in REFUSED else ("cuda", ON_GPUS[text])
    recipe = parse(text)
    reason = recipe.refusal(recipe.launch(device, 2, SUBJECT))
    assert reason and [w for w in wanted if w not in reason] == []


@pytest.mark.parametrize("text", EXACT_LOSSES)
def test_what_must_not_change_the_computation_does_not(text, train_here):
    assert parse(text).parity is Parity.EXACT
    _, usual = train_here(TINY, 3)
    _, other = train_here(dataclasses.replace(TINY, recipe=text), 3)
    for mine, theirs in zip(other.losses, usual.losses, strict=True):
        assert float(mine) == pytest.approx(float(theirs), rel=1e-5)


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
