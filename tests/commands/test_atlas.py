"""The atlas on made-up memory: its cells are the answers of plans."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from harness import cli
from harness.planner import overhead, pool
from harness.planner.atlas.command import HEADS, MOST
from harness.prediction import Prediction
from tests.made.predictions import made_up

WORDS = ["atlas", "--models", "flux-dev", "--cards", "RTX-4090", "80GiB", "--gpus", "1", "8"]


@pytest.fixture
def told(monkeypatch, tmp_path) -> list[str]:
    """Recipes that were predicted: 20 GiB of adapters, 60 of all weights, less where sharded."""
    asked: list[str] = []

    def of(row) -> float | Prediction:
        asked.append(str(row.recipe))
        if "qlora" in str(row.recipe):
            return Prediction(recipe="", device="cuda", method="none", reason="packed")
        larger = row.subject.data.sample_shape[0] / 4096 - 1
        need = (20 if "frozen_weights" in row.launch.traits else 60) + 2 * larger
        return need / (3 if "split_parameters" in row.launch.traits else 1)

    made_up(monkeypatch, of)
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path / "kept")  # no record counts
    return asked


def needed(gib: float, sharding: str) -> str:
    """The cell of a need: what the allocator reserves, and what stands beside it on any card."""
    return f"{gib + overhead.fixed_overhead(None, 1, sharding).total / 2**30:.1f}"


def need(cell: dict[str, str]) -> str:
    """GiB that the cell's recipe needs, as ``recipe_words`` tells it."""
    return cell["Recipes"].split(" ")[2]


def data(folder) -> dict:
    """What the script of the page in ``folder`` reads."""
    page = (folder / "atlas.html").read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.usefixtures("sure")
def test_each_cell_has_the_fastest_that_fits_and_its_recipes(told, tmp_path):
    assert cli.main([*WORDS, "--out", str(tmp_path)]) == 0
    given = data(tmp_path)
    assert given["heads"] == list(HEADS)
    rows = [dict(zip(given["heads"], line, strict=True)) for line in given["lines"]]
    cells = {(r["Training"], r["GPUs"], r["Card"]): r for r in rows}
    assert len(rows) == len(cells) == 2 * 2 * 2
    adapted, whole = cells["LoRA", "1", "RTX-4090"], cells["all weights", "1", "RTX-4090"]
    assert adapted["Fits"] == "yes" and "lora" in adapted["Recipe"]
    assert whole["Fits"] == "yes" and "zero3" in whole["Recipe"]
    alone = f"./run.sh plan --model flux-dev --gpus 1 --gpu RTX-4090 --recipes {whole['Recipe']}"
    assert whole["Command"] == alone and adapted["Sample"] == "1024x1024"
    assert "--gpu-memory 80GiB" in cells["LoRA", "8", "80GiB"]["Command"]
    needs = (needed(60, "single"), needed(20, "zero3"))
    assert need(cells["all weights", "1", "80GiB"]) in needs
    for cell in rows:
        recipes = [text.split(" ") for text in cell["Recipes"].split("; ")]
        assert {len(words) for words in recipes} == {len(given["figures"]) + len(given["words"])}
        first = dict(zip(given["figures"], recipes[0], strict=False))
        assert first["recipe"] == cell["Recipe"]
        assert len({words[0] for words in recipes}) == len(recipes) <= MOST
        assert cell["Export"].startswith(f"./run.sh export {cell['Recipe']} ")


def test_what_does_not_fit_is_the_nearest_and_marked(told, tmp_path):
    words = [*WORDS[:4], "12GiB", "--gpus", "1", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    given = data(tmp_path)
    fits, lacks = (dict(zip(given["heads"], line, strict=True)) for line in given["lines"])
    assert (fits["Fits"], lacks["Fits"]) == ("yes", "no")
    assert need(lacks) == needed(20, "zero3") and "zero3" in lacks["Recipe"]


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
@pytest.mark.usefixtures("sure")
def test_a_browser_answers_the_question_of_the_address(told, tmp_path):
    assert cli.main([*WORDS, "--out", str(tmp_path)]) == 0

    def shown(question: str) -> str:
        page = f"file://{tmp_path / 'atlas.html'}#{question}"
        words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", page]
        dom = subprocess.run(words, capture_output=True, text=True, timeout=120).stdout
        return re.search(r'<section id="answers".*?</section>', dom, re.DOTALL)[0]

    asked = "Model=flux-dev&Card=80GiB&GPUs=1&Training=all+weights"
    usual, small = shown(asked), shown(f"{asked}&host=8")
    lost = shown("Model=flux-dev&Card=80GiB&GPUs=1&Fits=no&host=8")
    assert "plan --model flux-dev --gpus 1 --gpu-memory 80GiB --host-memory 8GiB" in lost
    assert "flux-dev: all weights, 1 x 80GiB" in usual and usual.count("<article>") == 1
    assert 'class="f yes">fits' in usual and "--host-memory" not in usual
    assert 'class="f host">host: only' in small and small.count("--host-memory 8GiB") == 2
    assert shown("Model=none") == shown(""), "what is not there is not chosen"
