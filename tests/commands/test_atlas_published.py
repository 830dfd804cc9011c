"""The published atlas: its cells are what the records and today's predictor say."""

from __future__ import annotations

import argparse
import csv
import html
import json
import os
import random
import re
import shutil
import subprocess

import pytest

from harness import ROOT
from harness.planner.atlas import page
from harness.planner.atlas.cells import HEADS, cells_at, shipped
from harness.planner.atlas.command import add_arguments, places_of

FOLDER = ROOT / "docs" / "atlas"
AGAIN = "./run.sh atlas --recorded --out docs/atlas"
LINES = page.from_csv(FOLDER / "atlas.csv")
PLACES = sorted({tuple(page.at(x, head) for head in ("Model", "GPUs", "Card")) for x in LINES})
SAMPLE = 8
"""Places (model, number and card) whose cells are made again; each takes about a second."""


def made_again(model: str, gpus: str, card: str) -> list[list[str]]:
    """The lines of a place, of recorded predictions alone."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--cards", card, "--gpus", gpus])
    cells = cells_at(places_of(model, options), shipped, 0)
    return [cell.texts for cell in cells if cell.complete]


@pytest.mark.parametrize(
    "place", random.Random(os.environ["TESTS_DAY"]).sample(PLACES, SAMPLE), ids=str
)
def test_a_sample_of_cells_is_what_the_predictor_says(place):
    told = [line for line in LINES if (line[0], line[2], line[3]) == place]
    assert HEADS[:4] == ("Model", "Training", "GPUs", "Card")
    found = [list(map(str, line)) for line in made_again(*place)]
    assert found == told, f"the predictor or its records moved {place}; run {AGAIN}"


def test_the_pages_are_those_of_the_table():
    texts = {"README.md": page.overview(LINES), "atlas.html": page.page(LINES)}
    models = page.values(LINES, "Model")
    texts |= {f"models/{name}.md": page.of_model(name, LINES) for name in models}
    for name, text in texts.items():
        assert (FOLDER / name).read_text("utf-8") == text, f"{name} is old; run {AGAIN}"
    stale = {file.name for file in (FOLDER / "models").iterdir()} - {f"{m}.md" for m in models}
    assert not stale, f"these models have no cell now: {stale}"
    with (FOLDER / "atlas.csv").open(newline="") as stream:
        assert len(list(csv.reader(stream))) == len(LINES) + 1


def test_the_atlas_is_small_and_names_the_command_that_makes_it():
    sizes = [file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(sizes) < 2**21
    for name in ("README.md", "atlas.html"):
        assert AGAIN in (FOLDER / name).read_text("utf-8")


ASKED = """<script>addEventListener('load', () => {
  const head = document.querySelector('th[data-sort="Needs GiB"]');
  const said = [];
  for (let turn = 0; turn < 2; turn += 1) {
    head.querySelector('button').click();
    const at = [...head.parentNode.children].indexOf(head);
    const cells = [...document.querySelectorAll('#rows tr')].map(row => row.children[at]);
    const values = cells.map(cell => parseFloat(cell.textContent)).filter(value => value > 0);
    said.push([head.getAttribute('aria-sort'), values]);
  }
  said.push(document.documentElement.scrollWidth);
  document.title = JSON.stringify(said);
});</script></body>"""
"""Click a head twice; tell the order of its cells, and the page's width."""


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
def test_a_head_sorts_and_a_phone_shows_the_page_whole(tmp_path):
    asked = tmp_path / "atlas.html"
    asked.write_text((FOLDER / "atlas.html").read_text("utf-8").replace("</body>", ASKED), "utf-8")
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=400,800"]
    done = subprocess.run(
        [*words, "--dump-dom", f"file://{asked}"], capture_output=True, text=True, timeout=120
    )
    told = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1]))
    (first, rising), (second, falling), width = told
    assert (first, second) == ("ascending", "descending") and len(rising) > 20
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
    assert width <= 500, "the least width that this browser gives a window"
