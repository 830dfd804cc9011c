"""Models beside a training, and loading, encoding and validation beside its step, by which a
plan is judged where they need more than the step."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
import yaml
from conftest import traced

from harness import ROOT, cli
from harness.phases import planned, planned_text
from harness.planner import before_step, overhead, pool, resident_models
from harness.planner.before_step import Before
from harness.planner.plan.measured import lines
from harness.planner.plan.measured import read as measured
from harness.planner.tracing import phases
from harness.planner.verdict import Fit, judge
from harness.prediction import Aside, Work
from harness.resolve import resolve
from harness.spec import Spec, SpecError
from harness.subjects.library import families
from harness.system import cards, requirements
from strategies.base import BadInput
from tests.made.predictions import FLUX, GIB, made_up, prediction

LTX = ["--model", "ltx-2", "--gpu", "RTX-4090"]
QLORA = "single+bf16_pure+qlora:rank=16+checkpoint"


def before(model: str, card: str = "RTX-4090", **change: object) -> Before:
    spec = dataclasses.replace(FLUX, model=model, global_batch=change.get("processes", 1), **change)
    return before_step.of(resolve(spec), cards.find(card))


@pytest.mark.parametrize(("model", "gigabytes"), [("ltx-2", 34.8), ("minimax-h3", 77.8)])
def test_a_run_s_peak_is_that_of_its_encoders(model, gigabytes):
    """Others measured whole runs, whose steps take 11.2 and 44 GB."""
    sizes = [way.bytes for way in before(model).ways]
    assert sizes[0] / 1e9 == pytest.approx(gigabytes, rel=0.05)
    assert sizes == sorted(sizes, reverse=True), "each way needs less than the one before"


def test_another_size_says_that_its_passes_are_not_counted():
    usual, larger = before("flux-dev"), before("flux-dev", resolution="2048")
    assert larger.ways[0].bytes < usual.ways[0].bytes and not larger.whole
    assert "GiB or more (" in larger.lines[0] and "or more" not in usual.lines[0]


def test_every_process_loads_a_copy_of_its_own():
    one, eight = before("flux-dev"), before("flux-dev", processes=8)
    assert (one.copies, eight.copies) == (1, 8) and one.host == 2 * 11901408320
    assert eight.host == 8 * one.host and eight.host_memory == 8 * one.host_memory
    small = dataclasses.replace(one, host_memory=16 * GIB)
    assert small.verdict == "no" and any("Loading does not fit" in line for line in small.lines)


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = cli.main(["plan", *words])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_step_that_fits_is_no_run_that_fits(capsys):
    words = [*LTX, "--recipes", QLORA, "--check"]
    code, said = checked(capsys, *words)
    assert code == 1 and said.startswith("does not fit before its step, which needs 16")
    assert "one model at a time, text encoders in 8 bits" in said and "--cached if" in said
    assert checked(capsys, *words, "--cached")[0] == 0


def test_the_assumption_is_the_second_line_of_an_answer(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "plan.json"
    assert cli.main(["plan", *LTX, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].startswith("Assumed, as most trainers do: texts and latents are")
    assert "Encoding so does not fit; this fits: one model at a time" in text
    assert json.loads(file.read_text())["before"]["verdict"] == "no"
    for words in ([*LTX, "--cached"], ["--model", "DiT-XL/2", "--gpu", "A100-80GB"]):
        assert "Assumed" not in checked(capsys, *words)[1]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["ltx-2", "krea-2"])
def test_passes_are_as_recorded(model):
    row = resolve(dataclasses.replace(FLUX, recipe="single+bf16_pure", model=model))
    space, factor, every = row.subject.space, row.subject.factor, row.subject.family.every
    size = (1, 1 + (space.frames - 1) * max(1, every), space.height * factor, space.width * factor)
    for name, found in resident_models.passes(row.spec).items():
        asked = (size, space.text, False, False, overhead.USUAL)
        assert phases.passed(name, "encode", *asked)[1] == pytest.approx(found, abs=2**20)


# ---- a measured step ----


def step(size: float = 12, *work: Work) -> Fit:
    """A step on 24 GiB of three seconds by default, with recomputation."""
    row = resolve(dataclasses.replace(FLUX, recipe=f"{FLUX.recipe}+checkpoint"))
    one = Work(phase="forward", kind="product", dtype="bfloat16", flops=10**14, bytes=8, count=1)
    card = cards.find("RTX-4090")
    rate = judge(row, prediction(1, work=[one]), card).seconds.total
    busy = dataclasses.replace(one, flops=int(3e14 / rate))
    return judge(row, prediction(size, work=[busy, *work]), card)


def said(found: Fit, text: str) -> str:
    return "\n".join(lines(found, measured(text)))


def test_a_measured_step_is_normal_or_explained():
    usual, over, need = step(), step(30), step().need_bytes / GIB
    assert said(usual, f"3.1s,{need:.2f}GiB").count("Normal.") == 2
    spilled = 2 * (over.need_bytes - over.gpu.memory_bytes) / 2e9
    copied = Work(phase="forward", kind="streamed", dtype="", flops=0, bytes=20 * 10**9, count=1)
    told = {
        "spilled to host memory": said(over, f"{3 + spilled:.3f}s"),
        "offload from pageable memory: 18.6 GiB a step at 4": said(step(12, copied), "8s"),
        # T5-XXL, CLIP-L and the VAE in 16 bits: 9.52, 0.25 and 0.17 GB.
        "encoders that stay on the GPU: T5-XXL, CLIP-L, FLUX-VAE, 9.3 GiB":
            said(usual, f"{need + 9.3:.1f}GiB"),
    }  # fmt: skip
    assert [words for words, text in told.items() if words not in text or "Normal." in text] == []
    for text in (said(usual, "9s"), said(usual, f"{need + 4:.1f}GiB")):
        assert not re.search("spilled|pageable|encoders", text) and "Normal." not in text


@pytest.mark.parametrize("text", ["fast", "0s", "-3s", "1..2s", "", "3s,x"])
def test_what_is_no_measurement_is_refused(text):
    with pytest.raises(BadInput, match="measured"):
        measured(text)


def test_it_is_asked_of_one_recipe(capsys):
    assert cli.main(["plan", *LTX, "--measured", "3s"]) == 2
    assert "--measured takes one recipe" in capsys.readouterr().err
    code, text = checked(capsys, *LTX, "--recipes", QLORA, "--measured", "850ms,16GiB")
    assert code == 0 and "Time: 0.85 s a step" in text and "Memory: 16.0 GiB" in text


# ---- models beside a training ----

COUNTED = ["T5-XXL", "UMT5-XXL", "CLIP-L", "CLIP-G", "Gemma-2-2B", "Qwen2.5-VL-7B", "FLUX-VAE",
           "SD-VAE", "Wan-VAE", "Qwen3-VL-4B", "Qwen3-VL-8B", "Qwen3-VL-32B", "Gemma-3-12B",
           "Llama-3.1-8B", "Qwen3-8B", "Wan2.2-VAE", "LTX-VAE-0.9.7", "LTX-2-VAE", "LTX-2.3-VAE",
           "MiniMax-H3-VAE", "Hunyuan-VAE-1.5", "Glyph-ByT5", "Qwen-Image-2.1-VAE"]  # fmt: skip
"""Those that most public models bring; the others were counted in the same way."""


@pytest.mark.parametrize("name", COUNTED)
def test_a_model_has_as_many_elements_as_the_table_says(name):
    import diffusers
    import transformers

    row = resident_models.table()[name]
    with torch.device("meta"):
        if hasattr(diffusers, row["class"]):
            module = getattr(diffusers, row["class"])(**row["config"])
        else:
            kind = getattr(transformers, row["class"])
            module = kind(kind.config_class(**row["config"]))
    assert sum(p.numel() for p in module.parameters()) == row["elements"]


def test_what_pipelines_bring_is_in_the_tables():
    usual = resident_models._file()["usual"]
    assert set(usual) <= set(families.table())
    assert {name for names in usual.values() for name in names} == set(resident_models.table())


def test_what_is_asked_for_is_counted_once_in_its_type():
    (one,) = resident_models.of(["t5-xxl"], "flux-dev")
    assert one == resident_models.ResidentModel("T5-XXL", 2 * 4762310656)
    (eight,) = resident_models.of(["T5-XXL:fp8"], "")
    assert eight.bytes == one.bytes // 2
    assert resident_models.of(["2.5GiB"], "")[0].bytes == int(2.5 * GIB)
    names = [b.name for b in resident_models.of(["usual", "CLIP-L"], "flux-dev")]
    assert names == ["T5-XXL", "CLIP-L", "FLUX-VAE"]


@pytest.mark.parametrize(("word", "said"), [
    ("T5-XXXL", "did you mean 'T5-XXL'? Or a size, as 2.5GiB"),
    ("T5-XXL:fp7", "its type is one of fp32, bf16"), ("2lots", "write a size"),
    ("usual", "the other models of mine.py:make are not known"),
])  # fmt: skip
def test_what_nobody_knows_is_refused(word, said):
    with pytest.raises(BadInput, match=f"also is.*{re.escape(said)}"):
        resident_models.of([word], "mine.py:make")


# ---- phases beside the step ----

CARD = cards.of_size(80 * GIB)
PARAMETERS = 11901408320
ASIDES = {
    name: Aside(weights=9 * GIB, allocated=2 * GIB, reserved=3 * GIB, what="a pass")
    for name in ("encode", "validate")
}


def fit(asked: str, gpu=CARD, beside=ASIDES, **change) -> Fit:
    """A step that reserves 30 GiB, of which 20 stay between steps, 16 of them parameters."""
    row = resolve(dataclasses.replace(FLUX, phases=asked, **change))
    made = prediction(32, reserved=30 * GIB, between=20 * GIB, denoising=21 * GIB, asides=beside)
    host = dataclasses.replace(made.host, bytes=10 * GIB)
    return judge(row, dataclasses.replace(made, steady=made.peak, host=host), gpu)


def beyond_step(found: Fit, phase: str) -> float:
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
    for way, held in (("alone", 0), ("loaded", 16), ("step", 20)):
        assert beyond_step(fit(f"encode:{way}"), "encode") == held + 9 + 3 - 30


def test_encoding_in_the_step_takes_its_time_in_each_micro_batch():
    """As a trainer does that encodes texts and images in each step (DiffSynth-Studio, sft)."""
    passes = [Work(phase="encode", kind="product", dtype="float32", flops=10**12, bytes=1, count=1)]
    encode = dataclasses.replace(ASIDES["encode"], work=passes)

    def seconds(asked: str, recipe: str = FLUX.recipe) -> float:
        beside = {**ASIDES, "encode": encode}
        return fit(asked, recipe=recipe, global_batch=4, beside=beside).seconds.total

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
    reserved = phases.passed(name, how, *asked).reserved
    weights = 2 * resident_models.table()[name]["elements"] * row.get("weights", True)
    assert (reserved + weights) / GIB == pytest.approx(row["predicted"], rel=0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("name", VAES)
def test_every_vae_decodes_a_sample_of_the_models_that_bring_it(name):
    _, every, down = resident_models.table()[name]["latent"]
    frames = LENGTHS.get(name, 1 + every)
    size = (1, frames if frames > 2 else 1, 4 * down, 4 * down)
    for how in ("encode", "decode"):
        found = phases.passed(name, how, size, 0, False, False, overhead.USUAL)
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
    asked = dataclasses.replace(FLUX, phases="load")
    assert "phases" not in FLUX.to_dict() and asked.key != FLUX.key
    assert "plan --phases" in requirements.obstacle(resolve(asked), machine=None).hint
