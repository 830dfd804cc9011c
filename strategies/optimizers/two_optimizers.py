"""Two optimizers that look like one: each steps the groups that carry its name.

Groups and state are one optimizer's, so that saving, resuming, counting and stepping a single
group work as for any other. Imports torch: import it only where torch is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class TwoOptimizers(torch.optim.Optimizer):
    """``parts`` maps a name to an optimizer over its own parameters, made with its settings."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self.parts = parts
        groups = [{**g, "part": name} for name, part in parts.items() for g in part.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each part over the groups that are here now (a caller may have narrowed them)."""
        loss = closure() if closure is not None else None
        for name, part in self.parts.items():
            part.param_groups = [g for g in self.param_groups if g["part"] == name]
            part.state = self.state
            if part.param_groups:
                part.step()
        return loss
