"""``plan --check`` and ``plan --advise`` on made-up memory: codes, lines, moves."""

from __future__ import annotations

import dataclasses
import json
import shlex

import pytest

from harness import cli
from harness.planner import pool, uncertainty
from harness.prediction import Prediction
from harness.resolve import Resolved
from harness.spec import Spec
from harness.subjects.library import families
from tests import refill
from tests.made.predictions import FLUX as LORA
from tests.made.predictions import GIB, made_up
from tests.made.publics import MINIATURES

pytestmark = pytest.mark.usefixtures("sure")

FLUX = dataclasses.replace(LORA, recipe=f"{LORA.recipe}+checkpoint")


def need(row: Resolved) -> float:
    """GiB: weights and activations of a made-up model; what is sharded or offloaded is less."""
    weights = 20 if "frozen_weights" in row.launch.traits else 60
    weights /= 1 if row.launch.engine.place("parameters") == "device" else 4
    kept = 2 if "recomputes" in row.launch.traits else 16
    pixels = row.subject.space.height * row.subject.space.width / 128**2
    return weights + kept * pixels * row.micro_batch


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Predictions by ``need``, none of which ships; those of the labels in ``lost`` are none."""
    lost: set[str] = set()

    none = Prediction(recipe="", device="cuda", method="none", reason="hooks")
    made_up(monkeypatch, lambda row: none if str(row.recipe) in lost else need(row))
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # no sentence of an answer is folded
    return lost


def plan(memory: str, recipe: str, *more: str) -> int:
    words = ["plan", "--model", "flux-dev", "--gpu-memory", memory, "--recipes", recipe]
    return cli.main([*words, *more])


# ---- the guard ----


def test_a_guard_says_in_one_line_that_it_fits(world, capsys):
    assert plan("48GiB", FLUX.recipe, "--check") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"fits: flux-dev with {FLUX.recipe}, global batch 1, needs 22.7 (")
    assert " of 48.0 GiB (1 x 48 GiB), 25.3 GiB free, 22.0 of 256.0 GiB of host memory" in line


def test_a_guard_lets_nothing_by_that_its_range_leaves_open(world, capsys, monkeypatch):
    """The need itself would fit, by half a GiB."""
    monkeypatch.undo()
    known = uncertainty.Share("one GPU", 0.1, 9, 9, pooled=False)
    monkeypatch.setattr(uncertainty, "shares", lambda: dict.fromkeys(uncertainty.CLASSES, known))
    made_up(monkeypatch, lambda row: 22)
    assert plan("23GiB", FLUX.recipe, "--check") == 1
    line = capsys.readouterr().out
    assert line.startswith("tight on the GPU: ") and "needs 22.7 (20.4 to 25.0) of 23.0 GiB" in line
    assert plan("25GiB", FLUX.recipe, "--check") == 0


def test_a_guard_says_why_not_by_how_much_and_what_would(world, capsys):
    assert plan("24GiB", "single+bf16_pure+lora:rank=16", "--check") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "of 24.0 GiB (1 x 24 GiB), 12.7 GiB more than it has" in line
    assert "its peak: in forward: 18.0 GiB parameters, 18.0 GiB activations" in line
    assert "; fits: single+" in line and "checkpoint" in line and "images/s" in line


def test_a_guard_lets_nothing_by_that_nobody_can_say(world, capsys):
    world.add(FLUX.recipe)
    assert plan("48GiB", FLUX.recipe, "--check") == 1
    assert capsys.readouterr().out == f"not predicted: {FLUX.recipe}: hooks\n"
    assert plan("48GiB", FLUX.recipe) == 1, "a plan without any number is no success"
    assert "Nothing could be predicted" in capsys.readouterr().out
    words = ["plan", "--model", "flux-dev", "--gpu", "V100-32GB", "--recipes", "single+bf16"]
    assert cli.main([*words, "--check"]) == 1
    assert capsys.readouterr().out.startswith("cannot run: single+bf16: ")


# ---- advice ----


def test_advice_says_what_each_move_buys_and_where_it_begins_to_fit(world, capsys, tmp_path):
    file = tmp_path / "advice.json"
    recipe = "single+bf16_pure+lora:rank=16"
    assert plan("24GiB", recipe, "--advise", "--json", str(file)) == 0
    text = capsys.readouterr().out
    assert f"From {recipe}: no, needs 36.7 GiB, 12.7 GiB more than a GPU has" in text
    assert "It begins to fit with one move, the fastest first:" in text
    assert "recompute: checkpoint (22.7 GiB, time" in text
    found = json.loads(file.read_text())
    moved = {(move["knob"], move["to"]): move for move in found["moves"]}
    assert moved["recompute", "checkpoint"]["verdict"] == "fits"
    assert moved["rank", "rank=4"]["verdict"] == "no"


def test_advice_where_no_move_fits_goes_on_with_several(world, capsys):
    assert plan("6GiB", "single+bf16_pure+lora:rank=16", "--advise") == 0
    text = capsys.readouterr().out
    assert "No single move makes it fit." in text and "None is predicted to fit. Nearest: " in text


# ---- the plan of a public model ----


def test_adapters_and_all_weights_have_an_answer_each(world, capsys):
    words = ["plan", "--model", "flux-dev", "--gpu-memory", "24GiB", "--recipes"]
    recipes = ["single+bf16_pure+lora:rank=16", "zero3_offload+bf16+checkpoint"]
    assert cli.main([*words, *recipes]) == 0
    text = capsys.readouterr().out
    adapted = text.index("Adapters:\nNone is predicted to fit. Nearest: ")
    assert text.index("All weights:\nFastest predicted to fit: zero3_offload") > adapted
    assert "18.3 (18.3 to 18.3) of 24.0 GiB" in text
    assert cli.main([*words, recipes[1]]) == 0
    assert "All weights:" not in capsys.readouterr().out


def test_encoders_are_offered_and_counted(world, capsys):
    assert plan("48GiB", FLUX.recipe) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 x 48.0 GiB" in text and "Not counted: T5-XXL, CLIP-L, FLUX-VAE, 9.3 GiB" in text
    assert plan("48GiB", FLUX.recipe, "--also", "usual") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Needs includes what stays on each GPU beside the training: T5-XXL 8.9" in text
    assert "31.9 (31.9 to 31.9) of 48.0 GiB" in text and "Not counted" not in text
    assert "--also usual" in text.partition("./run.sh export")[2]


# ---- names as people type them ----


def spec_of(*words: str) -> Spec:
    """The spec of a plan's first row."""
    return refill.asked(shlex.join(["--gpu", "rtx 4090", *words])).resolved[0].spec


@pytest.mark.parametrize(("model", "recipe", "meant"), [
    ("dit-b/4", "ZeRO-3+half", ("DiT-B/4", "zero3+fp16")),
    ("FLUX.1-dev", "gradient_checkpointing", ("flux-dev", "single+checkpoint")),
])  # fmt: skip
def test_other_spellings_are_the_same_question(model, recipe, meant):
    spec = spec_of("--gpus", "1", "--model", model, "--recipes", recipe)
    assert (spec.model, spec.recipe) == meant


SPELT = {
    "flux-dev": ["--resolution", "1024x1024", "--text", "512"],
    "wan2.1-1.3b": ["--resolution", "480x832", "--frames", "81"],
    "pixart-sigma": ["--resolution", "1024"],
}


@pytest.mark.parametrize("model", SPELT)
def test_the_usual_size_spelt_out_is_the_same_question(model):
    """A spelt-out size was traced anew for a minute, and ``plan --from`` gives each size so."""
    usual = ["--model", model, "--recipes", "single+bf16"]
    assert spec_of(*usual) == spec_of(*usual, *SPELT[model])
    assert spec_of(*usual, *SPELT[model], "--resolution", "512").resolution == "512"


def test_every_preset_is_found_by_its_names_on_the_hub():
    for name, known in families.table().items():
        assert known.hub, name
        for other in (name, name.upper(), *known.hub, *(hub.lower() for hub in known.hub)):
            assert families.canonical(other) == name
    assert families.canonical("black-forest-labs/FLUX.1-Kontext-dev") not in families.table()


# ---- several numbers of GPUs, and several resolutions ----


def test_each_row_is_the_plan_of_its_number_and_one_that_cannot_be_is_told(
    tmp_path, monkeypatch, capsys
):
    def rows(*words: str) -> list[dict]:
        asked = ["--model", "DiT-T/4", "--gpu", "H100-80GB", "--recipes", "ddp", *words]
        assert cli.main(["plan", *asked, "--json", str(tmp_path / "told.json")]) == 0
        return json.loads((tmp_path / "told.json").read_text())["rows"]

    made_up(monkeypatch, lambda row: 5 + row.spec.processes / 1024)
    several = rows("--gpus", "8", "1024", "1")
    text = " ".join(capsys.readouterr().out.split())
    assert "Nothing above eight GPUs was ever compared with a measurement" in text
    asked = [(row["gpus"], row["recipe"], row["global_batch"]) for row in several]
    assert asked == [(1, "single", 32), (8, "ddp", 256), (1024, "ddp", 32 * 1024)]
    for row in several:
        (alone,) = rows("--gpus", str(row["gpus"]))
        assert alone == {name: row[name] for name in alone}
    assert len({row["need_bytes"] for row in several}) == 3
    first, second = rows("--global-batch", "8", "--gpus", "3", "8")
    assert "3 GPUs: global_batch 8 does not divide" in " ".join(capsys.readouterr().out.split())
    assert first["refused"] and (second["gpus"], second["recipe"]) == (8, "ddp")


def test_of_several_resolutions_the_largest_is_planned(monkeypatch, tmp_path, capsys):
    def need(row: Resolved) -> float:
        space = row.subject.space
        return space.height * space.width / 32 + space.text / 1024

    made_up(monkeypatch, need)
    file = tmp_path / "plan.json"
    words = ["plan", "--model", "qwen-image", "--set", MINIATURES["qwen-image"][0]]
    words += ["--recipes", "single+bf16_pure", "--resolution", "64,128,128x64", "--gpu-memory"]
    assert cli.main([*words, "24GiB", "--text", "5", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "qwen-image at 128x128, 5 tokens of text" in said and "Samples" not in said
    found = json.loads(file.read_text())
    assert [round(row["need_bytes"] / GIB, 1) for row in found["rows"]] == [8.7]
    assert cli.main([*words, "7GiB", "--check"]) == 1
