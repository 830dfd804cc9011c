"""LongCat-Image, which has no preset: a class of diffusers as a module of one's own, at 512x512.

    ./run.sh plan --model docs/examples/longcat_image.py:make --gpu L40S

Its transformer has half of its class's default blocks. Latents are packed two by two, the text has
512 tokens: source, diffusers 0.42, pipelines/longcat_image/pipeline_longcat_image.py.
"""

import torch
from diffusers import LongCatImageTransformer2DModel

SIDE, TEXT = 32, 512


def positions(kind: int, height: int, width: int, start: int = 0) -> torch.Tensor:
    """Where each token is: what it is of, its row, its column."""
    grid = torch.zeros(height, width, 3)
    grid[..., 0] = kind
    grid[..., 1] = torch.arange(height)[:, None] + start
    grid[..., 2] = torch.arange(width) + start
    return grid.reshape(-1, 3)


def make():
    model = LongCatImageTransformer2DModel(num_layers=10, num_single_layers=20)
    batch = {"image": torch.randn(1, SIDE * SIDE, 64), "caption": torch.randn(1, TEXT, 3584)}

    def loss(model, batch):
        image = batch["image"]
        noise, t = torch.randn_like(image), torch.rand(len(image), 1, 1, device=image.device)
        where = positions(1, SIDE, SIDE, TEXT).to(image.device)
        words = positions(0, 1, TEXT).to(image.device)
        mixed, kind = (1 - t) * image + t * noise, next(model.parameters()).dtype
        given = (mixed.to(kind), batch["caption"].to(kind), t.flatten(), where, words)
        out = model(*given, return_dict=False)[0]
        return (out.float() - (noise - image)).square().mean()

    return model, batch, loss
