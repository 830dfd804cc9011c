"""Parameters of all stages: gradient sums, whole parameters and checkpoints.

A checkpoint's weights are those of a plain model in several safetensors files with an index, as
Hugging Face's libraries write them: each stage writes one. The optimizer's state lies beside it by
parameter name, so a pipeline of any number of stages can read it.

All stages have the weights in front of the blocks of a model without the part "ends". Each stage's
gradients of them cover its own blocks; their sum is the whole model's, and stages step alike.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from strategies.engines.fsdp import engine

if TYPE_CHECKING:
    from strategies.engine import TrainingRun


def sum_shared(trained: TrainingRun, over: int) -> None:
    """Sum the gradients of shared weights over all stages and divide them by ``over``, the number
    of micro-batches that this rank has summed."""
    model = trained.model
    common = model.cut.common(trained.module)
    for p in common:
        if p.grad is None:  # only other stages' blocks read its values
            p.grad = torch.zeros_like(p)
    parts = (trained.engine.part(p.grad).tensor for p in common)
    here = [part for part in parts if part.numel()]
    if here:
        model.ranks.add_up(here, over)


def own_norm(trained: TrainingRun) -> Any:
    """Return the norm of the gradients that this stage counts."""
    named = trained.module.named_parameters()
    own = [p.grad for n, p in named if p.grad is not None and trained.model.cut.tells(n)]
    return engine.whole(torch.nn.utils.get_total_norm(own))


def shared_bytes(trained: TrainingRun) -> int:
    """Return the bytes of shared gradients that this rank sums in a step."""
    return sum(
        trained.engine.part(p).tensor.nbytes for p in trained.model.cut.common(trained.module)
    )


INDEX = "model.safetensors.index.json"


def whole(trained: TrainingRun, parameters: Sequence[Any]) -> Iterator[Tensor]:
    """Yield each of ``parameters`` (values of ``Engine.global_parameters``, alike on all ranks)
    from its stage, on every rank; it is valid until the next one."""
    cut, device = trained.model.cut, trained.accelerator.device
    ranks = trained.model.ranks
    names = {id(p): name for name, p in trained.engine.global_parameters(trained).items()}
    for p in parameters:
        stage = cut.owners[names[id(p)]]
        mine = stage == cut.index
        empty = functools.partial(torch.empty, p.shape, dtype=p.dtype, device=device)
        found = engine.whole(p.detach()) if mine else empty()
        dist.broadcast(found, src=ranks.rank(stage), group=ranks.pipe)
        yield found


# ---- checkpoints ----


def _file(kind: str, stage: int, count: int, ending: str) -> str:
    return f"{kind}-{stage + 1:05d}-of-{count:05d}.{ending}"


def save(trained: TrainingRun, path: Path) -> None:
    """Write this stage's files; the first stage writes the index. Of equal replicas the first
    writes."""
    first, tells = trained.model.ranks.share == 0, trained.model.cut.tells
    named = dict(trained.module.named_parameters())
    # Gathering sharded tensors is a collective: all ranks of a stage go through all of them.
    weights = {name: p for name, p in _on_host(named.items()) if first and tells(name)}
    of_optimizer = trained.inner_optimizer.state
    kept = (
        (name, of_optimizer[p]) for name, p in named.items() if p in of_optimizer and tells(name)
    )
    state = {name: own for name, own in ((n, dict(_on_host(s.items()))) for n, s in kept) if first}
    if first:
        _write(trained, path, weights, state)
    dist.barrier()


def _on_host(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield whole tensors in host memory, one after the other; other values as they are."""
    for name, value in named:
        tensor = isinstance(value, Tensor)
        yield name, engine.whole(value.detach()).cpu().contiguous() if tensor else value


def _write(
    trained: TrainingRun, path: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    cut = trained.model.cut
    path.mkdir(parents=True, exist_ok=True)
    own = _file("model", cut.index, cut.count, "safetensors")
    save_file(dict(weights), str(path / own), metadata={"format": "pt"})
    optimizer = trained.inner_optimizer
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    kept = {"state": state, "groups": groups}
    torch.save(kept, path / _file("optimizer", cut.index, cut.count, "pt"))
    if cut.index == 0:
        files = {n: _file("model", s, cut.count, "safetensors") for n, s in cut.owners.items()}
        total = sum(
            p.dtype.itemsize * p.shape.numel()
            for p in trained.engine.global_parameters(trained).values()
        )
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def load(trained: TrainingRun, path: Path) -> None:
    """Read this stage's parameters and their optimizer state from the files of any number of
    stages."""
    named = dict(trained.module.named_parameters())
    files = json.loads((path / INDEX).read_text())["weight_map"]
    with torch.no_grad():
        for file in sorted({files[name] for name in named}):
            with safe_open(str(path / file), "pt") as stored:
                for name in (n for n in named if files[n] == file):
                    named[name].copy_(_alike(stored.get_tensor(name), named[name]))
    optimizer = trained.inner_optimizer
    for file in sorted(path.glob("optimizer-*-of-*.pt")):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        for name in saved["state"].keys() & named.keys():
            optimizer.state[named[name]] = _placed(saved["state"][name], named[name])
        for group, kept in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update(kept)
    dist.barrier()


def _placed(state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """Return state on the device of its parameter and sharded like it; step counts stay on the
    host, where Adam keeps them."""
    moved = {}
    for key, value in state.items():
        counts = key == "step" or not isinstance(value, Tensor)
        moved[key] = value if counts else _alike(value.to(like.device), like)
    return moved


def _alike(value: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor, which every rank has read, like its parameter."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    on = value.to(like.device)
    return distribute_tensor(on, like.device_mesh, like.placements, src_data_rank=None)
