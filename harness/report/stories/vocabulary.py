"""The story "vocabulary": what a loss without all logits saves of a step's peak, by vocabulary."""

from __future__ import annotations

import contextlib
import re

from harness.report.data.grid import Grid, text_grid
from harness.report.data.lookup import Missing, Rows
from harness.report.data.rows import Report
from harness.report.figures import units
from harness.report.stories import each

__all__ = ["MATTERS", "judged", "tables", "words_of"]

MATTERS = 0.10
"""Share of a peak from which on a saving counts."""
KINDS = {"Vocabulary": "text", **each.KINDS}


def tables(report: Report) -> list[Grid]:
    """Rows by vocabulary, each against the reference of its own; which save much is the note."""
    rows, lines = Rows(report), []
    saved: dict[str, dict[int, float]] = {}
    for words, model in sorted(_models(report).items()):
        for recipe in dict.fromkeys(report.suite.order):
            try:
                row, base = (rows.get(r, model=model) for r in (recipe, report.suite.reference))
            except Missing as missing:
                dashes = [units.NONE] * (len(KINDS) - 3)
                lines.append([f"{words:,}", recipe, *dashes, str(missing)])
                continue
            lines.append([f"{words:,}", *each.against(row, base)])
            with contextlib.suppress(Missing):  # of a row that was not traced no saving is known
                if row is not base:
                    share = rows.saved(recipe, report.suite.reference, model=model)
                    saved.setdefault(recipe, {})[words] = share
    return [text_grid("vocabulary", "Memory against vocabulary", KINDS, lines, _note(saved))]


def words_of(model: str) -> int:
    """The size of the vocabulary that a model's name says; 0 where it says none."""
    found = re.search(r"tokens=(\d+)", model)
    return int(found[1]) if found else 0


def _models(report: Report) -> dict[int, str]:
    """Vocabulary -> model, of every row that was begun."""
    specs = [row.spec for group in report.groups for row in group.rows]
    specs += [ended.result.spec for ended in report.unfinished]
    return {words_of(spec.model): spec.model for spec in specs}


def _note(saved: dict[str, dict[int, float]]) -> str:
    told = [f"{recipe} {judged(shares)}" for recipe, shares in saved.items()]
    return " ".join(
        [
            "Peak of one step. Saved and speed: against all logits at the same vocabulary. The "
            f"claim, that a loss without them saves memory (a share of {MATTERS:.0%} or more):",
            f"{'; '.join(told)}." if told else "nothing to judge it by was measured.",
        ]
    )


def judged(shares: dict[int, float]) -> str:
    """At which vocabularies a recipe saves enough, in words."""
    enough = sorted(words for words, share in shares.items() if share >= MATTERS)
    if not enough:
        return f"at no vocabulary up to {max(shares):,}"
    others = [words for words in shares if words not in enough]
    if not others:
        return f"at every vocabulary from {enough[0]:,} on"
    if max(others) < enough[0]:
        return f"from {enough[0]:,} words on, not at {max(others):,}"
    return f"at {', '.join(f'{words:,}' for words in enough)} words alone"
