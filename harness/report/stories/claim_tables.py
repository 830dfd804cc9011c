"""What the verdicts on claims were taken from: every sweep over batches, and every growth."""

from __future__ import annotations

from collections.abc import Sequence

from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.figures import fits, units
from harness.report.stories.claim_rules import Growth, growths
from harness.report.stories.claim_sweeps import (
    KINDS_OF_GRADIENTS,
    PLAIN,
    Sweep,
    batches,
    swept,
)
from harness.report.stories.claim_verdicts import points, spread_words

__all__ = ["sweeps", "tables"]

AGAINST_PLAIN = (
    *("checkpoint", "bf16", "bf16_pure", "accumulate:steps=4", "lora", "prune"),
    *("prune_structured", "backward:call=retain_graph", "backward:call=autograd_grad"),
)
AGAINST = {
    **{f"{PLAIN}+{part}": PLAIN for part in AGAINST_PLAIN},
    "single+bf16_pure+ema:place=none": "single+ema:place=none",
    **{f"ddp+{part}": "ddp" for part in KINDS_OF_GRADIENTS},
}
"""Recipe -> what it is compared with."""
SWEEPS_NOTE = (
    'Change of a step\'s peak against the recipe behind "to", at an equal global batch. Limit: '
    "what large batches tend to; +- in points."
)
GROWTHS_NOTE = (
    "The most that a step held at once beyond parameters, gradients, optimizer state and average, "
    "against blocks or tokens. The power is of all points; first and last: between the two "
    "first and the two last points."
)


def tables(rows: Rows) -> list[Grid]:
    """The sweeps and the growths; without what was not measured."""
    return [grid for grid in (_sweeps(rows), _growths(rows)) if grid.lines]


def sweeps(rows: Rows) -> dict[tuple[str, str], Sweep]:
    """(recipe, what it is compared with) -> its sweep, where there is one."""
    return {pair: sweep for pair in AGAINST.items() if (sweep := _or_none(rows, *pair))}


def _sweeps(rows: Rows) -> Grid:
    plain, at = _or_none(rows, PLAIN, PLAIN), batches(rows)
    lines = _plain_lines(plain, at) if plain else []
    lines += [_line(recipe, base, sweep, at) for (recipe, base), sweep in sweeps(rows).items()]
    columns = {f"batch {batch}": "percent" for batch in at}
    kinds = {"Recipe": "text", "to": "text", **columns, "Limit": "percent"}
    return text_grid("sweeps", "The peak over batches", kinds, lines, SWEEPS_NOTE)


def _or_none(rows: Rows, recipe: str, base: str) -> Sweep | None:
    try:
        return swept(rows, recipe, base)
    except Missing:
        return None


def _plain_lines(plain: Sweep, at: Sequence[int]) -> list[list[str]]:
    """Plain training's own peak, and what of it activations are."""
    peaks = {pair.at: units.gib(pair.base) for pair in plain.peaks}
    shares = {b: f"{units.one('percent', part)} %" for b, part in plain.shares.items()}
    return [
        [PLAIN, "its peak", *(peaks.get(b, units.NONE) for b in at), units.NONE],
        [PLAIN, "activations in it", *(shares.get(b, units.NONE) for b in at), units.NONE],
    ]


def _line(recipe: str, base: str, sweep: Sweep, at: Sequence[int]) -> list[str]:
    changes = {p.at: f"{units.one('change', -p.saved)} %" for p in sweep.peaks}
    limit = fits.limit(sweep.beyond)
    last = units.NONE
    if limit is not None:
        last = f"{units.one('change', -limit.value)} % ({points(limit.spread)})"
    return [recipe, base, *(changes.get(b, units.NONE) for b in at), last]


def _growths(rows: Rows) -> Grid:
    lines = []
    for growth in growths(rows):
        try:
            lines.append(_growth_line(growth, rows))
        except Missing:
            continue
    kinds = {"Recipe": "text", "Against": "text", "MiB": "text", "Power": "text"}
    kinds |= {"first": "ratio", "last": "ratio"}
    return text_grid("growths", "What memory beyond the state grows with", kinds, lines,
                     GROWTHS_NOTE)  # fmt: skip


def _growth_line(growth: Growth, rows: Rows) -> list[str]:
    sizes, power = growth.sizes(rows), growth.power(rows)
    cells = zip(sizes, units.column("mib", list(sizes.values())), strict=True)
    value = f"{units.one('ratio', power.value)} {spread_words(power.spread)}"
    ends = units.column("ratio", [power.first, power.last])
    mib = ", ".join(f"{cell} at {x}" for x, cell in cells)
    return [growth.recipe, growth.of, mib, value, *ends]
