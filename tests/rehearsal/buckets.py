"""DDP's old buckets: trains a small model again and again, and prints how much higher the second
step's peak is than the third's, as a share of the gradients; by the pause between steps.

``tests.rehearsal.test_rows`` starts it on two cards, with the variables of a rank.
"""

from __future__ import annotations

import json
import os
import time

import torch
from torch import distributed

__all__ = ["PAUSES", "TRAININGS"]

PAUSES = (0.0, 0.05, 0.15, 0.3)
"""Seconds between steps; NCCL's watchdog looks every 0.1 s."""
TRAININGS = 5
"""Trainings with each pause."""


def peaks(pause: float) -> list[int]:
    """Peak bytes of three steps of one training."""
    layers = [torch.nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), gradient_as_bucket_view=True
    )
    found = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        model(torch.ones(1, 1024, device="cuda")).sum().backward()
        found.append(torch.cuda.max_memory_allocated())
        model.zero_grad(set_to_none=True)
        time.sleep(pause)
    return found


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl")
    seen: dict[float, list[float]] = {pause: [] for pause in PAUSES}
    for pause in PAUSES * TRAININGS:
        _, second, third = peaks(pause)
        seen[pause].append((second - third) / (4 * 4 * 1024**2))
    print(json.dumps(seen))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
