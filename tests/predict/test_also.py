"""Encoders and VAEs beside a training: their sizes are those of the models, and they count."""

from __future__ import annotations

import pytest

from harness.planner import resident_models
from harness.subjects.library import families
from strategies.base import BadInput
from tests.made.predictions import GIB

COUNTED = ["T5-XXL", "UMT5-XXL", "CLIP-L", "CLIP-G", "Gemma-2-2B", "Qwen2.5-VL-7B", "FLUX-VAE",
           "SD-VAE", "Wan-VAE", "Qwen3-VL-4B", "Qwen3-VL-8B", "Qwen3-VL-32B", "Gemma-3-12B",
           "Llama-3.1-8B", "Qwen3-8B", "Wan2.2-VAE", "LTX-VAE-0.9.7", "LTX-2-VAE", "LTX-2.3-VAE",
           "MiniMax-H3-VAE", "Hunyuan-VAE-1.5", "Glyph-ByT5", "Qwen-Image-2.1-VAE"]  # fmt: skip
"""Those that most public models bring; the others were counted in the same way."""


def built(name: str) -> int:
    """Elements of a model of the table, made on tensors without memory."""
    import diffusers
    import torch
    import transformers

    row = resident_models.table()[name]
    with torch.device("meta"):
        if hasattr(diffusers, row["class"]):
            module = getattr(diffusers, row["class"])(**row["config"])
        else:
            kind = getattr(transformers, row["class"])
            module = kind(kind.config_class(**row["config"]))
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", COUNTED)
def test_a_model_has_as_many_elements_as_the_table_says(name):
    assert built(name) == resident_models.table()[name]["elements"]


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


BAD = {
    "T5-XXXL": "did you mean 'T5-XXL'? Or a size, as 2.5GiB",
    "T5-XXL:fp7": "its type is one of fp32, bf16",
    "2lots": "also is '2lots'; write a size",
    "usual": "the other models of mine.py:make are not known",
}


@pytest.mark.parametrize("word", BAD)
def test_what_nobody_knows_is_refused(word):
    with pytest.raises(BadInput, match="also is") as caught:
        resident_models.of([word], "mine.py:make")
    assert BAD[word] in str(caught.value)
