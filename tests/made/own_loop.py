"""A small model and a loop of one's own under accelerate, to be started by an exported launch file:
``own_loop.py MICRO_BATCH ACCUMULATION CLIP``."""

import os
import sys

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn

MICRO_BATCH, ACCUMULATION, CLIP = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
STEPS, BLOCKS = 2, 4


class Attention(nn.Module):
    def __init__(self, width, heads) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, c):
        x = x + self.attn(self.norm1(x) + c[:, None])
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Put your own in its place; the recipe's lines know its ``blocks``, ``final``, ``labels``."""

    def __init__(self, width=128, heads=4, depth=BLOCKS, channels=16, classes=10) -> None:
        super().__init__()
        self.width, self.channels, self.classes = width, channels, classes
        self.enter, self.labels = nn.Linear(channels, width), nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.final = nn.Linear(width, channels)

    def forward(self, x, y):
        c = self.labels(y)
        x = self.enter(x.to(c.dtype))
        for block in self.blocks:
            x = block(x, c)
        return self.final(x)


def batches(accelerator, channels=16, classes=10, tokens=64):
    """Your data: noisy tokens, labels, and what to predict; other ones in each process."""
    generator = torch.Generator().manual_seed(accelerator.process_index)
    while True:
        x = torch.randn(MICRO_BATCH, tokens, channels, generator=generator)
        y = torch.randint(classes, (MICRO_BATCH,), generator=generator)
        noise = torch.randn(x.shape, generator=generator)
        yield [t.to(accelerator.device) for t in (x + noise, y, noise)]


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
    model = Model()
    model._no_split_modules = ["Block"]  # what FSDP2 gathers by itself
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    model.train()
    data = batches(accelerator)
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            x, y, noise = next(data)
            with accelerator.accumulate(model):
                loss = (model(x, y).float() - noise).square().mean()
                accelerator.backward(loss)
                if CLIP and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return locals()
