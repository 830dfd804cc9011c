"""``plan --scale``: which rows a question makes, what it refuses, and the two ends of a time."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

import pytest

from harness import cli
from harness.planner import pool, verdict
from harness.planner.plan.command import add_arguments
from harness.planner.plan.scale import cells_of, forecast_row, of_nodes
from harness.planner.speed.rates import rates
from harness.prediction import Work, read_forecast
from harness.system import cards
from tests.made.predictions import asked, prediction
from tests.made.results import row, write_set

CARD = cards.find("H100-80GB")
HEAD = {"name": "scale", "story": "scale", "reference": "single"}


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--gpu", "H100-80GB", "--model", "DiT-T/4", *words])


def rows(*words: str) -> list[tuple[str, int, int]]:
    found = options(*words)
    return [(c.recipe, c.count, c.batch) for c in cells_of(found, found.recipes)]


def test_weak_keeps_the_samples_of_a_gpu_and_strong_those_of_a_step():
    of_ddp = ["--recipes", "ddp", "--scale", "8", "1", "64"]
    assert rows(*of_ddp) == [("single", 1, 32), ("ddp", 8, 256), ("ddp", 64, 2048)]
    strong = [("single", 1, 256), ("ddp", 8, 256), ("ddp", 64, 256)]
    assert rows(*of_ddp, "--regime", "strong") == strong
    both = rows(*of_ddp, "--regime", "both")
    assert len(both) == len(set(both)) == 5, "eight GPUs are the same row in both"
    given = ["--recipes", "zero3", "--scale", "2", "4", "--global-batch", "6"]
    assert rows(*given) == [("zero3", 2, 6), ("zero3", 4, 12)]


@pytest.mark.parametrize(
    ("recipe", "count", "wanted"),
    [("hsdp+bf16", 64, "hsdp:replicate=8+bf16"), ("hsdp+bf16", 8, "hsdp+bf16"),
     ("hsdp:replicate=4", 64, "hsdp:replicate=4"), ("zero3", 64, "zero3"),
     ("hsdp:reshard=off", 1024, "hsdp:reshard=off,replicate=128")],
)  # fmt: skip
def test_groups_of_which_nothing_is_said_are_nodes(recipe, count, wanted):
    from strategies import parse

    assert of_nodes(recipe, count) == parse(wanted).text


BAD = {
    "--scale 1 8 --gpus 8": "gpus is 8; --scale predicts named recipes on several numbers of GPUs",
    "--scale 1 8 --suite ladder": "leave --suite out",
    "--scale 1 8 --largest batch": "largest is batch; --scale predicts named recipes on several",
    "--scale 0 8": "scale is 0; give --scale numbers of GPUs from 1",
    "--scale 8 8": "give --scale at least two numbers, as 1 8 64",
    "--scale 8 12": "scale is 12, and nodes have 8; give --scale 8 or 16",
    "--scale 3 6 --global-batch 4": "which does not divide by 3 GPUs",
    "--scale 8 16 --recipes single": "single always trains on one GPU",
    "--claims x --scale 1 8": "scale is [1, 8]; --claims predicts the suite's own",
    "--claims x --model dit-xl/2": "x: its suite.json tells the story",
    "--claims x --model FLUX.1-dev": "model is flux-dev; --claims predicts the suite's",
    "--scale 1 8 --keep nowhere": "which has no results of the suite scale",
}


@pytest.mark.parametrize("words", BAD)
def test_what_does_not_go_together_is_refused_by_name(words, capsys):
    assert cli.main(["plan", "--gpu", "H100-80GB", *words.split()]) == 2
    assert BAD[words] in " ".join(capsys.readouterr().err.split())


def test_the_ends_of_a_time_hide_the_least_and_the_most():
    """One second of computing and one of sending beside it, of which 0.8 can hide behind it: links
    that are 1.5 times as slow leave more behind a card that is 1.35 times as quick."""
    rate = CARD.network_bandwidth
    work = [
        Work(phase="backward", kind="product", dtype="float32", count=1, bytes=1,
             flops=int(rates(CARD, 64).product("float32", depth=math.inf))),
        Work(phase="backward", kind="overlapped", dtype="", flops=0, count=1,
             bytes=int(rate * 64 / 63)),
    ]  # fmt: skip
    made = prediction(1, work=work)
    made = dataclasses.replace(made, steady=made.peak, beyond_state=1)
    fit = verdict.judge(asked("ddp", processes=64), made, CARD)
    assert fit.seconds.total == pytest.approx(1.2, rel=1e-3)
    slow_links, slow_card = verdict.at_the_ends(fit)
    assert slow_links == pytest.approx(1 / 1.35 + 1.5 - 0.8 / 1.35, rel=1e-3)
    assert slow_card == pytest.approx(1.35, rel=1e-3), "all of it is hidden"
    kept = forecast_row(fit, "ddp")
    assert kept.across_bytes == pytest.approx(rate, rel=1e-6) and kept.within_bytes == 0
    assert (kept.asked, kept.slow_links_seconds) == ("ddp", slow_links)


def test_a_thousand_gpus_are_predicted_and_kept_beside_the_results(tmp_path, capsys, monkeypatch):
    """Real traces of a tiny model; one row that cannot be, told with its reason."""
    scale = pytest.importorskip("harness.analyses.scale")
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path / "predictions")
    folder = tmp_path / "set"
    small = {"single": row("single", 9.0, global_batch=8), "ddp": row("ddp", 9.0, processes=2)}
    write_set(folder, small, HEAD)
    words = ["--model", "DiT-T/4:depth=2", "--gpu", "H100-80GB", "--recipes", "ddp", "hsdp"]
    scaled = ["--scale", "1", "8", "1024", "--regime", "both", "--keep", str(folder)]
    file = tmp_path / "told.json"
    assert cli.main(["plan", *words, *scaled, "--json", str(file)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Weak scaling, predicted for DiT-T/4:depth=2" in out and "Strong scaling" in out
    assert "Refused: ddp on 1024, hsdp on 1024: global_batch 256 does not divide" in out
    found = read_forecast(folder)
    assert json.loads(file.read_text())["node"] == found.node == 8
    rows_of = {(r.asked, r.spec.processes, r.spec.global_batch): r for r in found.rows}
    wide = rows_of["hsdp", 1024, 32 * 1024]
    assert wide.spec.recipe == "hsdp:replicate=128" and wide.fits
    assert wide.within_bytes > wide.across_bytes > 0, "a group is a node, which gathers weights"
    ddp = rows_of["ddp", 1024, 32 * 1024]
    assert (ddp.within_bytes, rows_of["ddp", 8, 256].across_bytes) == (0, 0)
    near, far = rows_of["ddp", 8, 256].within_bytes, ddp.across_bytes
    assert far / near == pytest.approx((1023 / 1024) / (7 / 8), rel=1e-3)
    # A rank draws noise for itself and its neighbours: as much as among eight.
    assert ddp.peak_bytes == rows_of["ddp", 8, 256].peak_bytes
    page = (folder / "report.md").read_text()
    assert (
        "Number of GPUs from which more do not pay" in page
        and "Weak scaling, predicted for" in page
    )
    assert scale.foretold_lines(found, "weak")[0].base.recipe == "single"
