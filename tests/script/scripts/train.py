"""Train a small denoiser of random patches with Accelerate."""

import argparse
import json
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Denoiser(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, width, depth, channels=12):
        super().__init__()
        self.embed = nn.Linear(channels + 1, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, channels)

    def forward(self, x, t):
        t = t[:, None, None].expand(-1, x.shape[1], 1)
        h = self.embed(torch.cat([x, t], dim=-1))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--max_train_steps", type=int, default=6)
    parser.add_argument("--train_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--two_optimizers", action="store_true")
    parser.add_argument("--seed", type=int)
    return parser.parse_args()


def make_optimizers(model, args):
    if not args.two_optimizers:
        return [torch.optim.AdamW(model.parameters(), lr=args.learning_rate)]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [
        torch.optim.SGD(matrices, lr=10 * args.learning_rate, momentum=0.9),
        torch.optim.AdamW(others, lr=args.learning_rate),
    ]


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    if args.seed is not None:
        set_seed(args.seed)
    model = Denoiser(args.width, args.depth)
    optimizers = make_optimizers(model, args)
    images = torch.randn(64, 16, 12, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images), batch_size=args.train_batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizers[0], lambda n: 0.5 * (1 + math.cos(math.pi * min(1.0, n / 100)))
    )
    model, loader, scheduler, *optimizers = accelerator.prepare(
        model, loader, scheduler, *optimizers
    )

    log = []
    step = 0
    while step < args.max_train_steps:
        for (clean,) in loader:
            with accelerator.accumulate(model):
                noise = torch.randn_like(clean)
                t = torch.rand(len(clean), device=clean.device)
                noisy = torch.lerp(clean, noise, t[:, None, None])
                loss = (model(noisy, t).float() - (noise - clean)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                for optimizer in optimizers:
                    optimizer.step()
                scheduler.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            log.append({"step": step + 1, "loss": loss.item()})
            if accelerator.sync_gradients:
                step += 1
            if step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.json").write_text(json.dumps(log))
        torch.save(accelerator.unwrap_model(model).state_dict(), folder / "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
