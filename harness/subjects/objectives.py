"""Training objectives, their samplers, and classifier-free guidance.

``epsilon``: discrete diffusion (DDPM, arXiv:2006.11239; learned variance, arXiv:2102.09672), with
the settings of DiT (arXiv:2212.09748): 1000 steps, linear betas, noise prediction, variance learned
between its two bounds. ``flow``: the linear path and velocity prediction of SiT (arXiv:2401.08740).
Both equal the public references numerically, given equal noise and t.

Shape suffixes: B batch, C channels, H height, W width; a plain suffix 1 is a broadcast axis.
Samples may have more or fewer axes, such as a video or packed tokens.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from strategies.losses.functions import IGNORED

STEPS = 1000
Predict = Callable[[Tensor, Tensor], Tensor]
"""(noisy samples, timesteps [B]) -> the model's output."""
Device: TypeAlias = torch.device | str
Shape: TypeAlias = tuple[int, ...]
Chance: TypeAlias = torch.Generator | None
Drawn: TypeAlias = tuple[Tensor, Tensor]
"""Timesteps and noise of as many samples."""


class Objective:
    """Objective of a training; samples are drawn of epsilon and flow only: others need a VAE, a
    tokenizer or a user's sampler."""

    def times(self, chance: torch.Generator, count: int, device: Device) -> Tensor:
        """Return random timesteps [count]: float32, in [0, 1)."""
        return torch.rand(count, generator=chance, device=device)

    def draw(self, chance: torch.Generator, count: int, shape: Shape, device: Device) -> Drawn:
        """Return random timesteps [count] and noise [count, *shape], both on ``device``."""
        t_B = self.times(chance, count, device)
        return t_B, torch.randn((count, *shape), generator=chance, device=device)

    def noisy(self, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        """Return ``x_t``, the samples that the model is given."""
        raise NotImplementedError

    def loss(self, predict: Predict, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        """Return the loss of each sample, float32 [B], from one call ``predict(x_t, t)``; [1] if
        the model's own loss is the mean of a batch, as here."""
        return predict(self.noisy(x_BCHW, t_B, noise_BCHW), t_B).float().reshape(-1)

    def sample(
        self, predict: Predict, noise_BCHW: Tensor, *, steps: int, generator: Chance
    ) -> Tensor:
        """Generate samples [B, C, H, W] from noise, with a model in eval mode."""
        raise NotImplementedError("samples are drawn of epsilon and flow")


class Tables:
    """Per-step coefficients of a discrete diffusion, in float64 until they reach a device.

    Each quantity is a column, so that one gather serves a batch. ``betas`` is float64 [S].
    """

    def __init__(self, betas: np.ndarray) -> None:
        alphas, kept = 1 - betas, np.cumprod(1 - betas)
        before = np.append(1.0, kept[:-1])
        variance = betas * (1 - before) / (1 - kept)
        # The first step's true variance is 0; the reference uses the second step's there.
        low = np.log(np.append(variance[1], variance[1:]))
        to_noise = np.sqrt(1 / kept - 1)
        first = betas * np.sqrt(before) / (1 - kept)
        self.columns = {
            "signal": np.sqrt(kept),
            "noise": np.sqrt(1 - kept),
            "log_low": low,
            "log_span": np.log(betas) - low,
            "unscale": np.sqrt(1 / kept),
            "unnoise": to_noise,
            "from_start": first,
            "from_current": (1 - before) * np.sqrt(alphas) / (1 - kept),
            "mean_error": first * to_noise,
        }
        self._on: dict[torch.device, Tensor] = {}
        self._traced: tuple[object, Tensor] | None = None

    def at(self, t_B: Tensor, like: Tensor, *names: str) -> Iterator[Tensor]:
        """Yield the named columns at steps ``t_B``, float32 on t's device.

        Each is [B, 1, ..., 1] with as many axes as ``like``.
        """
        rows = self._on_device_of(t_B)[t_B]
        order, axes = list(self.columns), [None] * (like.ndim - 1)
        return (rows[(slice(None), order.index(name), *axes)] for name in names)

    def _on_device_of(self, t_B: Tensor) -> Tensor:
        mode = getattr(t_B, "fake_mode", None)  # a trace's fake tensors must not outlive it
        if mode is None and t_B.device in self._on:
            return self._on[t_B.device]
        if mode is not None and self._traced and self._traced[0] is mode:
            return self._traced[1]
        stacked = np.stack(list(self.columns.values()), axis=1)
        table = torch.from_numpy(stacked).float().to(t_B.device)
        if mode is not None:
            self._traced = (mode, table)
        elif type(table) is Tensor:
            self._on[t_B.device] = table
        return table


def spaced_steps(count: int) -> list[int]:
    """Return ``count`` evenly spaced steps of the 1000 training steps, with the first and the last.

    Raises:
        ValueError: fewer than 2 or more than 1000.
    """
    if not 2 <= count <= STEPS:
        raise ValueError(f"{count} sampling steps; give 2 to {STEPS}")
    # Summed like the reference, so that ties round to the same step.
    strides = itertools.repeat((STEPS - 1) / (count - 1), count - 1)
    return [round(place) for place in itertools.accumulate(strides, initial=0.0)]


class Diffusion(Objective):
    """A discrete diffusion of 1000 steps; subclasses choose the predicted quantity."""

    def __init__(self) -> None:
        self.betas = np.linspace(1e-4, 0.02, STEPS, dtype=np.float64)  # Ho et al.'s schedule
        self.tables = Tables(self.betas)

    def times(self, chance: torch.Generator, count: int, device: Device) -> Tensor:
        return torch.randint(0, STEPS, (count,), generator=chance, device=device)  # int64


class Epsilon(Diffusion):
    """Noise prediction with a learned variance."""

    def noisy(self, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        signal, scale = self.tables.at(t_B, x_BCHW, "signal", "noise")
        return torch.addcmul(scale * noise_BCHW, signal, x_BCHW)

    def loss(self, predict: Predict, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        """Squared error of the noise plus the variational bound (bits).

        The bound trains only the variance: the mean enters it without gradient.
        """
        names = ("signal", "noise", "mean_error", "log_low", "log_span")
        signal, scale, mean_error, log_low, log_span = self.tables.at(t_B, x_BCHW, *names)
        out = predict(torch.addcmul(scale * noise_BCHW, signal, x_BCHW), t_B)
        predicted, fraction = out.float().chunk(2, dim=1)
        error = predicted - noise_BCHW
        # Difference of the true and the predicted posterior mean: x_t cancels.
        miss = mean_error * error.detach()
        above_low = log_span * (fraction + 1) / 2
        divergence = _kl(miss, above_low, log_low)
        likelihood = -_log_likelihood(x_BCHW, miss, log_low + above_low)
        first = (t_B == 0).view(-1, *[1] * (x_BCHW.ndim - 1))
        bound = torch.where(first, likelihood, divergence) / math.log(2)
        return error.square().flatten(1).mean(1) + bound.flatten(1).mean(1)

    @torch.no_grad()
    def sample(
        self, predict: Predict, noise_BCHW: Tensor, *, steps: int, generator: Chance
    ) -> Tensor:
        """Ancestral sampling over ``steps`` of the 1000 steps."""
        visited = spaced_steps(steps)
        # Tables of the shorter diffusion that visits only these steps of the full one.
        kept = np.cumprod(1 - self.betas)[visited]
        tables = Tables(1 - kept / np.append(1.0, kept[:-1]))
        x_BCHW = noise_BCHW
        for index in reversed(range(steps)):
            out = predict(x_BCHW, _repeat(visited[index], x_BCHW))
            draw = torch.randn(
                x_BCHW.shape, generator=generator, device=x_BCHW.device, dtype=x_BCHW.dtype
            )
            x_BCHW = ancestral_step(tables, x_BCHW, index, out, draw)
        return x_BCHW


def ancestral_step(tables: Tables, x_BCHW: Tensor, index: int, out: Tensor, draw: Tensor) -> Tensor:
    """Take one DDPM step from ``index`` to ``index - 1``; the last one (0) adds no noise.

    Args:
        out: the model's output [B, 2C, H, W] at that step.
        draw: standard normal noise [B, C, H, W].
    """
    predicted, fraction = out.float().chunk(2, dim=1)
    t_1 = torch.full((1,), index, device=x_BCHW.device)
    names = ("unscale", "unnoise", "from_start", "from_current", "log_low", "log_span")
    unscale, unnoise, from_start, from_current, log_low, log_span = tables.at(t_1, x_BCHW, *names)
    start = unscale * x_BCHW - unnoise * predicted
    mean = from_start * start + from_current * x_BCHW
    if index == 0:
        return mean
    return mean + torch.exp((log_low + log_span * (fraction + 1) / 2) / 2) * draw


def _kl(miss: Tensor, above_low: Tensor, log_low: Tensor) -> Tensor:
    """Return the elementwise KL divergence in nats of two normals.

    Their means differ by ``miss``; their log variances are ``log_low`` (true) and ``log_low +
    above_low`` (predicted).
    """
    shrink = torch.exp(-above_low)
    return 0.5 * (above_low - 1 + shrink + miss.square() * torch.exp(-log_low) * shrink)


def _log_likelihood(x: Tensor, miss: Tensor, log_variance: Tensor) -> Tensor:
    """Return the elementwise log-likelihood in nats of 8-bit values ``x`` in [-1, 1].

    The normal's mean lies ``miss`` below the values; it is integrated over each value's bin.
    """
    inverse = torch.exp(-0.5 * log_variance)
    above = _normal_cdf(inverse * (miss + 1 / 255))
    below = _normal_cdf(inverse * (miss - 1 / 255))
    # The outermost bins extend to infinity.
    mass = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return mass.clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    """Return the tanh approximation of the normal CDF that the reference's likelihood uses."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Velocity(Diffusion):
    """Prediction of v = a noise - s x, where the noisy sample is a x + s noise, as CogVideoX is
    trained (Salimans and Ho 2022, arXiv:2202.00512)."""

    def noisy(self, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        signal, scale = self.tables.at(t_B, x_BCHW, "signal", "noise")
        return signal * x_BCHW + scale * noise_BCHW

    def loss(self, predict: Predict, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        """Squared error of the velocity."""
        signal, scale = self.tables.at(t_B, x_BCHW, "signal", "noise")
        out = predict(signal * x_BCHW + scale * noise_BCHW, t_B)
        velocity = signal * noise_BCHW - scale * x_BCHW
        return (out.float() - velocity).square().flatten(1).mean(1)


class Flow(Objective):
    """Velocity prediction on the straight path: t = 0 is noise, t = 1 is data."""

    def noisy(self, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        return torch.lerp(noise_BCHW, x_BCHW, t_B.view(-1, *[1] * (x_BCHW.ndim - 1)))

    def loss(self, predict: Predict, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        """Squared error of the velocity."""
        velocity = x_BCHW - noise_BCHW
        out = predict(self.noisy(x_BCHW, t_B, noise_BCHW), t_B)
        return (out.float() - velocity).square().flatten(1).mean(1)

    @torch.no_grad()
    def sample(
        self, predict: Predict, noise_BCHW: Tensor, *, steps: int, generator: Chance
    ) -> Tensor:
        """Take even steps of Heun's method, of two calls each, without ``generator``.

        Raises:
            ValueError: no steps.
        """
        if steps < 1:
            raise ValueError(f"{steps} steps; give 1 or more")
        x_BCHW = noise_BCHW
        for index in range(steps):
            now, then = index / steps, (index + 1) / steps
            slope = predict(x_BCHW, _repeat(now, x_BCHW)).float()
            ahead = x_BCHW + slope / steps
            slope = (slope + predict(ahead, _repeat(then, ahead)).float()) / 2
            x_BCHW = x_BCHW + slope / steps
        return x_BCHW


def _repeat(t: float, x_BCHW: Tensor) -> Tensor:
    return torch.full((len(x_BCHW),), t, device=x_BCHW.device)


class Masked(Objective):
    """Prediction of hidden tokens from the visible ones, as MaskGIT (arXiv:2202.04200).

    A share cos(pi u / 2) of the tokens is hidden, with uniform u, and the loss is the cross entropy
    of the hidden ones. One thing differs: the sum is divided by the number of all tokens, so that a
    step's loss does not depend on how the batch is split. (Masked diffusion, arXiv:2406.07524,
    differs only in weights.)

    Samples are tokens int64 [B, T]. The model takes pairs [B, 2, T]: the input, with ``HIDDEN`` for
    a hidden token, and the target, with ``IGNORED`` for a visible token.
    """

    HIDDEN = -1

    def draw(self, chance: torch.Generator, count: int, shape: Shape, device: Device) -> Drawn:
        """Return u, and noise that orders the tokens for hiding."""
        t_B = self.times(chance, count, device)
        return t_B, torch.rand((count, *shape), generator=chance, device=device)

    def noisy(self, x_BT: Tensor, t_B: Tensor, noise_BT: Tensor) -> Tensor:
        hidden_BT = noise_BT < torch.cos(t_B * (math.pi / 2))[:, None]
        seen = torch.where(hidden_BT, self.HIDDEN, x_BT)
        return torch.stack([seen, torch.where(hidden_BT, x_BT, IGNORED)], 1)


class Own(Objective):
    """The model's own loss, which ``strategies.subject.Subject.predict`` returns."""

    def draw(self, chance: torch.Generator, count: int, shape: Shape, device: Device) -> Drawn:
        """Return zeros, one per sample."""
        nothing = torch.zeros(count, device=device)
        return nothing, nothing[:, None]

    def noisy(self, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        return x_BCHW


KINDS: dict[str, type[Objective]] = {
    "epsilon": Epsilon, "flow": Flow, "velocity": Velocity, "own": Own, "masked": Masked,
}  # fmt: skip


@functools.cache
def objective_of(name: str) -> Objective:
    """Return the objective of a spec's name (``Spec.objective``)."""
    return KINDS[name]()


# ---- guidance ----
# Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598).


Ask = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(x, t, conditions) -> the model's output for them."""


def guide(out_BCHW: Tensor, scale: float, channels: int | None = None) -> Tensor:
    """Move conditional outputs away from the unconditional ones.

    Args:
        out_BCHW: outputs for the same inputs with labels (first half) and without (second half).
        scale: 1 is the conditional output, more moves away from the unconditional one.
        channels: number of leading channels to guide; None for all.

    Returns:
        The first half's outputs, [B / 2, C, H, W], guided.
    """
    conditional, unconditional = out_BCHW.chunk(2)
    moved = torch.lerp(unconditional[:, :channels], conditional[:, :channels], scale)
    return moved if channels is None else torch.cat([moved, conditional[:, channels:]], dim=1)


def guided(
    ask: Ask, conditions: Mapping[str, Tensor], scale: float, leading: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (x, t) -> output of ``ask``, guided by ``scale`` towards ``conditions``.

    ``leading`` channels of the output are guided. ``ask`` gets a batch of twice the samples, with
    and without conditions.
    """
    first = next(iter(conditions.values()))
    none_B = torch.zeros(len(first), dtype=torch.bool, device=first.device)
    held = dict(conditions) | {"drop": none_B}
    if scale == 1:
        return lambda x, t_B: ask(x, t_B, held)
    withheld = dict(conditions) | {"drop": ~none_B}
    twice = {name: torch.cat([value, withheld[name]]) for name, value in held.items()}

    def predict(x: Tensor, t_B: Tensor) -> Tensor:
        return guide(ask(torch.cat([x, x]), torch.cat([t_B, t_B]), twice), scale, leading)

    return predict
