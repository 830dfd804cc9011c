"""The table of docs/reference/models.md: what a loss over a vocabulary holds, predicted again."""

from __future__ import annotations

import pytest

from harness import ROOT
from harness.planner import pool
from harness.resolve import resolve
from harness.spec import Spec

PAGE = ROOT / "docs/reference/models.md"
PARTS = {"full": "", "chunked": "+cross_entropy", "fused": "+cross_entropy:kind=fused"}


@pytest.mark.thorough
def test_the_peaks_are_what_is_predicted(tmp_path):
    said = {}
    for line in PAGE.read_text().partition("| vocabulary | full |")[2].splitlines()[2:]:
        if not line:
            break
        words, *mib, _ = line.strip("|").split("|")
        said[int(words.replace(",", ""))] = dict(zip(PARTS, map(int, mib), strict=True))
    spec = dict(objective="masked", data="synthetic", device="cuda", global_batch=16)
    asked = [(words, kind) for words in (8192, 131072) for kind in PARTS]
    rows = [
        resolve(Spec(recipe=f"single+bf16{PARTS[kind]}", model=f"DiT-B/2:tokens={words}", **spec))
        for words, kind in asked
    ]
    for (words, kind), found in zip(asked, pool.predict_all(rows, tmp_path), strict=True):
        assert found.steady.bytes / 2**20 == pytest.approx(said[words][kind], abs=1), kind
