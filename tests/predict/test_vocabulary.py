"""The table of docs/reference/models.md: what a loss over a vocabulary holds, predicted again."""

from __future__ import annotations

import pytest

from harness import ROOT
from harness.planner import pool
from harness.resolve import resolve
from harness.spec import Spec

PAGE = ROOT / "docs/reference/models.md"
PARTS = {"full": "", "chunked": "+cross_entropy", "fused": "+cross_entropy:kind=fused"}


def table() -> dict[int, tuple[dict[str, int], float]]:
    """Vocabulary -> MiB by kind, and the share said to be saved."""
    head, rule, *rest = PAGE.read_text().partition("| vocabulary | full |")[2].splitlines()
    assert head.startswith(" chunked | fused | saved") and rule.startswith("|--:")
    rows = [line.strip("|").split("|") for line in rest[: rest.index("")]]
    found = {}
    for words, *numbers, saved in rows:
        mib = dict(zip(PARTS, map(int, numbers), strict=True))
        found[int(words.replace(",", ""))] = mib, float(saved.split()[0])
    return found


@pytest.mark.thorough
def test_the_peaks_are_what_is_predicted(tmp_path):
    spec = dict(objective="masked", data="synthetic", device="cuda", global_batch=16)
    asked = [(words, kind) for words in (8192, 131072) for kind in PARTS]
    rows = [
        resolve(Spec(recipe=f"single+bf16{PARTS[kind]}", model=f"DiT-B/2:tokens={words}", **spec))
        for words, kind in asked
    ]
    said = table()
    for (words, kind), found in zip(asked, pool.predict_all(rows, tmp_path), strict=True):
        assert found.steady.bytes / 2**20 == pytest.approx(said[words][0][kind], abs=1), kind
