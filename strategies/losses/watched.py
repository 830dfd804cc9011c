"""The logits of a watched step: how many rows of them were there at a time.

Imports torch: import it only where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from strategies.evidence.stored import wrapped

__all__ = ["logits"]

OF_LOGITS = ("aten::_log_softmax", "aten::_log_softmax_backward_data")
"""Operations that a loss alone takes; products as wide as the vocabulary may be of any layer."""
FUSED = "linear_cross_entropy_batch_chunked"


@contextmanager
def logits(layer: Any) -> Iterator[dict[str, int]]:
    """What a watched step held of the logits: the most ``rows`` of one tensor and its ``bytes``;
    how often they were computed ``again`` within backward; ``tokens`` of a call."""
    seen = dict.fromkeys(("rows", "bytes", "again", "tokens", "fused"), 0)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if wrapped(types):
                return NotImplemented
            out = f(*args, **(kwargs or {}))
            name = f.overloadpacket._qualified_op_name
            seen["fused"] += FUSED in name
            if name in OF_LOGITS and out.shape[-1] == layer.out_features:
                seen["rows"] = max(seen["rows"], out.shape[0])
                seen["bytes"] = max(seen["bytes"], out.nbytes)
                inside = torch._C._current_graph_task_id() != -1
                seen["again"] += inside and name == "aten::_log_softmax"
            return out

    def called(_: Any, given: Any) -> None:
        seen["tokens"] = max(seen["tokens"], given[0].shape[:-1].numel())

    handle = layer.register_forward_pre_hook(called)
    try:
        with Watch():
            yield seen
    finally:
        handle.remove()
