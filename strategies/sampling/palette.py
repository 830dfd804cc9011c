"""palette: weight clustering, with each weight an index into a palette of a few values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from strategies.base import demand
from strategies.engine import RunContext, TrainingRun
from strategies.sampling.quantised import Stored
from strategies.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Palette(Stored):
    """The blocks' linear weights as indices into palettes.

    Indices have ``bits`` bits and are packed. k-means chooses the palettes: one a matrix, or one
    for each ``rows`` of its rows.
    """

    name: ClassVar[str] = "palette"
    source: ClassVar[str] = (
        "Han et al. 2015, Deep Compression (arXiv:1510.00149), 3; Lloyd 1982; after coremltools' "
        "palettization"
    )
    least: ClassVar[dict[str, int]] = {"rows": 1}
    ranges: ClassVar[dict[str, Any]] = {
        "bits": (lambda v: v in range(2, 9), "a whole number from 2 to 8")
    }

    bits: int = 4
    rows: int = 0

    def refuses(self, launch: RunContext) -> str | None:
        width = launch.subject.survey.width
        if self.rows and width % self.rows:
            return (
                f"rows is {self.rows}, which does not divide matrices of a width of {width}; take "
                "a divisor of it, or leave rows out"
            )
        return super().refuses(launch)

    @property
    def bits_each(self) -> int:
        return self.bits

    def store(self, module: Any, subject: Subject, names: list[str]) -> None:
        from strategies.sampling.palettes import PaletteLinear

        for name in names:
            layer = PaletteLinear(module.get_submodule(name), self.bits, self.rows)
            module.set_submodule(name, layer)

    def evidence(self, run: TrainingRun) -> dict[str, Any]:
        from strategies.sampling.palettes import PaletteLinear

        found = [m for m in run.module.modules() if isinstance(m, PaletteLinear)]
        bits = {layer.bits for layer in found}
        text = f"indices have {sorted(bits) or 'no'} bits, expected {self.bits}"
        demand(bits == {self.bits}, text)
        return super().evidence(run)
