"""Pruning by magnitude: single weights (prune), or whole attention heads and MLP channels
(prune_structured)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import Attachment, Slot, demand
from strategies.engine import RunContext, TrainingRun
from strategies.strategy import Strategy
from strategies.subject import Subject


class Masks(Attachment):
    """Boolean masks of the pruned matrices; a pruned weight's gradient is zero.

    Adam does not move a weight whose gradients were all zero, so a float32 master that an engine
    hides stays zero with the weight. An optimizer that mixes elements would move it, so accessible
    weights are masked again after each step.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        self.pruned: list[tuple[Any, Any]] = []
        for p in run.module.parameters():
            if hasattr(p, "pruned_to"):
                mask = p.pruned_to.to(run.accelerator.device)
                del p.pruned_to
                self.pruned.append((p, mask))
                p.register_hook(lambda gradient, mask=mask: gradient * mask)

    def after_step(self) -> None:
        """Mask the weights, if the optimizer updates them directly."""
        import torch

        if "flat_weights" in self.run.launch.traits:
            return
        with torch.no_grad():
            for p, mask in self.pruned:
                p.mul_(mask)

    def tensors(self) -> list[Any]:
        """Return the masks: a pruned weight takes one byte more, not four bytes less."""
        return [mask for _, mask in self.pruned]

    def state_dict(self) -> dict[str, Any]:
        return {"masks": self.tensors()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the masks in place, because the hooks hold them."""
        for mine, saved in zip(self.tensors(), state["masks"], strict=True):
            mine.copy_(saved)


@dataclass(frozen=True, kw_only=True)
class ByMagnitude(Strategy):
    """Base of both: removes the ``fraction`` of the smallest."""

    slot: ClassVar[Slot] = Slot.SPARSIFY
    alters: ClassVar[tuple[str, ...]] = ("forward",)
    reads_weights: ClassVar[bool] = True

    ranges: ClassVar[dict[str, Any]] = {"fraction": (lambda v: 0 < v < 1, "between 0 and 1")}

    fraction: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Prune(ByMagnitude):
    """Zeroes the smallest weights and keeps them at zero.

    ``fraction`` is their share of each matrix of the blocks.

    Weights, gradients and moments stay dense. It saves no memory, and the masks take some.
    """

    name: ClassVar[str] = "prune"
    source: ClassVar[str] = "Han et al. 2015, Weights and Connections (arXiv:1506.02626)"

    def traits(self) -> frozenset[str]:
        return frozenset({"masked_weights"})

    def edit_model(self, module: Any, subject: Subject) -> None:
        import torch

        with torch.no_grad():
            inner = (p for block in subject.blocks(module) for p in block.parameters())
            for p in (p for p in inner if p.ndim == 2):
                lowest = int(self.fraction * p.numel())
                order = p.abs().flatten().argsort()
                mask = torch.ones(p.numel(), dtype=torch.bool)
                mask[order[:lowest]] = False
                p.pruned_to = mask.view_as(p)
                p.mul_(p.pruned_to)

    def attach(self, run: TrainingRun) -> Masks:
        return Masks(run)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        masks: Any = run.attached.get(self.name)
        demand(isinstance(masks, Masks) and bool(masks.pruned), "there are no masks")
        gathered = run.engine.whole(run, [p for p, _ in masks.pruned])  # all ranks call it
        pairs = zip(gathered, masks.tensors(), strict=True)  # under ZeRO-3 whole until the next
        wrong = sum(int((p.detach()[~mask] != 0).sum()) for p, mask in pairs)
        pruned = sum(int((~mask).sum()) for mask in masks.tensors())
        total = sum(mask.numel() for mask in masks.tensors())
        text = f"{pruned} of {total} weights are masked, expected a share of {self.fraction}"
        demand(abs(pruned / total - self.fraction) < 0.01, text)
        demand(wrong == 0, f"{wrong} of {pruned} pruned weights are not zero")
        return {"pruned": pruned, "of": total}


# ---- structured pruning ----


def narrowed(linear: Any, rows: Any = None, columns: Any = None) -> Any:
    """Return a linear layer with some of ``linear``'s outputs (rows) or inputs (columns)."""
    import torch

    weight, bias = linear.weight.data, linear.bias.data
    if rows is not None:
        weight, bias = weight[rows], bias[rows]
    if columns is not None:
        weight = weight[:, columns]
    smaller = torch.nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    smaller.weight = torch.nn.Parameter(weight.contiguous())
    smaller.bias = torch.nn.Parameter(bias.clone())
    return smaller


def strongest(scores: Any, keep: int) -> Any:
    """Return the indices of the ``keep`` highest scores, in order."""
    return scores.topk(keep).indices.sort().values


def prune_heads(attention: Any, keep: int) -> None:
    """Keep the heads whose columns of the output projection are the largest."""
    heads, size = attention.num_heads, attention.proj.in_features // attention.num_heads
    columns = attention.proj.weight.data.unflatten(1, (heads, size))
    kept = strongest(columns.square().sum(dim=(0, 2)), keep)
    inner = (kept[:, None] * size + kept.new_tensor(range(size))).flatten()
    queries_keys_values = (inner + kept.new_tensor(range(3))[:, None] * heads * size).flatten()
    attention.qkv = narrowed(attention.qkv, rows=queries_keys_values)
    attention.proj = narrowed(attention.proj, columns=inner)
    attention.num_heads = keep


def prune_channels(mlp: Any, keep: int) -> None:
    """Keep the hidden channels whose weights in and out are the largest."""
    into, out = mlp.fc1.weight.data.norm(dim=1), mlp.fc2.weight.data.norm(dim=0)
    kept = strongest(into * out, keep)
    mlp.fc1, mlp.fc2 = narrowed(mlp.fc1, rows=kept), narrowed(mlp.fc2, columns=kept)


@dataclass(frozen=True, kw_only=True)
class PruneStructured(ByMagnitude):
    """Removes the weakest heads and MLP channels.

    ``fraction`` is their share. The model has fewer parameters and FLOPs afterwards.
    """

    name: ClassVar[str] = "prune_structured"
    source: ClassVar[str] = "Michel et al. 2019 (arXiv:1905.10650); Li et al. 2017 (1608.08710)"

    def traits(self) -> frozenset[str]:
        return frozenset({"other_products", "replaced_layers"})

    def refuses(self, launch: RunContext) -> str | None:
        return super().refuses(launch) or launch.subject.lacks("halves")

    def _remaining(self, number: int) -> int:
        return max(1, round(number * (1 - self.fraction)))

    def edit_model(self, module: Any, subject: Subject) -> None:
        for block in subject.blocks(module):
            prune_heads(block.attn, self._remaining(block.attn.num_heads))
            prune_channels(block.mlp, self._remaining(block.mlp.fc1.out_features))

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        """Return the heads and channels of a block, by the rows of its weights."""
        size = run.subject.survey
        for block in run.blocks():
            layers = (block.attn.qkv, block.mlp.fc1)
            rows = [run.engine.part(layer.weight).shape[0] for layer in layers]
            heads, channels = self._remaining(size.widest.heads), self._remaining(size.inner)
            wanted = [3 * heads * size.widest.width, channels]
            demand(rows == wanted, f"the weights have {rows} rows, expected {wanted}")
        return {"heads": heads, "channels": channels}
