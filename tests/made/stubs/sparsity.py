"""Weights that stay dense, and gradients that do."""

from __future__ import annotations

from strategies.communication.sparse_embedding import SparseEmbedding
from strategies.sparsity.prune import Prune, PruneStructured, prune_heads
from strategies.sparsity.sparse24 import Sparse24
from tests.made.stubs.parts import Table, nothing

PRUNE, MASKS = Prune.edit_model, Prune.attach


def half_pruned(self, module, subject):
    PRUNE(Prune(), module, subject)


def idle_masks(self, trained):
    masks = MASKS(self, trained)
    for parameter, _ in masks.pruned:
        parameter._backward_hooks.clear()
    masks.after_step = lambda: None
    return masks


def heads_alone(self, module, subject):
    for block in module.blocks:
        block.had = (block.attn.num_heads, block.mlp.fc1.out_features)
        prune_heads(block.attn, 2)


def by_name_alone(self, module, subject):
    """Says that it cut, and cuts nothing."""
    for block in module.blocks:
        block.had = (block.attn.num_heads, block.mlp.fc1.out_features)
        block.attn.num_heads = 2
        block.mlp.fc1.out_features = block.mlp.fc1.out_features // 2


LOST: Table = {
    "no masks": ("single+prune", Prune, "attach", nothing),
    "masks that mask nothing": ("single+prune", Prune, "attach", idle_masks),
    "other masks": ("single+prune:fraction=0.9", Prune, "edit_model", half_pruned),
    "nothing removed": ("single+prune_structured", PruneStructured, "edit_model", nothing),
    "cut by name alone": ("single+prune_structured", PruneStructured, "edit_model", by_name_alone),
    "heads and no channels": (
        "single+prune_structured", PruneStructured, "edit_model", heads_alone,
    ),
    "dense layers": ("single+bf16+sparse24", Sparse24, "edit_model", nothing),
    "dense gradients": (
        "single+sgd:momentum=0.0+sparse_embedding", SparseEmbedding, "edit_model", nothing,
    ),
}  # fmt: skip
