"""Largest resolution, number of frames and rank: on made-up memory, and two of them for real."""

from __future__ import annotations

import json

import pytest
from conftest import in_fork

from harness import cli
from harness.planner import edits, overhead, pool, search
from harness.planner.verdict import Fit, judge
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.system import cards
from strategies.base import BadInput, Slot
from tests.made.predictions import GIB, prediction

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("sure")]

CARD = cards.of_size(24 * GIB)
ROOM = 24 - overhead.fixed_overhead(CARD, 1).total / GIB
VIDEO = Spec(
    recipe="single+bf16_pure+lora:rank=16", model="wan2.1-1.3b", objective="flow", ema=0.0,
    data="synthetic", global_batch=1, processes=1, device="cuda",
)  # fmt: skip


def tokens(row: Resolved) -> int:
    """Elements of one channel of a sample's latent."""
    space = row.subject.space
    return space.frames * space.height * space.width


def by_rank(row: Resolved) -> float:
    return 4 + 0.05 * edits.adapter(row).rank


NEEDS = {
    "resolution": lambda row: 4 + 4e-5 * tokens(row),
    "frames": lambda row: 4 + 4e-5 * tokens(row),
    "rank": by_rank,
    "resident": lambda row: 10 + 0.6 * (30 - getattr(row.recipe.in_slot(Slot.SWAP), "blocks", 0)),
    "rank in lumps": lambda row: 4 + 0.64 * (edits.adapter(row).rank * 5 // 64),
}


@pytest.mark.parametrize("what", NEEDS)
def test_the_largest_and_its_neighbour_are_found(what):
    tried: list[Resolved] = []

    def ask(rows: list[Resolved]) -> list[Fit]:
        tried.extend(rows)
        return [judge(row, prediction(need(row)), CARD) for row in rows]

    row = resolve(VIDEO)
    need, what = NEEDS[what], what.partition(" ")[0]
    (one,) = search.search([row], search.SOUGHT[what]([row]), CARD, ask)
    assert one.exact and one.tried == len(tried) <= search.TRIES
    assert need(one.fits.resolved) <= ROOM < need(one.over.resolved)
    if what in ("resolution", "frames"):
        # What was asked for is tried first, and all else stays as it was.
        assert tokens(tried[0]) == tokens(row)
        sizes = [fields for fields, _ in row.subject.samples_up(what)]
        places = [next(i for i, fields in enumerate(sizes) if fields.items() <= vars(side).items())
                  for side in (one.fits.resolved.spec, one.over.resolved.spec)]  # fmt: skip
        assert places[1] == places[0] + 1
    fixed = "frames" if what == "resolution" else "height"
    assert getattr(one.fits.resolved.subject.space, fixed) == getattr(row.subject.space, fixed)


def test_a_sample_keeps_its_proportions_and_grows():
    sizes = resolve(VIDEO).subject.samples_up("resolution")
    assert ({"resolution": "480x832"}, 1.0) in sizes and sizes[0][0] == {"resolution": "16x32"}
    times = [more for _, more in sizes]
    assert times == sorted(set(times))
    square = resolve(Spec(recipe="ddp", model="DiT-XL/2", data="synthetic:32", device="cuda"))
    assert ({"data": "synthetic:64"}, 4.0) in square.subject.samples_up("resolution")
    assert not square.subject.samples_up("frames")


BAD = {
    "rank": (["--model", "flux-dev", "--recipes", "single+bf16"], "has no adapters"),
    "frames": (["--model", "flux-dev"], "takes one number of frames only"),
    "resident": (["--model", "flux-dev", "--recipes", "zero3+bf16"], "no block of zero3+bf16"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_size_that_is_not_there_is_refused(what, capsys, monkeypatch):
    monkeypatch.setattr(pool, "predict_all", lambda *a, **k: pytest.fail("something was started"))
    words, said = BAD[what]
    assert cli.main(["plan", "--gpu", "A100-80GB", *words, "--largest", what]) == 2
    caught = capsys.readouterr().err
    assert said in caught and len(caught.strip().splitlines()) == 1


def test_recipes_without_a_rank_are_named_beside_those_that_have_one(monkeypatch, capsys):
    monkeypatch.setattr(
        pool, "predict_all", lambda rows, folder, **more: [prediction(by_rank(r)) for r in rows]
    )
    words = ["plan", "--gpu-memory", "24GiB", "--model", "flux-dev", "--largest", "rank"]
    assert cli.main([*words, "--recipes", "single+bf16", "single+bf16+lora:rank=4"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    largest = f"rank {int((ROOM - 4) / 0.05)}"
    assert "Largest rank: flux-dev at 1024x1024" in text and largest in text
    assert "Encoding needs" in text, "the step is not the run"
    assert "refused single+bf16: single+bf16 has no adapters" in text
    with pytest.raises(BadInput, match="largest is rank"):
        search.refuse("rank", [resolve(Spec(recipe="ddp", model="DiT-S/4"))])


WORDS = (
    "--model wan2.1-1.3b --resolution 256x256 --frames 9 --set num_layers=5 --gpu-memory 1.78GiB "
    "--recipes single+bf16_pure+lora:rank=16"
)


def test_a_direct_plan_of_both_neighbours_says_the_same(tmp_path):
    """A real search, and plans of its two sizes that know nothing of it, by one process that loads
    its libraries once."""
    (tmp_path / "asked.json").write_text(json.dumps({"resident": WORDS.split()}))
    in_fork(tmp_path, "tests.children.searched", tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())["resident"]
    row, size = found["searched"], 1.78 * GIB
    assert row["exact"], row
    assert row["fits"]["need_bytes"] < row["over"]["need_bytes"]
    for side, direct, fits in zip(("fits", "over"), found["direct"], (True, False), strict=True):
        assert direct["need_bytes"] == row[side]["need_bytes"]
        assert (direct["need_high_bytes"] <= size) == fits
        assert direct["recipe"] == row[side]["recipe"]
