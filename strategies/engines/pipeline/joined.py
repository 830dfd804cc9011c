"""What stages have apart, put together: whole parameters on every rank, and checkpoints.

A checkpoint's weights are those of a plain model in several files, as Hugging Face's libraries cut
them: each stage writes its own, and an index names the file of each parameter. The optimizer's
state lies beside it in as many files, by the names of the parameters too: a stage of any pipeline
finds its own.
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

from strategies.engines.fsdp import rows

if TYPE_CHECKING:
    from strategies.engine import Trained

__all__ = ["INDEX", "load", "save", "whole"]

INDEX = "model.safetensors.index.json"


def whole(trained: Trained, parameters: Sequence[Any]) -> Iterator[Tensor]:
    """Each of ``parameters`` (values of ``Engine.everywhere``, the same on all ranks) as its stage
    has it, on every rank until the next is asked for."""
    cut, device = trained.model.cut, trained.accelerator.device
    places = trained.model.places
    names = {id(p): name for name, p in trained.engine.everywhere(trained).items()}
    for p in parameters:
        stage = cut.owners[names[id(p)]]
        mine = stage == cut.index
        empty = functools.partial(torch.empty, p.shape, dtype=p.dtype, device=device)
        found = rows.whole(p.detach()) if mine else empty()
        dist.broadcast(found, src=places.rank(stage), group=places.pipe)
        yield found


# ---- checkpoints ----


def _file(kind: str, stage: int, count: int, ending: str) -> str:
    return f"{kind}-{stage + 1:05d}-of-{count:05d}.{ending}"


def save(trained: Trained, path: Path) -> None:
    """Write this stage's files; the first one's rank writes the index. Of replicas, whose weights
    and states are alike, the first writes."""
    first, tells = trained.model.places.share == 0, trained.model.cut.tells
    named = dict(trained.module.named_parameters())
    # What ranks of a stage share they put together one after the other, all of them.
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
    """Whole tensors in host memory, one after the other; what is no tensor as it is."""
    for name, value in named:
        tensor = isinstance(value, Tensor)
        yield name, rows.whole(value.detach()).cpu().contiguous() if tensor else value


def _write(
    trained: Trained, path: Path, weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    cut = trained.model.cut
    path.mkdir(parents=True, exist_ok=True)
    own = _file("model", cut.index, cut.count, "safetensors")
    save_file(weights, str(path / own), metadata={"format": "pt"})
    optimizer = trained.inner_optimizer
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    kept = {"state": state, "groups": groups}
    torch.save(kept, path / _file("optimizer", cut.index, cut.count, "pt"))
    if cut.index == 0:
        files = {n: _file("model", s, cut.count, "safetensors") for n, s in cut.owners.items()}
        total = sum(
            p.dtype.itemsize * p.shape.numel() for p in trained.engine.everywhere(trained).values()
        )
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def load(trained: Trained, path: Path) -> None:
    """Read this stage's parameters, and what the optimizer kept of them, from the files of however
    many stages wrote them."""
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
    """State on the device of its parameter, and cut as that is; a count stays where Adam keeps it,
    on the host."""
    moved = {}
    for key, value in state.items():
        counts = key == "step" or not isinstance(value, Tensor)
        moved[key] = value if counts else _alike(value.to(like.device), like)
    return moved


def _alike(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor cut as the parameter that it belongs to: every rank has read all of it."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    on = value.to(like.device)
    return distribute_tensor(on, like.device_mesh, like.placements, src_data_rank=None)
