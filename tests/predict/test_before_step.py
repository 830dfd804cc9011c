"""Models beside a training: their sizes, and loading and encoding before a step, by which a plan is
judged where they need more than the step."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from harness import cli
from harness.planner import before_step, overhead, resident_models
from harness.planner.before_step import Before
from harness.planner.plan.measured import lines
from harness.planner.plan.measured import read as measured
from harness.planner.verdict import Fit, judge
from harness.prediction import Work
from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects.library import families
from harness.system import cards
from strategies.base import BadInput
from tests.made.predictions import GIB, prediction

LTX = ["--model", "ltx-2", "--gpu", "RTX-4090"]
QLORA = "single+bf16_pure+qlora:rank=16+checkpoint"


def before(model: str, card: str = "RTX-4090", **change: object) -> Before:
    spec = Spec(recipe="single+bf16_pure+lora:rank=16+checkpoint", model=model, objective="flow",
                data="synthetic", global_batch=change.get("processes", 1), device="cuda",
                ema=0.0, **change)  # fmt: skip
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
    from harness.planner.tracing import phases

    row = resolve(Spec(recipe="single+bf16_pure", model=model, objective="flow", device="cuda",
                       data="synthetic", global_batch=1, ema=0.0))  # fmt: skip
    space, factor, every = row.subject.space, row.subject.factor, row.subject.family.every
    size = (1, 1 + (space.frames - 1) * max(1, every), space.height * factor, space.width * factor)
    for name, found in resident_models.passes(row.spec).items():
        asked = (size, space.text, False, False, overhead.USUAL)
        assert phases.passed(name, "encode", *asked)[1] == pytest.approx(found, abs=2**20)


# ---- a measured step ----


def fit(size: float = 12, *work: Work) -> Fit:
    """A step on 24 GiB of three seconds by default, with recomputation."""
    spec = Spec(recipe="single+bf16_pure+lora:rank=16+checkpoint", model="flux-dev",
                objective="flow", data="synthetic", global_batch=1, device="cuda",
                ema=0.0)  # fmt: skip
    card = cards.find("RTX-4090")
    one = Work(phase="forward", kind="product", dtype="bfloat16", flops=10**14, bytes=8, count=1)
    rate = judge(resolve(spec), prediction(1, work=[one]), card).seconds.total
    busy = dataclasses.replace(one, flops=int(3e14 / rate))
    return judge(resolve(spec), prediction(size, work=[busy, *work]), card)


def said(found: Fit, text: str) -> str:
    return "\n".join(lines(found, measured(text)))


def test_a_step_within_both_ranges_is_normal():
    text = said(fit(), f"3.1s,{fit().need_bytes / GIB:.2f}GiB")
    assert text.count("Normal.") == 2 and "Not normal" not in text


def test_more_than_the_card_has_spills_to_the_host():
    over = fit(30)
    more = over.need_bytes - over.gpu.memory_bytes
    text = said(over, f"{3 + 2 * more / 2e9:.3f}s")
    assert "spilled to host memory" in text and "at 2 GB/s" in text
    assert "spilled" not in said(fit(12), "9s")


def test_copies_at_the_speed_of_pageable_memory_are_named():
    copied = Work(phase="forward", kind="streamed", dtype="", flops=0, bytes=20 * 10**9, count=1)
    assert "offload from pageable memory: 18.6 GiB a step at 4" in said(fit(12, copied), "8s")
    assert "pageable" not in said(fit(12), "8s")


def test_encoders_that_stay_explain_what_they_weigh():
    """9.3 GiB of T5-XXL, CLIP-L and the VAE in 16 bits (9.52, 0.25 and 0.17 GB)."""
    text = said(fit(), f"{fit().need_bytes / GIB + 9.3:.1f}GiB")
    assert "encoders that stay on the GPU: T5-XXL, CLIP-L, FLUX-VAE, 9.3 GiB" in text
    assert "encoders" not in said(fit(), f"{fit().need_bytes / GIB + 4:.1f}GiB")


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
