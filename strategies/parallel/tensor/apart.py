"""What does not go with weights that ranks have parts of; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies.engine import Launch

__all__ = ["refused"]

BESIDE = {
    "cut_samples": "ranks share the tokens of samples or the weights, not both; leave sp out",
    "compiled": "a graph with its sums inside has not been tried; leave compile out",
    "doubles_tokens": "a branch beside the blocks would be whole; leave it out",
    "quantized_weights": "a coded weight cannot be cut; leave the codes out",
    "replaced_layers": "the layers that it cuts are replaced by others; leave those out",
    "other_products": "it cuts the products of a whole model that is trained whole; leave out what "
    "freezes, prunes or teaches",
    "streams_weights": "a part of a weight is not streamed; leave block_swap out",
    "moves_activations": "what it would copy away has not been tried; leave it out, or take "
    "checkpoint",
    "scales_gradients": "a rank whose part overflows would skip a step alone; take bf16",
    "own_state": "the optimizer's state of a part is not a part of the state; take adamw",
    "early_gradients": "a gradient's norm is of all ranks, so none is used early; take adamw",
    "edits_gradients": "DDP's hook would see parts of some gradients; leave it out",
    "sparse_gradients": "the norm of a sparse gradient is taken alone; leave it out",
}
"""What has not been tried with parts of weights, or cannot be -> why, and the way out."""


def refused(launch: Launch) -> str | None:
    """Why such weights cannot be under ``launch``, and the way out."""
    return next((why for trait, why in BESIDE.items() if trait in launch.traits), None)
