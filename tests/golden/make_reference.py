"""Make reference_dit.json: numbers of the public reference, for tests that do not have it.

By hand, with checkouts of github.com/facebookresearch/DiT and github.com/willisma/SiT:

    HEADROOM_REFERENCE_DIT=... HEADROOM_REFERENCE_SIT=... python tests/golden/make_reference.py

Weights and inputs are sines of an index, not random numbers, so that they are the same under every
version of torch. timm, which the reference takes three layers from, is stood in for by the same
layers written here, and torchdiffeq, which SiT imports for sampling only, by nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

TARGET = Path(__file__).with_name("reference_dit.json")
SMALL = dict(
    input_size=8, patch_size=2, in_channels=4, hidden_size=64, depth=2, num_heads=4, num_classes=10
)
TIMES = [0, 0, 1, 250, 998, 999]
SPACINGS = (10, 33, 50, 250)


def wave(shape: tuple[int, ...], phase: float, scale: float = 1.0) -> Tensor:
    """A float32 tensor of sines at an irrational stride: looks random, is not."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    return torch.from_numpy(scale * np.sin(index * 2.399963 + phase)).float().reshape(shape)


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Set every trainable parameter to a wave; its phase is its place in the model."""
    for place, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        scale = 1.5 / np.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.8
        parameter.copy_(wave(tuple(parameter.shape), float(place), scale))
    return model


def inputs(count: int) -> dict[str, Tensor]:
    """Data x, noise, labels y and masks of withheld labels for ``count`` samples."""
    shape = (count, 4, 8, 8)
    labels = torch.arange(count) % 10
    return dict(
        x=wave(shape, 0.5), noise=wave(shape, 1.5, 1.4), y=labels, drop=torch.arange(count) % 3 == 1
    )


def thin(values: Tensor) -> list[float]:
    """Every 7th value: enough to tell two tensors apart."""
    return [round(float(v), 7) for v in values.detach().float().flatten()[::7]]


class PatchEmbed(nn.Module):
    """timm's, as far as the reference uses it."""

    def __init__(self, size, patch, channels, width, bias=True):
        super().__init__()
        self.patch_size = (patch, patch)
        self.num_patches = (size // patch) ** 2
        self.proj = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """timm's, as far as the reference uses it."""

    def __init__(self, width, num_heads, qkv_bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(x).reshape(b, t, 3, self.num_heads, d // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(b, t, d))


class Mlp(nn.Module):
    """timm's, as far as the reference uses it."""

    def __init__(self, in_features, hidden_features, act_layer, drop):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


def load(checkout: str, *names: str) -> list[Any]:
    """Import top-level modules of a checkout, as its own scripts would."""
    layers = types.ModuleType("timm.models.vision_transformer")
    layers.PatchEmbed, layers.Attention, layers.Mlp = PatchEmbed, Attention, Mlp
    stubs = {"timm": types.ModuleType("timm"), "timm.models": types.ModuleType("timm.models")}
    stubs |= {layers.__name__: layers, "torchdiffeq": types.ModuleType("torchdiffeq")}
    stubs["torchdiffeq"].odeint = None
    stubs["tqdm"] = types.ModuleType("tqdm")
    stubs["tqdm"].tqdm = iter
    kept = {name: sys.modules.get(name) for name in (*stubs, *names)}
    sys.modules.update(stubs)
    sys.path.insert(0, checkout)
    try:
        for name in names:
            sys.modules.pop(name, None)
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(checkout)
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def withheld(batch: dict[str, Tensor]) -> Tensor:
    """Labels with the null class where ``drop`` says so."""
    return torch.where(batch["drop"], SMALL["num_classes"], batch["y"])


def outputs(model: nn.Module) -> dict[str, list[float]]:
    """The model's own functions on fixed inputs; any DiT with the reference's signatures."""
    batch = inputs(4)
    t = torch.tensor([0, 17, 500, 999])
    both = torch.cat([batch["y"][:2], torch.full((2,), 10)])
    with torch.no_grad():
        return {
            "forward": thin(model(batch["noise"], t, batch["y"])),
            "forward_fractional": thin(model(batch["noise"], t / 1000, withheld(batch))),
            "forward_with_cfg": thin(model.forward_with_cfg(batch["noise"], t, both, 4.0)),
        }


def gradients(model: nn.Module) -> dict[str, float]:
    """Norm of every trainable parameter's gradient."""
    norms = {n: p.grad.norm() for n, p in model.named_parameters() if p.grad is not None}
    return {name: round(norm.item(), 7) for name, norm in norms.items()}


def epsilon(models: Any, diffusion: Any) -> dict[str, Any]:
    """Loss, its gradients and samples of the reference's diffusion."""
    model = fill(models.DiT(**SMALL)).eval()
    batch = inputs(len(TIMES))
    process = diffusion.create_diffusion("")
    t, labels = torch.tensor(TIMES), {"y": withheld(batch)}
    terms = process.training_losses(model, batch["x"], t, labels, noise=batch["noise"])
    terms["loss"].mean().backward()
    spaced = {n: diffusion.create_diffusion(str(n)).timestep_map for n in SPACINGS}
    return {
        "outputs": outputs(model),
        "loss": [float(v) for v in terms["loss"].detach()],
        "gradients": gradients(model),
        "spaced": spaced,
        "sample": samples(model, diffusion),
    }


def samples(model: nn.Module, diffusion: Any) -> list[float]:
    """Two guided samples after 5 steps; the noise of each step is a wave."""
    module = diffusion.gd
    steps, randn_like = iter(range(9)), torch.randn_like
    start, labels = inputs(2)["noise"], torch.tensor([3, 7, 10, 10])
    module.th.randn_like = lambda x: step_noise(next(steps)).repeat(2, 1, 1, 1)
    try:
        found = diffusion.create_diffusion("5").p_sample_loop(
            model.forward_with_cfg, (4, 4, 8, 8), start.repeat(2, 1, 1, 1),
            clip_denoised=False, model_kwargs=dict(y=labels, cfg_scale=4.0), device="cpu",
        )  # fmt: skip
    finally:
        module.th.randn_like = randn_like
    return thin(found[:2])


def step_noise(step: int) -> Tensor:
    """Noise of a sampling step, counted from the first one taken: [2, 4, 8, 8]."""
    return wave((2, 4, 8, 8), 2.0 + step, 1.4)


def flow(models: Any, transport: Any) -> dict[str, Any]:
    """Loss of SiT's transport (linear path, velocity), with the same blocks."""
    model = fill(models.DiT(**SMALL, learn_sigma=False)).eval()
    batch = inputs(len(TIMES))
    process = transport.create_transport()
    t = torch.tensor(TIMES) / 1000
    process.sample = lambda x1: (t, batch["noise"], x1)
    terms = process.training_losses(model, batch["x"], {"y": withheld(batch)})
    terms["loss"].mean().backward()
    return {"loss": [float(v) for v in terms["loss"].detach()], "gradients": gradients(model)}


def positions(table: Any) -> list[float]:
    """Some of the position table of DiT-S/2 at 512 pixels, latents of 64 x 64: [1024, 384]."""
    return [round(float(v), 7) for v in np.asarray(table, np.float32).flatten()[::997]]


def structure(models: Any) -> dict[str, Any]:
    """Parameter counts of every preset, and names and shapes of the largest."""
    with torch.device("meta"):
        made = {name: make() for name, make in models.DiT_models.items()}
    largest = made["DiT-XL/2"].state_dict()
    return {
        "counts": {n: sum(p.numel() for p in m.parameters()) for n, m in made.items()},
        "trainable": {
            n: sum(p.numel() for p in m.parameters() if p.requires_grad) for n, m in made.items()
        },
        "state_dict": {name: list(value.shape) for name, value in largest.items()},
        "pos_embed": thin(models.DiT(**SMALL).pos_embed),
        "pos_embed_512": positions(models.get_2d_sincos_pos_embed(384, 32)),
    }


def main() -> None:
    """Write the golden file."""
    torch.set_num_threads(1)
    models, diffusion = load(os.environ["HEADROOM_REFERENCE_DIT"], "models", "diffusion")
    (transport,) = load(os.environ["HEADROOM_REFERENCE_SIT"], "transport")
    found = {
        "structure": structure(models),
        "epsilon": epsilon(models, diffusion),
        "flow": flow(models, transport),
    }
    text = json.dumps(found, indent=0)
    TARGET.write_text(text + "\n")
    print(f"{TARGET}: {len(text)} characters")


if __name__ == "__main__":
    main()
