"""torchao's AdamW with bfloat16 moments, and in host memory. Imports torchao."""

from __future__ import annotations

from typing import Any

import torch
from torchao.optim import CPUOffloadOptimizer, _AdamW


class AdamW16bit(_AdamW):
    """AdamW that steps in float32 and stores both moments in bfloat16, rounded to nearest.

    torchao casts moments up and down itself (0.18, optim/adam.py, ``single_param_adam``). torch
    2.13 has such a step in its fused CUDA kernel alone (``fused_adam_utils.cuh``), for float32
    weights. DeepSpeed 0.19 keeps bfloat16 states of bfloat16 masters only.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        # torch loads a state in the type of its parameter (optim/optimizer.py).
        self.register_load_state_dict_post_hook(lambda loaded: loaded._shorten())

    def _new_buffer(self, p: Any, signed: bool) -> Any:
        return torch.zeros_like(p, dtype=torch.bfloat16)

    def _shorten(self) -> None:
        for state in self.state.values():
            moments = {k: v.bfloat16() for k, v in state.items() if k != "step"}
            state.update(moments)


class HostAdamW(CPUOffloadOptimizer):
    """One AdamW in host memory per large parameter, and one on the device for the small ones.

    torchao checks for a GPU when it is constructed, and a prediction has none. ``OffloadAdamW``
    needs CUDA, so the device is fixed.
    """

    device = property(lambda self: "cuda", lambda self, found: None)

    @property
    def state(self) -> dict[Any, Any]:
        """All states, keyed by the model's parameters as in any optimizer.

        torchao keys the states in host memory by its copies of the parameters (0.17,
        optim/cpu_offload.py).
        """
        parts = [(p, part.state[self.param_d2h_map[p]]) for p, part in self.optim_dict.items()]
        on_device = self.d_opt.state.items() if self.d_opt else ()
        return {p: state for p, state in [*parts, *on_device] if state}
