"""Example model and training loop in plain torch and accelerate, into which an export inserts a
recipe's lines.

``harness.planner.export.bundle`` reads this file as text and replaces the comments in brackets.
"""

import torch
from accelerate import Accelerator
from torch import nn

# [imports]

MICRO_BATCH, ACCUMULATION, STEPS, BLOCKS = 2, 1, 2, 4  # [numbers]

# [functions]


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


def main():
    # [settings]
    accelerator = Accelerator()  # [accelerator]
    torch.manual_seed(0)
    model = Model()
    # [model]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters)  # [optimizer]
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    # [prepared]
    data = batches(accelerator)
    for step in range(STEPS):
        for _ in range(ACCUMULATION):
            x, y, noise = next(data)
            with accelerator.accumulate(model):
                loss = (model(x, y).float() - noise).square().mean()
                accelerator.backward(loss)  # [backward]
                # [gradients]
                optimizer.step()
                optimizer.zero_grad()
        # [stepped]
        accelerator.print(f"step {step + 1}: loss {loss.item():.4f}")
    return locals()  # for whoever wants to look at what was trained


if __name__ == "__main__":
    trained = main()
