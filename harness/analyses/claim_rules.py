"""Claims that no sweep of batches decides: growth with depth or tokens, and running out of memory.

Each rule is a function of measured rows that returns a ``Judgement``. Powers are fitted to all
points; a verdict needs the whole spread of a power on one side of its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analyses import fits
from harness.analyses.claim_sweeps import (
    KINDS_OF_GRADIENTS,
    MUCH,
    PLAIN,
    Judgement,
    Sweep,
    Verdict,
    batches,
    change,
    number,
    points,
    share,
    spread_words,
    swept,
)
from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.figures import units
from harness.report.figures.units import gib
from harness.result import Status

DEPTHS = (4, 9, 16, 25, 36)
"""Square numbers, so that sqrt(L) blocks between two checkpoints is an integer."""
DEEP, TRAINED_DEEP = "DiT-T/4:depth={}", "DiT-XL/2:depth={}"
TOKENS = {
    ("DiT-T/8", "synthetic:64"): 64,
    ("DiT-T/8", "synthetic:96"): 144,
    ("DiT-T/4", "synthetic:64"): 256,
    ("DiT-T/4", "synthetic:96"): 576,
    ("DiT-T/2", "synthetic:64"): 1024,
}
"""Model and data -> tokens of a sample."""
TRAINED_TOKENS = {(m.replace("DiT-T", "DiT-XL"), data): n for (m, data), n in TOKENS.items()}
"""The same at DiT-XL's width, for the suite's rows on a GPU."""
MOST_ROOT, MOST_FORWARDS, LINEAR = 0.7, 2.0, 1.1
ROOT = "single+checkpoint:every=sqrt"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The growth of a recipe's memory beyond the state with ``of`` (blocks or tokens).

    ``fields``: number of blocks or tokens -> the spec fields of its row.
    """

    recipe: str
    of: str
    fields: dict[int, dict[str, str]]

    def sizes(self, rows: Rows) -> dict[int, int]:
        """Return blocks or tokens -> bytes beyond the state, for each measured row.

        Raises:
            Missing: fewer than two rows were measured; has the reason of the last.
        """
        sizes, why = {}, Missing()
        for x, fields in self.fields.items():
            try:
                sizes[x] = rows.beyond_state(self.recipe, **fields)
            except Missing as missing:
                why = missing
        if len(sizes) < 2:
            raise why
        return sizes

    def power(self, rows: Rows) -> fits.Power:
        """Return the power of the growth, fitted to all points."""
        sizes = self.sizes(rows)
        return fits.power(list(sizes), list(sizes.values()))


def _growths(deep: str, tokens: Mapping[tuple[str, str], int]) -> tuple[Growth, ...]:
    """Return plain and sqrt(L) checkpointing over depth, full-score and plain attention over
    tokens.
    """
    blocks = {d: {"model": deep.format(d)} for d in DEPTHS}
    patches = {n: {"model": model, "data": data} for (model, data), n in tokens.items()}
    of_depth = [Growth(recipe=r, of="blocks", fields=blocks) for r in ("single", ROOT)]
    pair = ("single+attend", "single")
    return (*of_depth, *(Growth(recipe=r, of="tokens", fields=patches) for r in pair))


GROWTHS = {"cpu": _growths(DEEP, TOKENS), "cuda": _growths(TRAINED_DEEP, TRAINED_TOKENS)}
"""Device -> growths of the suite's rows on it."""


def growths(rows: Rows) -> tuple[Growth, ...]:
    """Return the growths of these rows' models."""
    return GROWTHS[rows.device or "cpu"]


def root_of_depth(rows: Rows) -> Judgement:
    depths = growths(rows)[:2]
    plain, root = (growth.power(rows) for growth in depths)
    deepest = DEPTHS[-1]
    facts = rows.get(ROOT, **depths[1].fields[deepest]).first.evidence.get("checkpoint", {})
    forwards = facts.get("block_forwards")
    if forwards is None:
        raise Missing(f"how often {ROOT} ran a block is not known")
    numbers = (
        f"from {DEPTHS[0]} to {deepest} blocks memory beyond the state grows with depth "
        f"to the power {power_words(plain)} plain, {power_words(root, MOST_ROOT)} with "
        f"sqrt ({much_from(rows, *reversed(depths))}); {number(forwards, MOST_FORWARDS)} "
        "forwards a block"
    )
    if forwards > MOST_FORWARDS:
        return Judgement(Verdict.NOT, numbers)
    return at_most(root, MOST_ROOT, numbers)


def linear_in_tokens(rows: Rows) -> Judgement:
    tokens = growths(rows)[2:]
    naive, fused = (growth.power(rows) for growth in tokens)
    most, largest = max(tokens[1].fields.items())
    saved = rows.saved("single", "single+attend", **largest)
    numbers = (
        f"memory beyond the state grows with tokens to the power {power_words(naive)} with the "
        f"full score matrix, {power_words(fused, LINEAR)} with torch's fused kernel; "
        f"{change(-saved)} at {most} tokens, {much_from(rows, *reversed(tokens))}, all at "
        f"batch "
        f"{rows.get('single', **largest).spec.global_batch}"
    )
    return at_most(fused, LINEAR, numbers)


def at_most(power: fits.Power, most: float, numbers: str) -> Judgement:
    """Judge if a power is ``most`` or less.

    The verdict stays open if the power is within its spread of the limit, or if the last two
    points grow faster than the limit.
    """
    spread = power.spread or 0.0
    if power.value - spread > most:
        return Judgement(Verdict.NOT, numbers)
    if power.value + spread > most:
        return Judgement(Verdict.NEAR, numbers, f"its power is within its spread of {most:g}")
    if power.last > most:
        ends = f"between the last two points its power is {number(power.last, most)}"
        return Judgement(Verdict.NEAR, numbers, f"{ends}, above {most:g}")
    return Judgement(Verdict.HOLDS, numbers)


def much_from(rows: Rows, ours: Growth, base: Growth) -> str:
    """Return the measured points between which a step's peak starts to be smaller by ``MUCH``.

    No value between two points is named: unlike with the batch, a peak is not linear in depth
    or tokens.
    """
    pairs = []
    for x, fields in ours.fields.items():
        try:
            sizes = [rows.step_bytes(growth.recipe, **fields) for growth in (ours, base)]
        except Missing:
            continue
        pairs.append(fits.Pair(at=x, ours=sizes[0], base=sizes[1]))
    held = [pair.at for pair in pairs if pair.saved >= MUCH]
    missed = [pair.at for pair in pairs if pair.saved < MUCH]
    text = f"{share(MUCH)} of the peak saved"
    if not held:
        return f"{text} nowhere up to {max(missed)} {ours.of}"
    below = [x for x in missed if x < min(held)]
    since = f"between {max(below)} and {min(held)}" if below else f"{min(held)}"
    return f"{text} from {since} {ours.of} on"


def power_words(power: fits.Power, *limits: float) -> str:
    """Return a power and its spread."""
    return f"{number(power.value, *limits)} {spread_words(power.spread)}"


def paged(rows: Rows) -> Judgement:
    """Judge only if the same optimizer without pages ran out of memory.

    The allocator's peaks cannot decide: bitsandbytes allocates the moments by the driver
    (cudaMallocManaged), so torch never counts them, wherever their pages are.
    """
    names = plain, pages = "single+adam8bit", "single+paged_adam8bit"
    large = batches(rows)[-1]
    ends = {name: rows.status(name, global_batch=large) for name in names}
    if ends[plain] is Status.GPU_OOM and ends[pages] in (Status.OK, Status.GPU_OOM):
        fits = ends[pages] is Status.OK
        outcome = "trained" if fits else "ran out of memory too"
        numbers = f"at batch {large} {plain} ran out of memory, {pages} {outcome}"
        return Judgement(Verdict.HOLDS if fits else Verdict.NOT, numbers)
    # The device's own count includes pages of managed memory on it.
    rest = [rows.get(name, global_batch=large).numbers for name in reversed(names)]
    used = [found.process_peak_bytes for found in rest]
    return Judgement(
        Verdict.OPEN,
        f"both fit at batch {large}, so that no page had to leave the device; it had "
        f"{gib(used[0])} in use with pages, {gib(used[1])} without. ./run.sh max-batch of "
        "each tells whether pages let more fit",
    )


AGAINST_PLAIN = (
    *("checkpoint", "bf16", "bf16_pure", "accumulate:steps=4", "lora", "prune"),
    *("prune_structured", "backward:call=retain_graph", "backward:call=autograd_grad"),
)
AGAINST = {
    **{f"{PLAIN}+{part}": PLAIN for part in AGAINST_PLAIN},
    "single+bf16_pure+ema:place=none": "single+ema:place=none",
    **{f"ddp+{part}": "ddp" for part in KINDS_OF_GRADIENTS},
}
"""Recipe -> its base of comparison."""
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
    """Return the sweeps and the growths, without those that were not measured."""
    return [grid for grid in (_sweeps(rows), _growths_grid(rows)) if grid.lines]


def sweeps(rows: Rows) -> dict[tuple[str, str], Sweep]:
    """Return (recipe, base) -> its sweep, if measured."""
    return {pair: sweep for pair in AGAINST.items() if (sweep := _or_none(rows, *pair))}


def _sweeps(rows: Rows) -> Grid:
    plain, at = _or_none(rows, PLAIN, PLAIN), batches(rows)
    lines = []
    if plain:
        peaks = {pair.at: units.gib(pair.base) for pair in plain.peaks}
        shares = {b: f"{units.one('percent', part)} %" for b, part in plain.shares.items()}
        for what, cells in (("its peak", peaks), ("activations in it", shares)):
            lines.append([PLAIN, what, *(cells.get(b, units.NONE) for b in at), units.NONE])
    lines += [_line(recipe, base, sweep, at) for (recipe, base), sweep in sweeps(rows).items()]
    columns = {f"batch {batch}": "percent" for batch in at}
    kinds = {"Recipe": "text", "to": "text", **columns, "Limit": "percent"}
    return text_grid("sweeps", "The peak over batches", kinds, lines, SWEEPS_NOTE)


def _or_none(rows: Rows, recipe: str, base: str) -> Sweep | None:
    try:
        return swept(rows, recipe, base)
    except Missing:
        return None


def _line(recipe: str, base: str, sweep: Sweep, at: Sequence[int]) -> list[str]:
    changes = {p.at: f"{units.one('change', -p.saved)} %" for p in sweep.peaks}
    limit = fits.limit(sweep.beyond)
    last = units.NONE
    if limit is not None:
        last = f"{units.one('change', -limit.value)} % ({points(limit.spread)})"
    return [recipe, base, *(changes.get(b, units.NONE) for b in at), last]


def _growths_grid(rows: Rows) -> Grid:
    lines = []
    for growth in growths(rows):
        try:
            sizes, power = growth.sizes(rows), growth.power(rows)
        except Missing:
            continue
        cells = zip(sizes, units.column("mib", list(sizes.values())), strict=True)
        mib = ", ".join(f"{cell} at {x}" for x, cell in cells)
        value = f"{units.one('ratio', power.value)} {spread_words(power.spread)}"
        ends = units.column("ratio", [power.first, power.last])
        lines.append([growth.recipe, growth.of, mib, value, *ends])
    kinds = {"Recipe": "text", "Against": "text", "MiB": "text", "Power": "text"}
    kinds |= {"first": "ratio", "last": "ratio"}
    title = "Growth of memory beyond the state"
    return text_grid("growths", title, kinds, lines, GROWTHS_NOTE)
