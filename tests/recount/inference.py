"""The tables of suites that draw samples: memory against samples, and the claims on inference.

A share of the peak, or of the weights, from which on a saving is a half 45 %, a quarter left 70 %;
quality is kept where 95 % of the samples are taken for what the reference's are, or where a
student's are recognised no more than 5 % seldomer than its teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tests.recount import drawn
from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.cells import MIB, Cell, Number, change, fault, percent
from tests.recount.lookup import Missing, Rows
from tests.recount.pages import Table
from tests.recount.raw import ResultSet, Row
from tests.recount.sweeps import HOLDS, NOT, ONLY, OPEN, Band, Judged, judged, said, share, swept
from tests.recount.sweeps import change as signed

__all__ = ["claims", "memory_against_samples"]

HALF, QUARTER, KEPT, ANY = 0.45, 0.7, 0.95, 0.05

# ---- memory against samples ----


def nearness(row: Row) -> float:
    return 0.0 if v.parity(row) in ("equal", "reference") else drawn.away(row)[0]


def on_front(row: Row) -> bool:
    """No other has both a smaller peak and samples that are as near; of an untraced row nobody
    knows."""
    able = [r for r in row.group.rows if (r.is_reference or drawn.away(r)) and not v.wrong(r)]
    able = [r for r in able if m.peak_bytes(r) is not None]
    if row not in able:
        return False
    point = (m.peak_bytes(row), nearness(row))
    others = [(m.peak_bytes(r), nearness(r)) for r in able]
    return not any(o != point and o[0] <= point[0] and o[1] <= point[1] for o in others)


def mib(take: Callable[[Row], int | None]) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        size = take(row)
        return None if size is None else Number(size / MIB, 0)

    return cell


def against(take: Callable[[Row], int | None]) -> Callable[[Row], Cell]:
    """The change to the reference."""

    def cell(row: Row) -> Cell:
        base, size = row.group.reference, take(row)
        return None if row is base or size is None else (change(size / take(base) - 1), " %")

    return cell


def pace(row: Row) -> Cell:
    if row.is_reference:
        return None
    found = v.ratio_cell(row, row.group.reference)
    return found if isinstance(found, str) else Number(found, 2)


def psnr(row: Row) -> Cell:
    found = drawn.away(row)
    return found and ("same" if found[2] == float("inf") else Number(found[2], 2))


def samples(row: Row) -> str:
    return drawn.cell(v.parity(row))(row)


STORED = m.category("parameters")
COLUMNS: dict[str, Callable[[Row], Cell]] = {
    "Recipe": lambda row: row.label,
    "Peak MiB": mib(m.peak_bytes),
    "Weights MiB": mib(STORED),
    "Peak vs ref": against(m.peak_bytes),
    "Weights vs ref": against(STORED),
    "Samples/s": lambda row: Number(m.samples_per_second(row), 0),
    "Speed x": pace,
    "Latency of one ms": lambda row: Number(1e3 * drawn.DRAWN["latency_seconds_median"](row)),
    "Samples": samples,
    "PSNR dB": psnr,
    "Recognised %": lambda row: percent(drawn.share(row)),
    "As reference's %": lambda row: percent(drawn.share(row, "taken_for")),
    "Front": lambda row: "front" if on_front(row) else None,
}


def memory_against_samples(table: Table, results: ResultSet) -> Iterator[str]:
    """Rows in the suite's order, of the reference's work."""
    rows, order = Rows(results), list(dict.fromkeys(results.suite["order"]))
    batch = results.ordered[0].reference.spec["global_batch"]
    if len(order) != len(table.lines):
        yield f"{len(table.lines)} lines, {len(order)} recounted"
    lines: list[dict[str, Cell]] = []
    for recipe in order:
        try:
            row = rows.get(recipe, global_batch=batch)
            lines.append({head: take(row) for head, take in COLUMNS.items()})
        except Missing as why:
            lines.append({"Recipe": recipe, "Front": str(why)})
    filled = [head for head in COLUMNS if any(line.get(head) is not None for line in lines)]
    if table.heads != filled:
        yield f"the heads are {table.heads}, {filled} recounted"
        return
    for printed, line in zip(table.lines, lines, strict=False):
        for head, text in zip(table.heads, printed, strict=True):
            wrong = fault(text, line.get(head))
            if wrong:
                yield f"{printed[0]}, {head}: {wrong}"


# ---- the claims ----


def saves(parts: Sequence[str], least: float) -> Callable[[Rows], Judged]:
    """Of the peak in 16 bits, at every batch at which that was measured."""

    def rule(rows: Rows) -> Judged:
        base = "single+bf16_pure"
        mine = (row.spec for row in rows.rows if row.recipe == base)
        at = tuple(sorted({s["global_batch"] for s in mine if s["model"] == rows.model}))
        if not at:
            raise Missing(f"{base} is not among the results")
        band = Band(least)
        found = {part: swept(rows, f"{base}+{part}", base, at) for part in parts}
        each = {part: judged(sweep, band, said(sweep, band)) for part, sweep in found.items()}
        numbers = ". ".join(f"{part}: {words[2]}" for part, words in each.items())
        held = {part: words for part, words in each.items() if words[0] != NOT}
        if all(words[0] == HOLDS for words in each.values()):
            return HOLDS, next(iter(each.values()))[1], numbers
        where = " and ".join(f"of {part} {words[1]}" for part, words in held.items())
        return (ONLY, where, numbers) if held else (NOT, "", numbers)

    return rule


def some_of(held: dict[str, bool], numbers: str) -> Judged:
    if all(held.values()):
        return HOLDS, "", numbers
    names = ", ".join(name for name, it_does in held.items() if it_does)
    return (ONLY, f"of {names}", numbers) if names else (NOT, "", numbers)


def stored(row: Row) -> int:
    size = STORED(row)
    if size is None:
        raise Missing(f"{row.label} was not traced")
    return size


def compresses(rows: Rows) -> Judged:
    saved = {}
    for bits in (8, 7, 6, 5, 4, 3, 2):
        try:
            saved[bits] = 1 - stored(rows.get(palette(bits))) / stored(rows.get("single"))
        except Missing as missing:
            why = missing
    if not saved:
        raise why
    texts = ", ".join(f"{signed(-part, -HALF)} in {bits} bits" for bits, part in saved.items())
    held = {f"{bits} bits": part >= HALF for bits, part in saved.items()}
    return some_of(held, f"all weights, embedders and last layer too: {texts}")


def palette(bits: int) -> str:
    """A value that is the usual one is left out."""
    return "single+palette" if bits == 4 else f"single+palette:bits={bits}"


def keep(*parts: str) -> Callable[[Rows], Judged]:
    def rule(rows: Rows) -> Judged:
        texts, held = [], {}
        for part in parts:
            row = rows.get(f"single+{part}")
            same = drawn.share(row, "taken_for")
            if same is None:
                raise Missing(f"what {row.label} drew was shown to no classifier, which knows "
                              "digits alone")  # fmt: skip
            held[part] = same >= KEPT
            texts.append(
                f"{part}: {share(same, KEPT)} of {row.spec['global_batch']} samples taken for the "
                f"same, {share(drawn.share(row))} for what was asked, {drawn.away(row)[0]:.1e} away"
            )
        return some_of(held, ". ".join(texts))

    return rule


def distilled(rows: Rows) -> Judged:
    kind = rows.model.partition(":")[0]
    others = [row for row in rows.rows if row.recipe == "single" and row.spec["weights"]]
    students = [r for r in others if r.spec["model"].partition(":")[0] == kind]
    students = [r for r in students if r.spec["model"] != rows.model]
    beside = [r for r in rows.rows if r.recipe.startswith("single+distilled:student=")]
    students = sorted(beside, key=lambda r: r.recipe)[:1] + students
    if not students:
        raise Missing(f"no student of {rows.model} with trained weights is among the results")
    student = students[0]
    teacher = rows.get("single", global_batch=student.spec["global_batch"])
    shares = [drawn.share(row) for row in (student, teacher)]
    file = student.recipe.partition("student=")[2]
    who = file or student.spec["model"]
    numbers = (
        f"{who}: {share(shares[0])} of {student.spec['global_batch']} samples "
        f"recognised, {share(shares[1])} of its teacher's; weights "
        f"{signed(stored(student) / stored(teacher) - 1)}, samples/s {rows.rates(student, teacher)}"
    )
    return HOLDS if shares[0] >= shares[1] - ANY else NOT, "", numbers


RULES: dict[str, Callable[[Rows], Judged]] = {
    "weights in 8 bits halve": saves(("int8", "float8"), HALF),
    "weights in 4 bits quarter": saves(("nf4", "palette"), QUARTER),
    "clustered weights": compresses,
    "weights in 8 bits keep": keep("int8", "float8", "palette:bits=8"),
    "weights in 4 bits keep": keep("nf4", "palette"),
    "weights in 3 bits and fewer": keep(
        "palette:bits=3", "palette:bits=3,rows=16", "palette:bits=2"
    ),
    "distillation": distilled,
}
"""How a claim begins -> its rule."""


def claims(table: Table, results: ResultSet) -> Iterator[str]:
    """Mismatches of the claims on inference."""
    rows = Rows(results)
    title = f"Claims on inference, measured on {rows.model}"
    if table.title != title:
        yield f"{table.title!r} is not {title!r}"
    if table.heads != ["#", "Claim", "Who says so", "Verdict", "Measured"]:
        yield f"the heads are {table.heads}"
        return
    if len(table.lines) != len(RULES):
        yield f"{len(table.lines)} claims, {len(RULES)} rules here"
    for number, (place, says, _, verdict, measured) in enumerate(table.lines, 1):
        rule = next((rule for name, rule in RULES.items() if says.startswith(name)), None)
        if rule is None:
            yield f"no rule here for the claim {says!r}"
            continue
        try:
            word, where, numbers = rule(rows)
        except Missing as why:
            word, where, numbers = OPEN, "", str(why)
        pairs = [(place, str(number)), (verdict, f"{word} {where}".strip()), (measured, numbers)]
        for text, cell in pairs:
            wrong = fault(text, cell)
            if wrong:
                yield f"claim {place}: {wrong}"
