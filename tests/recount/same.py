"""Whether two runs computed the same: five relative distances, what they are held to, the word.

As docs/explanation/noise-and-fairness.md ("The same computation?") states it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tests.recount import measures as m
from tests.recount.raw import Row, Run

KINDS = ("loss", "norm", "moment", "update", "average")
CURVES = {"loss": "losses", "norm": "grad_norms"}
EXACT = dict(zip(KINDS, (1e-5, 2e-5, 5e-5, 5e-4, 1e-2), strict=True))
"""Float32 on CPUs, the first 16 steps."""
WIDE = dict(zip(KINDS, (1e-3, 1e-3, 2e-2, 0.2, 0.2), strict=True))
EARLY, LATER, TIMES_APART = 16, 1e-3, 8
BF16, FP16, FP8 = 2**-8, 2**-11, 2**-4
ROUNDED = {"bf16": BF16, "bf16_master": BF16, "bf16_pure": BF16, "fp16": FP16, "tf32": FP16}
ROUNDED |= {"fp8": FP8}
"""Part -> the unit roundoff of its type."""
OTHER_STEP = ("sgd", "muon", "adafactor", "adam8bit", "adam4bit", "paged_adam8bit", "adamw_bf16")
OTHER_STEP += ("adam16bit", "came", "prodigy")
TRAINED_IN_PART = ("controlnet", "lora", "dora", "qlora", "head", "difffit")
DESIGN: dict[str, set[str]] = {
    **{name: {"rounding"} for name in ROUNDED},
    **{name: {"update"} for name in OTHER_STEP},
    **{name: {"gradients", "update"} for name in TRAINED_IN_PART},
    **{name: {"gradients"} for name in ("compress", "topk")},
    **{name: {"forward"} for name in ("prune", "prune_structured", "sparse24")},
}
DESIGN["bf16_pure"] = {"rounding", "update"}
DESIGN["qlora"] = {"gradients", "update", "forward"}
DESIGN["cast"] = {"forward"}
"""Part -> what it changes by design."""


# ---- distances ----


def curve_distance(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The largest step's abs(a - b) / abs(b)."""
    pairs = list(zip(ours, theirs, strict=False))
    if any(not (math.isfinite(a) and math.isfinite(b)) for a, b in pairs):
        return math.inf
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=None)


def step_distances(row: Row) -> list[float | None]:
    """The distance of each loss from the reference's."""
    pairs = zip(row.first["losses"], row.group.reference.first["losses"], strict=False)
    return [curve_distance([a], [b]) for a, b in pairs]


def sums(run: Run, kind: str) -> dict[str, list[float]]:
    return (run.data.get("projections") or {}).get(kind) or {}


def length(*vectors: Sequence[float]) -> float:
    """Of all of them as one vector."""
    return math.sqrt(sum(x * x for vector in vectors for x in vector))


def of_parts(row: Run, base: Run, kind: str) -> dict[str, float]:
    """Name -> the length of the difference of two vectors of sums over the base's; 1 where one
    has none. Less by as much as the name's moment is below a thousandth of all moments."""
    ours, theirs = sums(row, kind), sums(base, kind)
    found = {}
    for name in {**theirs, **ours} if ours and theirs else ():
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            found[name] = 1.0
            continue
        gap = length([x - y for x, y in zip(a, b, strict=True)])
        far = gap / max(length(b), 1e-12) if math.isfinite(gap) else math.inf
        found[name] = far * (1.0 if kind == "inputs" else weight(base, name))
    return found


def weight(base: Run, name: str) -> float:
    """1, or less for a parameter with next to no gradient."""
    moments = sums(base, "moment")
    few = length(*moments.values()) / 1000
    own = length(moments.get(name, []))
    return own / few if name in moments and own < few else 1.0


def moments_too_far(row: Run, base: Run, most: float) -> bool:
    """All moments as one vector, of a row that only rounds, in the early steps."""
    ours, theirs = sums(row, "moment"), sums(base, "moment")
    early = all(len(run.data["losses"]) <= EARLY for run in (row, base))
    if altered(row) != {"rounding"} or not (early and ours and theirs):
        return False
    pairs = [(ours.get(name, [0.0] * len(b)), b) for name, b in theirs.items()]
    gaps = [[x - y for x, y in zip(*pair, strict=True)] for pair in pairs]
    return length(*gaps) / max(length(*theirs.values()), 1e-12) > most


@functools.lru_cache(maxsize=2048)
def distances(row: Run, base: Run) -> dict[str, float]:
    """Kind -> the largest distance, of those that both have."""
    found = {kind: curve_distance(row.data[c], base.data[c]) for kind, c in CURVES.items()}
    for kind in KINDS[2:]:
        found[kind] = max(of_parts(row, base, kind).values(), default=None)
    return {kind: far for kind, far in found.items() if far is not None}


# ---- limits ----


def limits(reference: Row) -> dict[str, float]:
    """Kind -> the most that a row may be away from the reference."""
    first, *again = reference.runs
    if first.data["meter"] == "resident" and m.precision(reference) == "float32":
        late = min(len(run.data["losses"]) for run in reference.runs) > EARLY
        return EXACT | {kind: WIDE[kind] for kind in KINDS[2:] if late}
    if not again:
        return WIDE
    apart = [distances(run, first) for run in again]
    seen = {kind: TIMES_APART * max(a.get(kind, 0.0) for a in apart) for kind in KINDS}
    return {kind: min(max(EXACT[kind], seen[kind]), WIDE[kind]) for kind in KINDS}


def shares(row: Run, base: Run, most: dict[str, float]) -> dict[str, float]:
    """Kind -> distance as a share of its limit; of curves the worse of the early steps' and of
    all steps' of the later limit."""
    found = {kind: far / most[kind] for kind, far in distances(row, base).items()}
    for kind in CURVES.keys() & found.keys():
        early, whole = (curve_far(row, base, kind, steps) for steps in (EARLY, None))
        found[kind] = max(early / most[kind], whole / max(LATER, most[kind]))
    return found


def curve_far(row: Run, base: Run, kind: str, steps: int | None) -> float:
    ours, theirs = (run.data[CURVES[kind]][:steps] for run in (row, base))
    return curve_distance(ours, theirs) or 0.0


# ---- designs ----


def changing(run: Run) -> list[str]:
    return [p for p in run.spec["recipe"].split("+") if p.partition(":")[0] in DESIGN]


def design(run: Run) -> str:
    """The parts that change the computation."""
    return "+".join(changing(run)) if run.data["parity"] != "exact" else ""


def altered(run: Run) -> set[str]:
    return set().union(*(DESIGN[part.partition(":")[0]] for part in changing(run)))


def roundoff(run: Run) -> float:
    return max((ROUNDED.get(part.partition(":")[0], 0.0) for part in changing(run)), default=0.0)


def computation(row: Row) -> str:
    """Which of the computations that a 16-bit type names."""
    facts = m.types(row)
    weights = facts.get("parameters")
    if facts.get("compute_dtype") not in ("bfloat16", "float16") or not weights:
        return ""
    ran_in = {f["gathered_as"] for f in row.evidence.values() if f and "gathered_as" in f}
    if weights == "float32":
        return "autocast" if ran_in <= {"float32"} else "gathered in 16 bits"
    bare = facts.get("master") != "float32" and not row.first.get("drawn")
    return "16-bit weights without a master" if bare else "16-bit weights"


def other_work(row: Run, base: Run) -> bool:
    """Other first weights, or other inputs of the first step."""
    ours, theirs = (run.data["configs"].get("initial_weights") for run in (row, base))
    apart = any(far > 1e-6 for far in of_parts(row, base, "inputs").values())
    return bool(ours and theirs and ours != theirs) or apart


def too_far(row: Run, base: Run, most: dict[str, float]) -> bool:
    """Where nothing that the row changes explains it: the first loss; the first norm, unless it
    changes gradients; the early steps, where it only rounds."""
    alters = altered(row)
    steps = EARLY if alters <= {"rounding"} else 1
    kinds = ("loss",) if "gradients" in alters else ("loss", "norm")
    return any(curve_far(row, base, kind, steps) > most[kind] for kind in kinds)


# ---- verdicts ----


def verdict(row: Run, reference: Row) -> str:
    """The word for a run against the reference."""
    base, most = reference.runs[0], limits(reference)
    exact, base_exact = (run.data["parity"] == "exact" for run in (row, base))
    if not row.data["losses"] or not base.data["losses"] or (exact and not base_exact):
        return "not comparable"
    if other_work(row, base):
        return "DIFFERS"
    if exact:
        found = shares(row, base, most)
        equal = "equal" if "norm" in found else "equal losses"
        return equal if max(found.values()) <= 1 else "DIFFERS"
    if "forward" in altered(row) or not base_exact:
        return "by design"
    unit = roundoff(row)
    allowed = {"loss": max(most["loss"], 4 * unit), "norm": max(most["norm"], 16 * unit)}
    together = max(most["moment"], 8 * unit)
    far = too_far(row, base, allowed) or moments_too_far(row, base, together)
    return "beyond design" if far else "by design"


def beside(row: Row, other: Row) -> bool:
    """Return True if a row is apart from its sibling though nothing explains it: of one computation
    by an eighth of the roundoff in a loss, one in a norm, four in all moments together."""
    ours, theirs = row.runs[0], other.runs[0]
    if computation(row) != computation(other):
        return False
    unit, most = roundoff(ours), WIDE if other.group.gpu else EXACT
    allowed = {"loss": max(most["loss"], unit / 8), "norm": max(most["norm"], unit)}
    far = other_work(ours, theirs) or too_far(ours, theirs, allowed)
    return far or moments_too_far(ours, theirs, max(most["moment"], 4 * unit))
