"""Phases of a training beside its step: loading, encoding and validation in a plan's needs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from conftest import traced

from harness import ROOT, cli
from harness.phases import planned, planned_text
from harness.planner import overhead, pool, resident_models, verdict
from harness.planner.tracing import phases as asides
from harness.prediction import Aside, Work
from harness.resolve import resolve
from harness.spec import Spec, SpecError
from harness.system import cards, requirements
from tests.made.predictions import GIB, made_up, prediction

CARD = cards.of_size(80 * GIB)
FLUX = Spec(
    recipe="single+bf16_pure+lora:rank=16", model="flux-dev", objective="flow", data="synthetic",
    global_batch=1, device="cuda", ema=0.0,
)  # fmt: skip
PARAMETERS = 11901408320
ASIDES = {
    name: Aside(weights=9 * GIB, allocated=2 * GIB, reserved=3 * GIB, what="a pass")
    for name in ("encode", "validate")
}


def fit(phases: str, gpu=CARD, beside=ASIDES, **change) -> verdict.Fit:
    """A step that reserves 30 GiB, of which 20 stay between steps, 16 of them parameters."""
    resolved = resolve(dataclasses.replace(FLUX, phases=phases, **change))
    made = prediction(32, reserved=30 * GIB, between=20 * GIB, denoising=21 * GIB, asides=beside)
    host = dataclasses.replace(made.host, bytes=10 * GIB)
    return verdict.judge(resolved, dataclasses.replace(made, steady=made.peak, host=host), gpu)


def beyond_step(found: verdict.Fit, phase: str) -> float:
    """GiB that a phase needs of a GPU more than the step."""
    return round((found.phases[phase].gpu - found.phases["step"].gpu) / GIB, 3)


# ---- what is counted ----


def test_the_need_is_the_largest_of_the_phases_and_the_largest_binds():
    found = fit("encode:alone,validate")
    assert list(found.phases) == ["encode", "step", "validate"], "in the order in which they come"
    assert beyond_step(found, "validate") == 20 + 9 + 3 - 30
    assert found.binds == "validate" and found.need_bytes == found.phases["validate"].gpu
    alone = fit("")
    assert list(alone.phases) == ["step"] and alone.need_bytes == alone.phases["step"].gpu
    assert (found.uncertainty.kind, alone.uncertainty.kind) == ("beside the step", "one GPU")
    assert fit("encode:alone").binds == "step"


@pytest.mark.parametrize(("way", "held"), [("alone", 0), ("loaded", 16), ("step", 20)])
def test_encoders_are_alone_or_beside_what_the_training_holds_by_then(way, held):
    assert beyond_step(fit(f"encode:{way}"), "encode") == held + 9 + 3 - 30


def test_encoding_in_the_step_takes_its_time_in_each_micro_batch():
    """As a trainer does that encodes texts and images in each step (DiffSynth-Studio, sft)."""
    passes = [Work(phase="encode", kind="product", dtype="float32", flops=10**12, bytes=1, count=1)]
    encode = dataclasses.replace(ASIDES["encode"], work=passes)

    def seconds(phases: str, recipe: str = FLUX.recipe) -> float:
        beside = {**ASIDES, "encode": encode}
        return fit(phases, recipe=recipe, global_batch=4, beside=beside).seconds.total

    step = seconds("")
    assert seconds("encode:loaded") == seconds("encode:alone") == step
    assert seconds("encode:step") == pytest.approx(2 * step), "a pass as long as the step"
    four = seconds("encode:step", f"{FLUX.recipe}+accumulate:steps=4")
    assert four == pytest.approx(5 * step)


@pytest.mark.parametrize(("phases", "recipe", "host", "card"), [
    ("load", "ddp+bf16", 8 * 2, 0), ("load:rank0", "fsdp2+bf16", 2, 0),
    ("load", "zero3+bf16", 8 * 2, 2), ("load:fp32", "zero2", 8 * 4, 4),
    ("load:fp32+card", "zero3+bf16", 8 * 4, 4),
])  # fmt: skip
def test_loading_fills_host_memory_in_each_process_and_deepspeed_a_whole_model_on_each_gpu(
    phases, recipe, host, card
):
    """Of 16 GPUs, eight of them in each of two nodes: bytes a parameter."""
    found = fit(phases, recipe=recipe, processes=16, global_batch=16).phases
    assert found["load"].host == host * PARAMETERS
    other = found["step"].gpu - 30 * GIB
    assert found["load"].gpu - other == card * PARAMETERS


def test_a_host_that_cannot_load_is_short():
    little = dataclasses.replace(CARD, host_memory=30 * GIB)
    assert [fit(way, little).verdict for way in ("load:rank0", "load:fp32")] == ["fits", "host"]


# ---- passes, traced ----

PUBLIC = yaml.safe_load((ROOT / "docs/public-phases.yaml").read_text())
PASSES = [row for row in PUBLIC if "pass" in row]
VAES = [name for name, row in resident_models.table().items() if "latent" in row]
LENGTHS = {"MiniMax-H3-VAE": 22, "Qwen-Image-2.1-VAE": 1}
"""Frames of a sample where a VAE's lengths are 5 and multiples of 17 more, or an image's alone."""


@pytest.mark.thorough
@pytest.mark.parametrize("row", PASSES, ids=lambda row: row["name"])
def test_a_pass_that_others_measured_is_predicted(row):
    """As on record; the page says how far each is off."""
    name, how, *size = row["pass"]
    asked = (tuple(size), row.get("text", 0), False, False, overhead.USUAL)
    reserved = asides.passed(name, how, *asked).reserved
    weights = 2 * resident_models.table()[name]["elements"] * row.get("weights", True)
    assert (reserved + weights) / GIB == pytest.approx(row["predicted"], rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("name", VAES)
def test_every_vae_decodes_a_sample_of_the_models_that_bring_it(name):
    _, every, down = resident_models.table()[name]["latent"]
    frames = LENGTHS.get(name, 1 + every)
    size = (1, frames if frames > 2 else 1, 4 * down, 4 * down)
    for how in ("encode", "decode"):
        found = asides.passed(name, how, size, 0, False, False, overhead.USUAL)
        assert found.allocated > 0 and any(one.kind == "product" for one in found.work)


@pytest.mark.thorough
def test_a_plan_s_prediction_has_what_its_phases_need(tmp_path):
    small = dict(vars(FLUX), set="num_layers=1,num_single_layers=1", resolution="256")
    phases = "encode:loaded,validate:encoders"
    alone, both = traced("predicted", [small, {**small, "phases": phases}], tmp_path)
    for name in ("reserved", "least", "between", "steady", "work", "phases"):
        assert both[name] == alone[name], "the step is what it is without them"
    assert alone["denoising"] is None and alone["asides"] == {}
    assert both["between"] < both["denoising"] < both["steady"]["bytes"]
    weights = {
        name: 2 * resident_models.table()[name]["elements"]
        for name in resident_models.usual_of("flux-dev")
    }
    assert {one["weights"] for one in both["asides"].values()} == {sum(weights.values())}
    assert both["asides"]["validate"]["what"] == "FLUX-VAE decodes 256x256"


# ---- asked for ----

WORDS = ["plan", "--gpu", "RTX-4090", "--recipes", "single+bf16_pure+lora:rank=16"]


@pytest.mark.parametrize(("words", "phases"), [
    ([], ""), (["validate", "load"], "load,validate"), (["encode:tiled+step"], "encode:step+tiled"),
    (["encode", "--also", "T5-XXL"], "encode:step"),
])  # fmt: skip
def test_phases_are_asked_for_in_any_order(words, phases, monkeypatch, capsys):
    asked: list[Spec] = []

    def lost(row):
        asked.append(row.spec)
        return pool.none(row, "not tried")

    made_up(monkeypatch, lost)
    cli.main([*WORDS, "--model", "flux-dev", *(["--phases", *words] if words else [])])
    assert [spec.phases for spec in asked] == [phases] == [planned_text(planned(phases))]
    text = " ".join(capsys.readouterr().out.split())
    assert ("stays on each GPU beside the training" in text) == ("step" in phases)


def test_a_plan_names_the_phase_that_binds(monkeypatch, capsys, tmp_path):
    given = dict(reserved=10 * GIB, between=8 * GIB, asides=ASIDES)
    made_up(monkeypatch, lambda row: prediction(9, **given))
    words = [*WORDS, "--gpu", "RTX-4060-Ti-16GB", "--model", "flux-dev", "--phases", "validate"]
    words += ["--notes"]
    assert cli.main([*words, "--json", str(tmp_path / "plan.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "by phase: step 10.7, validate 20.7 GiB; validate binds: a pass" in text
    (row,) = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert row["binds"] == "validate" and row["need_bytes"] == row["phases"]["validate"]["gpu"]
    assert cli.main([*words, "--check"]) == 1
    assert "validate binds" in capsys.readouterr().out
    assert cli.main([*words, "--gpu", "L40S"]) == 0
    assert "--phases validate" in capsys.readouterr().out, "the command that exports it"


def test_a_run_has_no_phases():
    with pytest.raises(SpecError, match="leave --phases out"):
        dataclasses.replace(FLUX, device="cpu", phases="load").check()
    assert (
        "phases" not in FLUX.to_dict() and dataclasses.replace(FLUX, phases="load").key != FLUX.key
    )
    lack = requirements.obstacle(resolve(dataclasses.replace(FLUX, phases="load")), machine=None)
    assert "plan --phases" in lack.hint
