"""pi07 (low level) as OpenTau trained it in May 2026: shapes and operations, for predictions alone.

Read from TensorAuto/OpenTau at e7a1da7 (policies/pi07) and transformers 4.53: SigLIP encodes six
frames of a camera and an image of the goal, Gemma 3 4B reads them, the texts and discrete actions,
and an expert reads Gemma's keys and values, which are detached. Layers of both are one block, and
are recomputed; SigLIP is recomputed for the frames, not for the goal. The page of accuracy has what
is predicted with it.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from docs.examples.cosmos3 import Vision

DEPTH, HEADS, KEYS, WIDE, FRAMES, PATCHES, STATE, CHUNK = 34, 8, 4, 256, 6, 1024, 32, 10
TEXTS, CODES, WORDS = (256, 3, 2, 52, 3, 4, 2, 3), 32, 262_208
"""Tokens: prompt, "State: ", ", ", metadata, ";\\n ", "Subgoal: ", ", ", "Action: "."""


class Norm(nn.Module):
    """Gemma's RMSNorm by its parts; with a condition its scale, shift and gate are predicted."""

    def __init__(self, width, condition=0):
        super().__init__()
        if condition:
            self.dense = nn.Linear(condition, 3 * width)
        else:
            self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x, condition=None):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        if condition is None:
            return (y * (1.0 + self.weight.float())).to(x.dtype), None
        scale, shift, gate = self.dense(condition).chunk(3, dim=-1)
        return (y * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


def rotated(x, places):
    scale = 10_000 ** (torch.arange(WIDE // 2, device=x.device) / (WIDE // 2))
    angles = (places[..., None] / scale)[..., None, :]
    sin, cos = angles.sin(), angles.cos()
    a, b = x.float().chunk(2, dim=-1)
    out = torch.empty_like(x, dtype=torch.float32)
    out[..., : WIDE // 2] = a * cos - b * sin
    out[..., WIDE // 2 :] = b * cos + a * sin
    return out.to(x.dtype)


class Frames(Vision):
    """A layer of SigLIP, which attends over time first if ``mask`` is given."""

    def forward(self, x, mask=None):
        if mask is None:
            return super().forward(x)
        y = self.before(x + torch.zeros_like(x[:FRAMES]).repeat(len(x) // FRAMES, 1, 1))
        q, k, v = self.qkv(y).unflatten(-1, (3, 16, 72)).unbind(2)
        when = (
            y.unflatten(0, (-1, FRAMES)).permute(0, 2, 3, 1, 4).flatten(0, 1) for y in (q, k, v)
        )
        v = F.scaled_dot_product_attention(*when, attn_mask=mask).unflatten(0, (-1, PATCHES))
        v = v.permute(0, 3, 1, 2, 4).flatten(0, 1)
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)))
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x)), approximate="tanh"))


class Layer(nn.Module):
    """The weights of a layer of Gemma 3, or of the expert (``condition``)."""

    def __init__(self, width, inner, condition=0):
        super().__init__()
        self.before, self.after = Norm(width, condition), Norm(width, condition)
        if not condition:
            self.inward, self.outward = Norm(width), Norm(width)
            self.q_norm, self.k_norm = Norm(WIDE), Norm(WIDE)
        self.q, self.o = (nn.Linear(*s, bias=False) for s in ((width, 2048), (2048, width)))
        self.k, self.v = (nn.Linear(width, KEYS * WIDE, bias=False) for _ in "kv")
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in "gu")
        self.down, self.dropout = nn.Linear(inner, width, bias=False), nn.Dropout(0.1)

    def mixed(self, x):
        y = F.gelu(self.gate(x), approximate="tanh") * self.up(x)
        return self.dropout(self.down(y))


class Pair(nn.Module):
    """A layer of Gemma 3 and one of the expert; a call runs one of them."""

    def __init__(self):
        super().__init__()
        self.backbone, self.expert = Layer(2560, 10_240), Layer(1280, 5120, 1280)

    def forward(self, x, places, mask, past, number, condition=None):
        own = self.backbone if condition is None else self.expert
        y, gate = own.before(x, condition)
        q, k, v = (f(y).unflatten(-1, (-1, WIDE)) for f in (own.q, own.k, own.v))
        if condition is None:
            q, k = own.q_norm(q)[0], own.k_norm(k)[0]
        q, k, v = (torch.cat([y], dim=1) for y in (rotated(q, places), rotated(k, places), v))
        if condition is None:
            past.of[number] = [y[:, : -CODES - TEXTS[-1]] for y in (k, v)]
        else:
            k, v = (torch.cat(both, dim=1) for both in zip(past.of[number], (k, v), strict=True))
        k, v = (y[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2, 3) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        y = own.dropout(own.o(y.transpose(1, 2).flatten(2)))
        if condition is None:
            x = x + own.after(y)[0]
            return x + own.outward(own.mixed(own.inward(x)[0]))[0]
        x = x + y * gate
        y, gate = own.after(x, condition)
        return x.clone() + own.mixed(y) * gate


class Pi07(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 1152, 14, 14), nn.Embedding(PATCHES, 1152)
        self.vision, self.seen = nn.ModuleList(Frames() for _ in range(27)), nn.LayerNorm(1152)
        self.soft, self.project = Norm(1152), nn.Linear(1152, 2560, bias=False)
        self.words, self.codes = nn.Embedding(WORDS, 2560), nn.Embedding(2048, 2560)
        self.layers, self.read = nn.ModuleList(Pair() for _ in range(DEPTH)), Norm(2560)
        self.done, self.unused = Norm(1280, 1280), nn.Linear(1280, WORDS, bias=False)
        self.head, self.state = nn.Linear(2560, 2048), nn.Linear(STATE, 2560)
        self.action_in, self.action_out = nn.Linear(STATE, 1280), nn.Linear(1280, STATE)
        self.time_in, self.time_out = nn.Linear(1280, 1280), nn.Linear(1280, 1280)

    def images(self, x, mask=None):
        x = self.patch((x * 2 - 1).to(self.patch.weight.dtype)).flatten(2).transpose(1, 2)
        x = x + self.place(torch.arange(PATCHES, device=x.device))
        for n, layer in enumerate(self.vision):
            if mask is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, mask if n % 4 == 3 else None, use_reentrant=False)
        x = self.seen(x)
        x = x if mask is None else x.unflatten(0, (-1, FRAMES))[:, -1]
        x = F.avg_pool2d(x.transpose(1, 2).unflatten(2, (32, 32)).contiguous(), 2)
        return self.project(self.soft(x.flatten(2).transpose(1, 2))[0])

    def forward(self, frames, goal, text, state, codes, noisy, time):
        kind = self.state.weight.dtype
        mask = torch.zeros(len(text) * PATCHES, 1, FRAMES, FRAMES, dtype=kind, device=text.device)
        x = [self.images(frames.flatten(0, 1), mask)]
        x += [self.words(one) * 2560**0.5 for one in text.split(TEXTS, dim=1)]
        x += [self.state(state.to(kind)), self.images(goal), self.codes(codes)]
        x = torch.cat([one.to(x[0].dtype) for one in x], dim=1)
        past = SimpleNamespace(of={})  # keys and values by layer; FSDP2 would copy a dict
        places = torch.arange(x.shape[1], device=x.device)[None].expand(len(x), -1)
        mask = places[:, :, None] >= places[:, None] * 0
        for n, layer in enumerate(self.layers):
            x = checkpoint(layer, x, places, mask, past, n, use_reentrant=False)
        logits = self.head(self.read(x)[0][:, -CODES - 1 : -1]).float()
        for n in past.of:
            past.of[n] = [y.detach() for y in past.of[n]]
        y = self.action_in(noisy.to(kind))
        c = F.silu(self.time_out(F.silu(self.time_in(time.to(kind)))))
        after, kept = places[:, -CHUNK:], places[:, : -CODES - TEXTS[-1] + CHUNK]
        mask = after[:, :, None] >= kept[:, None] * 0
        for n, layer in enumerate(self.layers):
            y = checkpoint(layer, y, after, mask, past, n, c, use_reentrant=False)
        return logits, self.action_out(self.done(y, c)[0]).float()


def make():
    """Return the model, one sample and the loss."""
    batch = {
        "frames": torch.zeros(1, FRAMES, 3, 448, 448),
        "goal": torch.zeros(1, 3, 448, 448),
        "text": torch.zeros(1, sum(TEXTS), dtype=torch.long),
        "state": torch.zeros(1, FRAMES, STATE),
        "codes": torch.zeros(1, CODES, dtype=torch.long),
        "actions": torch.zeros(1, CHUNK, STATE),
        "time": torch.zeros(1, CHUNK, 1280),
    }

    def loss(model, batch):
        logits, found = model(*batch.values())
        said = F.cross_entropy(logits.flatten(0, 1), batch["codes"].flatten())
        return said + F.mse_loss(found, batch["actions"])

    return Pi07(), batch, loss
