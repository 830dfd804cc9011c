"""Trainers' files as people have them are read with what they name, and what does nothing is
told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.planner.export import files
from harness.planner.export.matching import Reading
from harness.planner.export.reading import reading
from harness.subjects.library.subject import Library

FILES = Path(__file__).parent / "trainers"


@pytest.fixture(autouse=True)
def names_alone(monkeypatch):
    """Names of attention's layers, for which a model would be built in seconds."""
    monkeypatch.setattr(Library, "attention_linears", ("attn.to_q",))


def read(name: str) -> Reading:
    return reading(files.read([FILES / name]))


def test_a_path_is_found_from_the_folder_above_the_configurations():
    made = read("simpletuner/config/config.json")
    assert made.resolution == "512x512" and not made.assumed


def test_a_base_of_four_bits_is_qlora():
    made = read("nf4/c.toml")
    assert "+qlora:rank=16" in made.recipe
    assert not any("nf4" in one.what for one in made.unpredicted)


def test_adapter_options_that_do_nothing_are_named_with_what_was_meant():
    made = read("rank-without-type.json")
    assert "lora" not in made.recipe and set(made.idle) == {"lora_rank", "lora_type"}
    assert "+lora:rank=16" in made.intended.recipe
    (said,) = [one for one in made.unpredicted if "lora_rank" in one.what]
    assert "model_type full is the default" in said.why and said.errs == "none"


@pytest.mark.parametrize(("interval", "part"), [(2, "share=0.5,spread=on"), (1, "")])
def test_an_interval_recomputes_every_nth_block_alone(interval, part, tmp_path):
    """SimpleTuner's should_checkpoint_block: SD3's blocks 0, 2, 4, ... at an interval of 2."""
    given = {"model_type": "lora", "lora_type": "standard", "lora_rank": 16, "model_family": "sd3",
             "pretrained_model_name_or_path": "stabilityai/stable-diffusion-3.5-medium",
             "gradient_checkpointing": True,
             "gradient_checkpointing_interval": interval}  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(given))
    made = reading(files.read([file]))
    assert f"+checkpoint:{part}".rstrip(":") in made.recipe.split("+optim")[0]
    assert ("share" in made.recipe) is bool(part)


def test_a_command_in_a_variable_that_eval_runs_is_read():
    made = read("eval.sh")
    assert "+lora:rank=64" in made.recipe
    assert (made.resolution, made.frames) == ("512x768", 49)
