"""What a recipe's memory beyond the state grows with: powers of depth and of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tests.recount.lookup import Missing, Rows, beyond_state, step_bytes
from tests.recount.sweeps import HOLDS, NOT, Judged, change, share, sided

__all__ = ["GROWTHS", "Power", "linear_in_tokens", "power", "root_of_depth", "sizes"]

Spec = dict[str, str]
ROOT = "single+checkpoint:every=sqrt"
DEEPEST, MOST = 36, 1024
MODELS = {"cpu": ("DiT-T", 4), "cuda": ("DiT-XL", 2)}
"""Device -> the model of its growths, and the side of a patch where its depth grows."""


def depths(rows: Rows) -> dict[int, Spec]:
    """Blocks -> what it is of."""
    name, patch = MODELS[rows.device]
    return {n: {"model": f"{name}/{patch}:depth={n}"} for n in (4, 9, 16, 25, DEEPEST)}


def tokens(rows: Rows) -> dict[int, Spec]:
    """Patches of a sample -> what it is of."""
    name, _ = MODELS[rows.device]
    return {
        (side // patch) ** 2: {"model": f"{name}/{patch}", "data": f"synthetic:{side}"}
        for patch, side in ((8, 64), (8, 96), (4, 64), (4, 96), (2, 64))
    }


GROWTHS = {
    ("single", "blocks"): depths,
    (ROOT, "blocks"): depths,
    ("single+attend", "tokens"): tokens,
    ("single", "tokens"): tokens,
}
NEAR = "cannot be told here:"
MUCH, MOST_ROOT, MOST_FORWARDS, LINEAR = 0.25, 0.7, 2.0, 1.1


@dataclass(frozen=True)
class Power:
    """The slope through the logarithms, its standard error, and between the ends' pairs."""

    value: float
    error: float | None
    first: float
    last: float

    def words(self, *limits: float) -> str:
        text = sided(self.value, limits, 2)
        if self.error is None:
            return f"{text} (of two points)"
        return f"{text} +- {'<0.001' if self.error < 0.001 else f'{self.error:.2g}'}"


def sizes(rows: Rows, recipe: str, specs: dict[int, Spec]) -> dict[int, int]:
    """Blocks or tokens -> the most beyond the state, where it was measured."""
    found, why = {}, Missing()
    for x, spec in specs.items():
        try:
            found[x] = beyond_state(rows.get(recipe, **spec))
        except Missing as missing:
            why = missing
    if len(found) < 2:
        raise why
    return found


def slope(points: list[tuple[float, float]]) -> tuple[float, float | None]:
    """Least squares, with the slope's standard error; none of two points."""
    n = len(points)
    x, y = (sum(values) / n for values in zip(*points, strict=True))
    square = sum((a - x) ** 2 for a, _ in points)
    found = sum((a - x) * (b - y) for a, b in points) / square
    left = sum((b - y - found * (a - x)) ** 2 for a, b in points)
    return found, math.sqrt(left / (n - 2) / square) if n > 2 else None


def power(found: dict[int, int]) -> Power:
    points = [(math.log(x), math.log(y)) for x, y in sorted(found.items())]
    return Power(*slope(points), slope(points[:2])[0], slope(points[-2:])[0])


def powers(rows: Rows, of: str) -> Iterator[Power]:
    for (recipe, name), specs in GROWTHS.items():
        if name == of:
            yield power(sizes(rows, recipe, specs(rows)))


def root_of_depth(rows: Rows) -> Judged:
    plain, root = powers(rows, "blocks")
    facts = rows.get(ROOT, **depths(rows)[DEEPEST]).evidence["checkpoint"]
    forwards = facts["block_forwards"]
    numbers = (
        "from 4 to 36 blocks memory beyond the state grows with depth to the power "
        f"{plain.words()} plain, {root.words(MOST_ROOT)} with sqrt; "
        f"{much_from(rows, depths(rows), ROOT, 'single', 'blocks')}; "
        f"{sided(forwards, [MOST_FORWARDS], 2)} forwards a block"
    )
    return (NOT, "", numbers) if forwards > MOST_FORWARDS else at_most(root, MOST_ROOT, numbers)


def linear_in_tokens(rows: Rows) -> Judged:
    naive, fused = powers(rows, "tokens")
    specs = tokens(rows)
    both = [rows.get(name, **specs[MOST]) for name in ("single", "single+attend")]
    ends = list(map(step_bytes, both))
    grown, batch = ends[0] / ends[1] - 1, both[0].spec["global_batch"]
    numbers = (
        "memory beyond the state grows with tokens to the power "
        f"{naive.words()} with the full score matrix, {fused.words(LINEAR)} with torch's fused "
        f"kernel; {change(grown)} at {MOST} tokens, "
        f"{much_from(rows, specs, 'single', 'single+attend', 'tokens')}, "
        f"all at batch {batch}"
    )
    return at_most(fused, LINEAR, numbers)


def at_most(found: Power, most: float, numbers: str) -> Judged:
    """The whole spread of a power, and its last points, must lie on one side."""
    low, high = (found.value + side * (found.error or 0.0) for side in (-1, 1))
    if low > most:
        return NOT, "", numbers
    if high > most:
        return NEAR, f"its power is within its spread of {most:g}", numbers
    if found.last > most:
        last = sided(found.last, [most], 2)
        return NEAR, f"between the last two points its power is {last}, above {most:g}", numbers
    return HOLDS, "", numbers


def much_from(rows: Rows, specs: dict[int, Spec], recipe: str, base: str, of: str) -> str:
    """Between which measured points a peak begins to be a quarter less."""
    saved = {}
    for x, spec in specs.items():
        try:
            ours, theirs = (step_bytes(rows.get(name, **spec)) for name in (recipe, base))
        except Missing:
            continue
        saved[x] = 1 - ours / theirs
    text = f"{share(MUCH)} of the peak saved"
    held = [x for x, part in saved.items() if part >= MUCH]
    if not held:
        return f"{text} nowhere up to {max(saved)} {of}"
    below = [x for x in saved if x < min(held)]
    since = f"between {max(below)} and {min(held)}" if below else str(min(held))
    return f"{text} from {since} {of} on"
