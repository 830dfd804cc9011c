"""What follows from a card's compute capability: kernels of attention, and what cannot run."""

from __future__ import annotations

import json
import re

import pytest

from harness import cli
from harness.planner import overhead, pool, verdict
from harness.planner.overhead import NoKernel, choose, preferred
from harness.system import capability, cards
from strategies.base import BadInput
from tests.made.predictions import GIB, asked, prediction

EVERY = {"flash", "efficient", "math", "cudnn"}


def test_a_card_s_attention_is_by_its_capability_or_what_torch_took_there():
    kinds = {"T4": "efficient", "A100-40GB": "flash", "H100-80GB": "cudnn", "MI300X": "flash"}
    assert {card: preferred(cards.find(card).capability) for card in kinds} == kinds
    took = {"attention": {"float16": "CUDNN_ATTENTION"}}
    assert (overhead.taken(took), overhead.taken({})) == ("cudnn", "flash")


@pytest.mark.parametrize(("name", "card"), [
    ("h100-pcie", "H100-PCIe"), ("h100-nvl-94gb", "H100-NVL"), ("a100-sxm4-80gb", "A100-80GB"),
    ("h200-sxm5-141gb", "H200-141GB"), ("gb200-nvl72", "GB200-186GB"), ("4090 24GB", "RTX-4090"),
    ("RTX4070Ti", "RTX-4070-Ti"), ("4070TiS", "RTX-4070-Ti-Super"),
    ("RTX PRO 6000 Blackwell", "RTX-PRO-6000"),
])  # fmt: skip
def test_a_card_has_many_spellings(name, card):
    assert cards.find(name).name == card


def test_every_card_is_found_by_its_own_and_its_device_s_name():
    devices = [one.device for one in cards.table().values()]
    for name, card in cards.table().items():
        assert [cards.find(some) for some in (name, name.lower())] == [card, card]
        assert cards.named(card.device, card.memory_bytes) == card
        assert devices.count(card.device) > 1 or cards.find(card.device) == card
    assert cards.parse_bytes("24GiB") == cards.parse_bytes("24") == 24 * GIB
    assert cards.parse_bytes("80GB") == 80 * 10**9


@pytest.mark.parametrize(("name", "words"), [
    ("A100", "is several cards; one of A100-40GB (39.4 GiB), A100-80GB (79.1 GiB)"),
    ("H100-96GB", "did you mean H100-80GB? Or give its memory, as --gpu-memory 96GiB"),
    ("A100-PCIE-40GB", "did you mean A100-40GB or A100-80GB? Or give its memory, as --gpu"),
    ("H200 NVL", "did you mean H200-141GB? Or give its memory"),
    ("4090 48GB", "did you mean RTX-4090? Or give its memory, as --gpu-memory 48GiB"),
    ("RTX 4080 Laptop GPU", "a laptop's card is slower"),
    ("RTX 6000", "did you mean RTX-A6000 or RTX-PRO-6000 or RTX-6000-Ada?"),
    ("24GB", "a size is given as --gpu-memory 24GB"), ("cuda", "./run.sh list cards"),
])  # fmt: skip
def test_a_name_of_no_card_or_several_is_answered_with_the_right_one(name, words):
    with pytest.raises(BadInput, match=re.escape(words)):
        cards.find(name)


def test_what_a_kernel_does_not_take_falls_to_the_next_that_is_allowed():
    assert choose("cudnn", "bfloat16", 256, False, EVERY) == "flash"
    assert choose("cudnn", "bfloat16", 320, False, EVERY) == "efficient"
    assert choose("flash", "bfloat16", 64, True, EVERY) == "efficient"
    assert choose("flash", "float32", 6, False, EVERY) == "math"
    assert choose("flash", "bfloat16", 64, False, {"cudnn"}) == "cudnn"
    assert choose("flash", "bfloat16", 64, False, EVERY - {"flash"}) == "efficient"
    for kind, only in (("efficient", "flash"), ("efficient", "cudnn")):
        with pytest.raises(NoKernel, match=f"{only} attention does not take float16 heads of 64"):
            choose(kind, "float16", 64, False, {only})
    with pytest.raises(NoKernel, match="no attention"):
        choose("flash", "float16", 64, False, set())


def test_a_backward_of_attention_holds_the_sum_of_dq():
    op, shapes = "aten._scaled_dot_product_{}_attention_backward.default", [[2, 16, 250, 72]] * 4
    assert overhead.scratch(op.format("cudnn"), shapes) == 4 * 2 * 16 * 250 * (72 + 1)
    # Flash's is padded to tiles of 128 rows and 32 channels.
    assert overhead.scratch(op.format("flash"), shapes) == 4 * 2 * 16 * 256 * (96 + 1)


ROWS = {row["name"]: row for row in json.loads(cards.TABLE.read_text())["gpus"]}


def test_a_card_s_memory_is_the_least_that_was_seen():
    for row in ROWS.values():
        seen = row["memory_seen"]
        seen = ROWS[seen[3:]]["memory_seen"] if seen.startswith("as ") else seen
        sizes = [float(size) for size in re.findall(r"(\d+\.\d{2,}) [A-Za-z]", seen)]
        sizes += [int(size) / 1024 for size in re.findall(r"(\d+) MiB", seen)]
        assert 0 <= min(sizes) - row["memory_gib"] < 0.011, row["name"]


@pytest.mark.parametrize("name", ROWS)
def test_a_card_s_peaks_follow_from_its_generation(name):
    """The rules of NVIDIA's white papers, by which the tables of others are made too."""
    row = ROWS[name]
    half, exact, known = row["fp16_tflops"], row["fp32_tflops"], row["capability"]
    new = known is None or known >= [8, 0]
    float8 = row["family"] in ("CDNA3", "CDNA4")
    if known is not None:
        float8 = not capability.shortfall("fp8", tuple(known), name)
    tensor = new and row["family"] not in ("RDNA3", "CDNA4")
    assert row["bf16_tflops"] == (half if new else None)
    assert row["fp8_tflops"] == (pytest.approx(2 * half, rel=0.015) if float8 else None)
    assert row["tf32_tflops"] == (pytest.approx(half / 2, rel=0.015) if tensor else None)
    if known in ([8, 6], [8, 9], [12, 0]):
        times = 2 if "GeForce" in row["device"] or name == "L20" else 4  # halved for export
        assert half == pytest.approx(times * exact, rel=0.015)


# ---- what a card cannot run ----


@pytest.mark.parametrize(("card", "recipe", "said"), [
    ("V100-16GB", "ddp+bf16", "bf16 needs compute capability 8.0; V100-16GB has 7.0 -> leave"),
    ("T4-16GB", "zero2+fp16+attend:kernel=flash", "flash attention needs compute capability"),
    ("A100-40GB", "ddp+fp8", "fp8 needs compute capability 8.9; A100-40GB has 8.0 -> use bf16"),
    ("A100-40GB", "ddp+fp8:emulate=on", ""), ("V100-16GB", "zero2+fp16", ""),
])  # fmt: skip
def test_what_a_card_is_too_old_for(card, recipe, said):
    found = verdict.lack_of(asked(recipe), cards.find(card))
    assert (said in found) if said else not found


def test_a_card_known_by_its_memory_alone_is_not_judged():
    for card in (cards.of_size(16 * GIB), cards.find("MI300X")):
        assert card.capability is None and verdict.lack_of(asked("ddp+fp8"), card) == ""
        assert "is unknown, so bf16" in verdict.assumed(card)
        assert "flash for 16 bits" in verdict.assumed(card)


def planned(monkeypatch, capsys, *words: str) -> tuple[str, list[str], list[str]]:
    """What a plan says, the recipes that were predicted, and the kinds of card for it."""
    tried, kinds = [], []

    def predict_all(rows, folder, *, kind, **more):
        tried.extend(str(row.recipe) for row in rows)
        kinds.append(kind)
        return [prediction(5) for _ in rows]

    monkeypatch.setattr(pool, "predict_all", predict_all)
    monkeypatch.setenv("COLUMNS", "120")  # room for every column
    assert cli.main(["plan", *words]) == 0
    return " ".join(capsys.readouterr().out.split()), tried, kinds


def test_what_cannot_run_is_a_row_and_no_answer(capsys, monkeypatch, tmp_path):
    file = tmp_path / "plan.json"
    words = ["--gpu", "V100-16GB", "--recipes", "ddp+bf16", "zero2", "zero2+bf16", "zero3"]
    words += ["--notes", "--json", str(file)]
    text, tried, kinds = planned(monkeypatch, capsys, *words)
    assert (tried, kinds) == (["zero2", "zero3"], ["efficient"])
    assert "ddp+bf16 cannot run" in text and "Fastest predicted to fit: zero2 " in text
    assert "Cannot run: ddp+bf16, zero2+bf16: bf16 needs compute capability 8.0" in text
    found = {row["recipe"]: row for row in json.loads(file.read_text())["rows"]}
    assert found["ddp+bf16"]["verdict"] == "cannot" and found["ddp+bf16"]["need_bytes"] is None
    assert found["zero2"]["verdict"] == "fits" and found["zero2"]["lack"] == ""
    text, tried, _ = planned(monkeypatch, capsys, "--gpu", "V100-16GB", "--recipes", "ddp+bf16")
    assert "None of these can run on this card" in text and not tried


@pytest.mark.parametrize(("card", "words", "old"), [
    ("T4", ["--model", "pixart-sigma"], True), ("T4", ["--gpus", "1", "2"], True),
    ("A100-80GB", ["--model", "pixart-sigma"], False),
])  # fmt: skip
def test_a_card_without_bfloat16_is_offered_float16(card, words, old, monkeypatch, capsys):
    text, tried, _ = planned(monkeypatch, capsys, "--gpu", card, *words)
    parts = {part for recipe in tried for part in recipe.split("+")}
    assert ("fp16" in parts, bool(parts & {"bf16", "bf16_pure"})) == (old, not old)
    assert "bf16" not in text if old else "fp16" not in text
