"""Wrapper of two optimizers as one: each steps the parameter groups with its name.

Groups and state belong to one optimizer, so saving, resuming, counting and stepping a single group
work as usual. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class TwoOptimizers(torch.optim.Optimizer):
    """Optimizer over ``parts``: name -> optimizer of its own parameters, made with its settings."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self.parts = parts
        groups = [{**g, "part": name} for name, part in parts.items() for g in part.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each part over the current groups (a caller may have narrowed them)."""
        loss = closure() if closure is not None else None
        for name, part in self.parts.items():
            part.param_groups = [g for g in self.param_groups if g["part"] == name]
            part.state = self.state
            if part.param_groups:
                part.step()
        return loss
