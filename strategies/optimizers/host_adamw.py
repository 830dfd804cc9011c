"""torchao's AdamW in host memory. Imports torchao: import it only where it is there."""

from __future__ import annotations

from typing import Any

from torchao.optim import CPUOffloadOptimizer

__all__ = ["HostAdamW"]


class HostAdamW(CPUOffloadOptimizer):
    """One AdamW a large parameter in host memory, one for the small ones on the device.

    torchao looks for a GPU where it is made, and a prediction has none: ``OffloadAdamW`` needs
    CUDA, so that is the device.
    """

    device = property(lambda self: "cuda", lambda self, found: None)

    @property
    def state(self) -> dict[Any, Any]:
        """All their states as one, keyed by the tensors that are stepped."""
        parts = [*self.optim_dict.values(), *([self.d_opt] if self.d_opt else [])]
        return {p: state for part in parts for p, state in part.state.items()}
