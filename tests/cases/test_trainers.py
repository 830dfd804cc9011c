"""Trainers' files as people have them are read with what they name, and what does nothing is
told."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from harness.planner.export import files
from harness.planner.export.matching import Reading
from harness.planner.export.reading import reading
from harness.planner.plan.given import SIZES, asked_of
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
    """SimpleTuner's should_checkpoint_block: Qwen-Image's blocks 0, 2, 4, ... at an interval of
    2."""
    given = {"model_type": "lora", "lora_type": "standard", "lora_rank": 16,
             "model_family": "qwen_image", "gradient_checkpointing": True,
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


# ---- settings of one kind ----

SCRIPTS = {
    "sd-scripts": "flux_train_network.py --pretrained_model_name_or_path flux1-dev.safetensors "
    "--network_module networks.lora_flux --resolution 512",
    "musubi": "qwen_image_train_network.py --dit qwen.safetensors "
    "--network_module networks.lora_qwen_image",
}
START = "accelerate launch {} --mixed_precision bf16 --network_dim 8 --gradient_checkpointing {}"
CACHED = "--cache_latents --cache_text_encoder_outputs --network_train_unet_only"


def of_text(folder: Path, name: str, text: str) -> Reading:
    (folder / name).write_text(text)
    return reading(files.read([folder / name]))


@pytest.mark.parametrize("given", ["--split_mode", "--double_blocks_to_swap 18"])
def test_a_setting_by_an_older_name_is_read(given, tmp_path):
    made = of_text(tmp_path, "a.sh", START.format(SCRIPTS["sd-scripts"], f"{given} {CACHED}"))
    now = START.format(SCRIPTS["sd-scripts"], f"--blocks_to_swap 18 {CACHED}")
    assert made.recipe == of_text(tmp_path, "b.sh", now).recipe and "block_swap" in made.recipe


def test_words_that_a_shell_uses_if_a_variable_is_set_are_words(tmp_path):
    flag = "${BLOCKS:+--blocks_to_swap $BLOCKS}"
    text = START.format(SCRIPTS["sd-scripts"], f"{flag} {CACHED}")
    on = of_text(tmp_path, "a.sh", f"BLOCKS=18\n{text}").recipe
    off = of_text(tmp_path, "b.sh", text).recipe
    assert "block_swap" in on and "block_swap" not in off
    assert "+checkpoint" in on and "+checkpoint" in off


def test_caches_on_disk_are_caches_and_clip_trains_beside_cached_t5(tmp_path):
    text = START.format(SCRIPTS["sd-scripts"], "--cache_latents_to_disk")
    made = of_text(tmp_path, "a.sh", f"{text} --cache_text_encoder_outputs")
    said = " ".join(one.why for one in made.unpredicted)
    assert "VAE is on the device" not in said and "adapters of text encoders train too" in said
    alone = of_text(tmp_path, "b.sh", f"{text} {CACHED}")
    assert "text encoders" not in " ".join(one.why for one in alone.unpredicted)


def test_a_directory_without_a_size_has_the_general_one(tmp_path):
    text = """[model]
type = "wan"
ckpt_path = "Wan2.2-TI2V-5B"
dtype = "bfloat16"
[adapter]
type = "lora"
rank = 8
dtype = "bfloat16"
"""
    sizes = "resolutions = [512]\nframe_buckets = [1, 49]\n"
    bare = '[[directory]]\npath = "a"\n'
    (tmp_path / "d.toml").write_text(
        f'{sizes}{bare}[[directory]]\npath = "b"\nframe_buckets = [1]\n'
    )
    (tmp_path / "c.toml").write_text(f'dataset = "{tmp_path}/d.toml"\n{text}')
    made = reading(files.read([tmp_path / "c.toml"]), "wan2.2-5b")
    assert made.frames == 49


def test_a_version_with_more_tokens_a_sample_is_named(tmp_path):
    made = of_text(tmp_path, "a.sh", START.format(SCRIPTS["musubi"], "--model_version layered"))
    (one,) = made.unpredicted
    assert (one.what, one.errs) == ("--model_version layered", "more")


def test_arguments_of_a_network_that_move_no_adapters_leave_the_verdict(tmp_path):
    text = START.format(SCRIPTS["musubi"], "--network_args")
    assert not of_text(tmp_path, "a.sh", f"{text} loraplus_lr_ratio=4").unpredicted
    assert of_text(tmp_path, "b.sh", f"{text} conv_dim=4").unpredicted


INTERVALS = {  # settings of SimpleTuner -> directions in which the prediction errs
    "chunks": ({"model_family": "flux"}, [""]),
    "blocks": ({"model_family": "auraflow", "gradient_checkpointing_interval": 5}, ["more"]),
    "swap": ({"model_family": "flux", "musubi_blocks_to_swap": 4}, ["", "more"]),
    "off": ({"model_family": "auraflow", "gradient_checkpointing": False}, ["none"]),
}


@pytest.mark.parametrize("name", INTERVALS)
def test_an_interval_that_no_recipe_has_is_named_beside_plain_checkpointing(name, tmp_path):
    given, errs = INTERVALS[name]
    own = {"model_type": "full", "gradient_checkpointing_interval": 2, **given}
    made = of_text(tmp_path, "config.json", json.dumps(own))
    told = [one.errs for one in made.unpredicted if "gradient_checkpointing_interval" in one.what]
    assert told == errs
    assert ("+checkpoint" in made.recipe) == (name != "off") and "every" not in made.recipe


# ---- models that stay ----

STAY = {
    "both": ("", ["T5-XXL", "CLIP-L", "FLUX-VAE"], ["encode:step"]),
    "vae": ("--cache_text_encoder_outputs", ["FLUX-VAE"], ["encode:step+vae"]),
    "none": (CACHED, [], []),
}


@pytest.mark.parametrize("name", STAY)
def test_models_that_stay_are_counted(name, tmp_path):
    given, stay, phases = STAY[name]
    command = START.format(SCRIPTS["sd-scripts"], f"--network_train_unet_only {given}")
    made = of_text(tmp_path, "a.sh", command)
    assert made.also == stay and not any("device too" in one.why for one in made.unpredicted)
    for own, counted in ([], (stay, phases)), (["2GiB"], (["2GiB"], [])):
        options = argparse.Namespace(also=own, phases=[], cached=False, average=0.0, **SIZES)
        asked = asked_of(options, made)
        assert (asked.also, asked.phases) == counted


def test_quantized_encoders_stay_in_their_type(tmp_path):
    text = (FILES / "layer-offloading.yaml").read_text()
    text = text.replace("cache_text_embeddings: true, ", "")
    made = of_text(tmp_path, "a.yaml", text.replace("quantize: false", "quantize_te: true"))
    encoders = [one for one in made.also if "VAE" not in one]
    assert encoders and all(one.endswith(":int8") for one in encoders)
    assert not made.phases, "passes are predicted of 16 bits"
