"""Cosmos3 as OpenTau trained it in June 2026: its shapes and operations, for predictions alone.

Read from TensorAuto/OpenTau at 0b153a9 (policies/cosmos3) and transformers 4.57: Qwen3-VL 32B is
frozen, reads two cameras and a prompt without gradients, and an expert of 0.91 billion parameters
attends to its keys and values. The page of accuracy has what is predicted with it.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DEPTH, KEYS, WIDE, WIDTH = 64, 8, 128, 5120
CAMERAS, PATCHES, TEXT, ACTIONS, CONDITION = 2, 196, 53, 32, 256


class Norm(nn.Module):
    """RMSNorm by its parts, as transformers and the expert's heads have it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Adaptive(nn.Module):
    """RMSNorm whose scale, shift and gate are predicted from the time."""

    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(CONDITION, 3 * width)

    def forward(self, x, condition):
        y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        scale, shift, gate = self.dense(condition).chunk(3, dim=-1)
        return (y * (1 + scale.float()) + shift.float()).to(x.dtype), gate


def rotated(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Layer(nn.Module):
    """A layer of Qwen3, or of the expert, which reads ``past`` too and has dropout."""

    def __init__(self, width, heads, inner, norm):
        super().__init__()
        self.before, self.after = norm(width), norm(width)
        self.q = nn.Linear(width, heads * WIDE, bias=False)
        self.k, self.v = (nn.Linear(width, KEYS * WIDE, bias=False) for _ in "kv")
        self.o = nn.Linear(heads * WIDE, width, bias=False)
        self.q_norm, self.k_norm = Norm(WIDE), Norm(WIDE)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in "gu")
        self.down = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def attended(self, x, cos, sin, past, mask):
        q, k, v = (f(x).unflatten(-1, (-1, WIDE)) for f in (self.q, self.k, self.v))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        q, k, v = rotated(q, cos, sin), rotated(k, cos, sin), v.transpose(1, 2)
        if past is not None:
            k, v = (torch.cat(both, dim=2) for both in zip(past, (k, v), strict=True))
        each = q.shape[1] // KEYS
        many = [y[:, :, None].expand(-1, -1, each, -1, -1).flatten(1, 2) for y in (k, v)]
        y = F.scaled_dot_product_attention(q, *many, attn_mask=mask, is_causal=past is None)
        return self.o(y.transpose(1, 2).flatten(2)), (k, v)

    def forward(self, x, cos, sin):
        y, kept = self.attended(self.before(x), cos, sin, None, None)
        x = x + y
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y)), kept


class Expert(Layer):
    """A layer of the expert, whose gates come from the time."""

    def forward(self, x, cos, sin, k, v, mask, condition):
        y, gate = self.before(x, condition)
        x = x + gate * self.dropout(self.attended(y, cos, sin, (k, v), mask)[0])
        y, gate = self.after(x, condition)
        return x + gate * self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))


class Vision(nn.Module):
    """A layer of the vision tower."""

    def __init__(self, width=1152, inner=4304):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 16, 72)).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x)), approximate="tanh"))


class Merger(nn.Module):
    """Projection of four patches to a token."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(4608, 4608)
        self.down = nn.Linear(4608, WIDTH)

    def forward(self, x):
        y = self.norm(x.reshape(len(x), -1, *self.norm.normalized_shape)).reshape(len(x), -1, 4608)
        return self.down(F.gelu(self.up(y)))


class Frozen(nn.Module):
    """Qwen3-VL 32B; returns each layer's keys and values."""

    def __init__(self):
        super().__init__()
        self.patch, self.place = nn.Linear(1536, 1152), nn.Embedding(2304, 1152)
        self.vision = nn.ModuleList(Vision() for _ in range(27))
        self.merge, self.deep = Merger(1152), nn.ModuleList(Merger(4608) for _ in range(3))
        self.words, self.head = nn.Embedding(151_936, WIDTH), nn.Linear(WIDTH, 151_936, bias=False)
        self.layers = nn.ModuleList(Layer(WIDTH, 64, 25_600, Norm) for _ in range(DEPTH))
        self.norm = Norm(WIDTH)

    def forward(self, pictures, prompt, cos, sin):
        x = self.patch(pictures.flatten(0, 1).to(self.patch.weight.dtype))
        x, deep = x + self.place(torch.arange(PATCHES, device=x.device)), []
        for n, layer in enumerate(self.vision):
            x = layer(x)
            if n in (8, 16, 24):
                deep.append(self.deep[len(deep)](x).unflatten(0, (-1, CAMERAS)).flatten(1, 2))
        seen = self.merge(x).unflatten(0, (-1, CAMERAS)).flatten(1, 2)
        x, kept = torch.cat([seen, self.words(prompt)], dim=1), []
        for n, layer in enumerate(self.layers):
            x, pair = layer(x, cos, sin)
            kept.append(pair)
            if n < len(deep):
                x = torch.cat([x[:, : seen.shape[1]] + deep[n], x[:, seen.shape[1] :]], dim=1)
        self.norm(x)
        return kept


class Cosmos3(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.frozen, self.checkpoints = Frozen().requires_grad_(False), checkpoints
        self.expert = nn.ModuleList(Expert(1024, 16, 2048, Adaptive) for _ in range(DEPTH))
        self.done, self.state = Adaptive(1024), nn.Linear(ACTIONS, 1024)
        self.action_in, self.action_out = nn.Linear(ACTIONS, 1024), nn.Linear(1024, ACTIONS)
        self.time_in, self.time_out = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        self.condition = nn.Linear(1024, CONDITION)

    def forward(self, pictures, prompt, state, noisy, time):
        kind, read = self.state.weight.dtype, CAMERAS * PATCHES // 4 + TEXT
        whole = read + 1 + noisy.shape[1]
        angles = torch.arange(whole, device=state.device)[:, None] / 5e6 ** (
            torch.arange(0, WIDE, 2, device=state.device) / WIDE
        )
        angles = torch.cat((angles, angles), dim=-1).expand(len(state), 1, -1, -1)
        cos, sin = angles.cos().to(kind), angles.sin().to(kind)
        with torch.no_grad():
            kept = self.frozen(pictures, prompt, cos[:, :, :read], sin[:, :, :read])
        x = torch.cat([self.state(state.to(kind))[:, None], self.action_in(noisy.to(kind))], dim=1)
        c = F.silu(self.time_out(F.silu(self.time_in(time.to(kind)))))
        mask = torch.ones(len(x), 1, x.shape[1], whole, dtype=torch.bool, device=x.device)
        c, cos, sin = self.condition(c), cos[:, :, read:], sin[:, :, read:]
        for layer, (k, v) in zip(self.expert, kept, strict=True):
            given = x, cos, sin, k, v, mask, c
            again = self.checkpoints
            x = checkpoint(layer, *given, use_reentrant=False) if again else layer(*given)
        return self.action_out(self.done(x, c)[0][:, 1:]).float()


def make(chunk=50, checkpoints=False):
    """Return the model, one sample and the loss."""
    batch = {
        "pictures": torch.zeros(1, CAMERAS, PATCHES, 1536),
        "prompt": torch.zeros(1, TEXT, dtype=torch.long),
        "state": torch.zeros(1, ACTIONS),
        "actions": torch.zeros(1, chunk, ACTIONS),
        "noise": torch.zeros(1, chunk, ACTIONS),
        "time": torch.zeros(1, chunk + 1, 1024),
    }

    def loss(model, batch):
        actions, noise = batch["actions"], batch["noise"]
        found = model(batch["pictures"], batch["prompt"], batch["state"], actions, batch["time"])
        return F.mse_loss(found, noise - actions)

    return Cosmos3(checkpoints), batch, loss


def checkpointed():
    """Return the same with chunks of 10, the expert's layers recomputed."""
    return make(10, True)
