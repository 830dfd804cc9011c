"""A small model and a loop of one's own under accelerate, to be started by an exported launch file:
``own_loop.py MICRO_BATCH ACCUMULATION CLIP``."""

import os
import sys

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn

MICRO_BATCH, ACCUMULATION, CLIP = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
WIDTH, STEPS, BLOCKS = 64, 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), wide, nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.mlp(x)


def optimizer_of(model):
    """AdamW, of DeepSpeed where its state is in host memory."""
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.01}
    if os.environ["OWN_ADAM"] == "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(model.parameters(), **settings)
    return torch.optim.AdamW(model.parameters(), **settings)


def main():
    # DeepSpeed connects processes by NCCL unless it is told otherwise.
    gloo = [InitProcessGroupKwargs(backend="gloo")] * ("ACCELERATE_USE_DEEPSPEED" in os.environ)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, kwargs_handlers=gloo)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))
    model._no_split_modules = ["Block"]  # what FSDP2 gathers by itself
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    dtype = next(model.parameters()).dtype
    drawn = torch.Generator().manual_seed(accelerator.process_index)  # other data in each process
    for _ in range(STEPS * ACCUMULATION):
        x, noise = torch.randn(2, MICRO_BATCH, 8, WIDTH, generator=drawn)
        with accelerator.accumulate(model):
            loss = (model((x + noise).to(dtype)).float() - noise).square().mean()
            accelerator.backward(loss)
            if CLIP and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return locals()
