"""Recipes that show each strategy: what several tests of strategies run."""

from __future__ import annotations

from strategies import CATALOG
from strategies.base import Slot
from strategies.workloads import SAMPLE, TRAIN

OTHERS: dict[str, list[str]] = {
    "tf32": ["ddp+tf32"],
    "block_swap": ["single+block_swap:blocks=3", "single+block_swap:blocks=3+lora"],
    "cast": [
        "single+cast+lora", "single+cast:to=fp8+lora", "single+cast:dynamic=on+lora",
        "single+cast:layers=all+lora",
    ],
    "qlora": ["single+qlora", "single+bf16_pure+qlora:layers=blocks,dtype=fp32"],
    "lora": [
        "single+lora", "single+lora:rank=4", "single+bf16_pure+lora:dtype=fp32",
        "single+lora:targets=ffn,blocks=1/last1",
    ],
    "lokr": ["single+lokr", "single+bf16_pure+lokr:rank=64,factor=4,dtype=fp32"],
    "oft": ["single+oft", "single+oft:size=48"],
    "controlnet": ["single+controlnet", "single+controlnet:share=1.0"],
    "prune": ["single+prune", "single+prune:fraction=0.9"],
    "prune_structured": ["single+prune_structured", "single+prune_structured:fraction=0.25"],
    "sparse24": ["ddp+bf16+sparse24"],
    "bf16_master": ["zero2+bf16_master"],
    "bf16_pure": ["single+bf16_pure", "zero2+bf16_pure"],
    "fp16": ["ddp+fp16", "zero2+fp16:scale=1024"],
    "fp8": [
        "ddp+fp8", "single+fp8:emulate=on", "single+fp8:emulate=on,scaling=rowwise",
    ],
    "checkpoint": [
        "single+checkpoint", "single+checkpoint:every=2", "single+checkpoint:every=sqrt",
        "single+checkpoint:keep=nothing",
        "single+checkpoint:every=2,keep=products",
        "single+checkpoint:part=ffn", "single+checkpoint:part=attention",
    ],
    "offload_activations": [
        "single+offload_activations",
        "single+checkpoint:every=2+offload_activations:what=checkpoints",
    ],
    "compile": [
        "single+compile", "single+compile:scope=model,backend=aot_eager",
        "single+compile:backend=aot_eager,budget=0.5", "ddp+compile:mode=reduce-overhead",
    ],
    "attend": [
        *(f"single+attend:kernel={kernel}" for kernel in ("naive", "math", "flash")),
        "single+attend:kernel=math+checkpoint:part=attention",
        *(f"ddp+attend:kernel={kernel}" for kernel in ("efficient", "cudnn", "flex")),
    ],
    "sp": ["ddp+sp"],
    "tp": ["fsdp2+tp"],
    "cross_entropy": [f"ddp+cross_entropy:kind={kind}" for kind in ("full", "fused", "cut")],
    "distill": [
        "single+distill", "single+distill:store=bf16,weight=0.7,feature=0.5",
        "single+distill:depth=3,feature=1.0", "single+distill:depth=3,width=64",
        "single+distill:weight=1.0",
    ],
    "adamw": ["single+adamw", "single+adamw:impl=foreach", "single+adamw:impl=plain"],
    "adam8bit": ["single+adam8bit", "single+adam8bit:lib=torchao"],
    "adam16bit": ["single+adam16bit", "single+bf16_pure+adam16bit"],
    "paged_adam8bit": ["ddp+paged_adam8bit"],
    "muon": ["single+muon", "single+muon:momentum=0.9"],
    "prodigy": ["single+prodigy", "single+prodigy:slice=11"],
    "sgd": ["single+sgd", "single+sgd:momentum=0.0"],
    "offload_adamw": ["ddp+offload_adamw"],
    "compress": ["ddp+compress", "ddp+compress:kind=powersgd,rank=2", "ddp+compress:kind=fp16"],
    "topk": ["ddp+topk", "ddp+topk:keep=0.1"],
    "sparse_embedding": ["single+sgd:momentum=0.0+sparse_embedding"],
    "backward": ["single+backward", "single+backward:call=autograd_grad"],
    "adamw_bf16": ["single+bf16_pure+adamw_bf16", "single+bf16_pure+adamw_bf16:write=kahan"],
    "accumulate": ["single+accumulate", "single+accumulate:steps=4"],
    "float8": ["single+float8", "single+float8:dynamic=on,emulate=on"],
    "palette": ["single+palette", "single+palette:bits=3,rows=16"],
    "ema": ["single+ema", "single+ema:place=cpu", "single+ema:place=none"],
}  # fmt: skip
"""Where ``single+NAME`` does not show a strategy, or not all of it."""

SETTINGS: dict[str, list[str]] = {
    name: OTHERS.get(name, [name if kind.slot is Slot.SHARD else f"single+{name}"])
    for name, kind in CATALOG.items()
}
"""Recipe texts for every strategy."""


def on_single(workload: str) -> list[str]:
    """Those on ``single`` of strategies that all have an effect in ``workload``."""
    kinds = {name for name, kind in CATALOG.items() if workload in kind.workloads} | {"single"}
    texts = [text for name in SETTINGS if name in kinds for text in SETTINGS[name]]
    inside = (text for text in texts if {p.partition(":")[0] for p in text.split("+")} <= kinds)
    return [text for text in inside if text.startswith("single")]


TRAINED_HERE = on_single(TRAIN)
"""test_catalog trains each in this process and asks all parts' evidence."""
ELSEWHERE = ("single+compile",)
DRAWN_HERE = [
    *(text for text in on_single(SAMPLE) if text not in ELSEWHERE and "budget" not in text),
    "single+bf16_pure+int8",
    "single+bf16+nf4",
]
"""test_drawn draws samples with each, and asks the same. Code that is generated for a graph takes
its time, and is the suite ``sampling``'s; what a CPU lacks is stood in for by ``test_drawn``."""
