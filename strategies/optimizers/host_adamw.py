"""torchao's AdamW in host memory. Imports torchao: import it only where it is there."""

from __future__ import annotations

from typing import Any

from torchao.optim import CPUOffloadOptimizer


class HostAdamW(CPUOffloadOptimizer):
    """One AdamW a large parameter in host memory, one for the small ones on the device.

    torchao looks for a GPU where it is made, and a prediction has none: ``OffloadAdamW`` needs
    CUDA, so that is the device.
    """

    device = property(lambda self: "cuda", lambda self, found: None)

    @property
    def state(self) -> dict[Any, Any]:
        """All their states as one, keyed by the model's parameters as any optimizer's state is;
        torchao keys the states in host memory by its copies of the parameters (0.17,
        optim/cpu_offload.py)."""
        parts = [(p, part.state[self.param_d2h_map[p]]) for p, part in self.optim_dict.items()]
        on_device = self.d_opt.state.items() if self.d_opt else ()
        return {p: state for p, state in [*parts, *on_device] if state}
