"""Objectives by the name that a spec has for them, those of public models among them.

``velocity``: a diffusion that predicts a mixture of noise and data, as CogVideoX is trained
(Salimans and Ho 2022, arXiv:2202.00512). ``own``: the loss is the subject's. ``masked``: of
hidden tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from harness.subjects import densities
from harness.subjects.masked import Masked
from harness.subjects.objectives import OBJECTIVES, Diffusion, Flow, Objective

__all__ = ["Own", "Velocity", "objective_of"]


class Velocity(Diffusion):
    """Prediction of v = a noise - s x, where the noisy sample is a x + s noise."""

    def loss(self, predict, x_BCHW, t_B, noise_BCHW):
        """See ``Objective.loss``; squared error of the velocity."""
        signal, scale = self.tables.at(t_B, x_BCHW, "signal", "noise")
        out = predict(signal * x_BCHW + scale * noise_BCHW, t_B)
        velocity = signal * noise_BCHW - scale * x_BCHW
        return (out.float() - velocity).square().flatten(1).mean(1)

    def sample(self, predict, noise_BCHW, *, steps, generator):
        """Samples of such models are latents of a VAE that is not here."""
        raise NotImplementedError("samples are drawn of epsilon and flow")


class Own:
    """What the model's own loss says (``strategies.subject.Subject.predict`` returns it)."""

    def draw(self, generator, count, sample_shape, device):
        """See ``Objective.draw``; nothing is drawn: a place a sample."""
        nothing = torch.zeros(count, device=device)
        return nothing, nothing[:, None]

    def loss(self, predict: Any, x_BCHW: Tensor, t_B: Tensor, noise_BCHW: Tensor) -> Tensor:
        """See ``Objective.loss``; [1] where the model's own is the mean of a batch."""
        return predict(x_BCHW, t_B).float().reshape(-1)

    def sample(self, predict, noise_BCHW, *, steps, generator):
        """A module of one's own samples by itself."""
        raise NotImplementedError("samples are drawn of epsilon and flow")


OTHERS = {"velocity": Velocity, "own": Own, "masked": Masked}


@functools.cache
def objective_of(name: str) -> Objective:
    """The objective that a spec names: ``flow:density=logit_normal,shift=3`` among others."""
    kind, _, text = name.partition(":")
    if kind == "flow" and text:
        return Flow(densities.read(text))
    return OBJECTIVES[kind] if kind in OBJECTIVES else OTHERS[kind]()
