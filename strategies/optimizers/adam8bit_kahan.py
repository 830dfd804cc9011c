"""8-bit AdamW with a compensated sum, as diffusion-pipe's AdamW8bitKahan. Imports bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit


class AdamW8bitKahan(AdamW8bit):
    """bitsandbytes' AdamW, which updates ``carried``, what a bfloat16 weight could not take yet."""

    @torch.no_grad()
    def init_state(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        self.state[p]["carried"] = torch.zeros_like(p)

    @torch.no_grad()
    def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        weight, carried = p.data, self.state[p]["carried"]
        carried.add_(weight, alpha=-group["lr"] * group["weight_decay"])
        p.data = carried
        super().update_step({**group, "weight_decay": 0.0}, p, gindex, pindex)
        p.data, before = weight, weight.clone()
        weight.add_(carried)
        carried.add_(before.sub_(weight))
