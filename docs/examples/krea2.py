"""Krea 2 as a module of one's own, at 512x512: a class of diffusers with its batch and loss.

    ./run.sh plan --model docs/examples/krea2.py:make --gpu L40S

Its text is 512 tokens of twelve layers of an encoder, with a mask: source, diffusers 0.42,
pipelines/krea2/pipeline_krea2.py.
"""

import torch
from diffusers import Krea2Transformer2DModel

SIDE, TEXT = 32, 512


def make():
    model = Krea2Transformer2DModel()
    caption, mask = torch.randn(1, TEXT, 12, 2560), torch.ones(1, TEXT, dtype=torch.bool)
    batch = {"image": torch.randn(1, SIDE * SIDE, 64), "caption": caption, "mask": mask}

    def loss(model, batch):
        image = batch["image"]
        noise, t = torch.randn_like(image), torch.rand(len(image), 1, 1, device=image.device)
        where = torch.zeros(TEXT + SIDE * SIDE, 3, device=image.device)
        along = torch.arange(SIDE, device=image.device, dtype=torch.float32)
        where[TEXT:, 1], where[TEXT:, 2] = along.repeat_interleave(SIDE), along.repeat(SIDE)
        mixed, kind = (1 - t) * image + t * noise, next(model.parameters()).dtype
        given = (mixed.to(kind), batch["caption"].to(kind), t.flatten(), where, batch["mask"])
        out = model(*given, return_dict=False)[0]
        return (out.float() - (noise - image)).square().mean()

    return model, batch, loss
