"""torchao's AdamW in host memory. Imports torchao."""

from __future__ import annotations

from typing import Any

from torchao.optim import CPUOffloadOptimizer


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
