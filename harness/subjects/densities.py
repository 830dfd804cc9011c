"""Densities of the time in flow matching, with a shift. No torch at import.

``flow:density=logit_normal,shift=3`` names a density of the noise level s in (0, 1), and a shift.
The shift moves it towards noise, which large samples need: s' = shift s / (1 + (shift - 1) s).
Source: Esser et al. 2024, Scaling Rectified Flow Transformers (arXiv:2403.03206), 3.1 and 5.3.2.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strategies.base import BadInput

if TYPE_CHECKING:
    import torch
    from torch import Tensor


KINDS = ("uniform", "logit_normal", "mode")


@dataclass(frozen=True)
class Density:
    """``mean`` and ``std`` are those of the logit; ``scale`` is the mode density's, usually 0.8 to
    1.81."""

    density: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    scale: float = 1.29
    shift: float = 1.0

    def draw(self, generator: torch.Generator, count: int, device: torch.device | str) -> Tensor:
        """Sample noise levels in (0, 1), float32 [count]."""
        import torch

        if self.density == "logit_normal":
            normal = torch.randn(count, generator=generator, device=device)
            level = torch.sigmoid(self.mean + self.std * normal)
        else:
            level = torch.rand(count, generator=generator, device=device)
        if self.density == "mode":
            level = 1 - level - self.scale * (torch.cos(math.pi * level / 2).square() - 1 + level)
        return self.shift * level / (1 + (self.shift - 1) * level)


def check(objective: str) -> None:
    """Refuse an objective with impossible parameters.

    Raises:
        BadInput: names the parameter and a remedy.
    """
    kind, colon, text = objective.partition(":")
    if colon and kind != "flow":
        raise BadInput(f"objective is {objective!r}; {kind} takes no parameters, flow does")
    if kind == "flow":
        read(text)


def read(text: str) -> Density:
    """Parse ``density=logit_normal,shift=3`` into a density.

    Raises:
        BadInput: an unknown parameter or an impossible value.
    """
    names = {f.name for f in dataclasses.fields(Density)}
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise BadInput(f"flow has no parameter {name!r}; one of {', '.join(sorted(names))}")
        given[name] = value if name == "density" else _number(name, value)
    found = Density(**given)
    if found.density not in KINDS:
        raise BadInput(f"flow's density is {found.density!r}; one of {', '.join(KINDS)}")
    if found.std <= 0 or found.shift <= 0:
        raise BadInput(f"flow has std {found.std:g} and shift {found.shift:g}; both are above 0")
    return found


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BadInput(f"flow's {name} is {value!r}; write a number") from None
