"""Runs an exported train.py as it stands, and says what is in force: ``exported.py TRAIN FOLDER``.

Started by the command that the export printed, in the place of train.py, so that the launch file
and what it names are the exported ones. What it says is read from the objects that train.py left:
one line of JSON a rank.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from harness.system.process import die_with_parent


def facts(trained: dict[str, Any]) -> dict[str, Any]:
    """What any engine's objects say."""
    accelerator, model = trained["accelerator"], trained["model"]
    bare, inner = accelerator.unwrap_model(model), trained["optimizer"]
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    group = inner.param_groups[0]
    return {
        "type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "accumulation": accelerator.gradient_accumulation_steps,
        "model": type(model).__name__,
        "weights": sorted({str(p.dtype) for p in bare.parameters()}),
        "blocks": [type(block).__name__ for block in bare.blocks],
        "optimizer": type(inner).__name__,
        "settings": [group[key] for key in ("lr", "betas", "eps", "weight_decay")],
        "average": sum(a.numel() for a in trained.get("average", ())),
        "moved": any(not a.equal(w.float()) for a, w in pairs(trained)),
        "sum": float(sum(p.detach().double().sum() for p in bare.parameters())),
        **of_zero(model),
        **of_replicas(model),
    }


def pairs(trained: dict[str, Any]) -> Any:
    """Averages beside what they follow."""
    return zip(trained.get("average", ()), trained.get("weights", ()), strict=True)


def of_zero(model: Any) -> dict[str, Any]:
    """DeepSpeed's own words."""
    if not hasattr(model, "zero_optimization_stage"):
        return {}
    buckets = (model.zero_reduce_bucket_size(), model.zero_allgather_bucket_size())
    return {
        "stage": model.zero_optimization_stage(),
        "micro_batch": model.train_micro_batch_size_per_gpu(),
        "batch": model.train_batch_size(),
        "steps_accumulated": model.gradient_accumulation_steps(),
        "clip": model.gradient_clipping(),
        "buckets": buckets,
        "taken": model.global_steps,
    }


def of_replicas(model: Any) -> dict[str, Any]:
    """DDP's communication hooks, by name."""
    hooks = getattr(model, "_comm_hooks", [])
    return {"hooks": [hook.__qualname__ for hook, _ in hooks]}


die_with_parent()
script, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(script.parent))
trained = runpy.run_path(str(script), run_name="__main__")["trained"]
path = folder / f"rank{trained['accelerator'].process_index}.json"
path.write_text(json.dumps(facts(trained)))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
