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
from strategies.base import BadInput

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
    assert "+qlora:rank=16" in made.recipe and "nf4" not in str(made.unpredicted)


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


@pytest.mark.parametrize("run", ["eval $cmd", "bash -c date; $cmd"])
def test_a_command_in_a_variable_is_read_with_the_processes_of_its_launcher(run, tmp_path):
    text = (FILES / "eval.sh").read_text().replace("eval $cmd", run)
    made = of_text(tmp_path, "a.sh", text)
    assert "ddp+" in made.recipe and "+lora:rank=64" in made.recipe and made.processes == 2
    assert (made.resolution, made.frames) == ("512x768", 49)
    lost = of_text(tmp_path, "b.sh", text.replace("--num_processes 2", "--config_file lost.yaml"))
    assert [one.what for one in lost.unpredicted] == ["--config_file lost.yaml"]
    text = text.replace("accelerate launch --num_p", "torchrun --nnodes 2 --nproc_p")
    assert of_text(tmp_path, "c.sh", text.replace("processes 2", "per_node 4")).processes == 8


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


@pytest.mark.parametrize("given", ["--split_mode", "--blocks_to_sw 18", "--blocks_to_swap %N%"])
def test_a_setting_by_another_name_is_read(given, tmp_path):
    made = START.format(f".\\sd\\{SCRIPTS['sd-scripts']}", f"{given} {CACHED}")
    now = START.format(SCRIPTS["sd-scripts"], f"--blocks_to_swap 18 {CACHED}")
    recipe = of_text(tmp_path, "a.bat", f'set "N=18"\n{made}').recipe
    assert recipe == of_text(tmp_path, "b.sh", now).recipe and "block_swap" in recipe
    with pytest.raises(BadInput, match="--cache_text_encoder could be"):
        of_text(tmp_path, "c.sh", now.replace("encoder_outputs", "encoder"))


@pytest.mark.parametrize("high", ["", "--dit_high_noise b.safetensors"])
def test_blocks_of_one_expert_alone_are_swapped(high, tmp_path):
    script = "wan_train_network.py --task t2v-A14B --network_module networks.lora_wan"
    given = f"--dit a.safetensors --blocks_to_swap 20 {high}"
    made = of_text(tmp_path, "a.sh", START.format(script, given))
    named = "--blocks_to_swap" in str(made.unpredicted)
    assert (named, "block_swap:blocks=20" in made.recipe) == (bool(high), not high)


ONETRAINER = {"base_model_name": "black-forest-labs/FLUX.1-dev", "model_type": "FLUX_DEV_1",
              "transformer": {"weight_dtype": "BFLOAT_16"}, "layer_filter": "transformer_block",
              "output_model_format": "COMFY_LORA"}  # fmt: skip


@pytest.mark.parametrize("method", ["LORA", "FINE_TUNE_VAE"])
def test_a_method_without_a_row_is_named_and_a_default_is_told_as_one(method, tmp_path):
    """OneTrainer's train_dtype is FLOAT_16, as large as bfloat16."""
    made = of_text(tmp_path, "c.json", json.dumps({**ONETRAINER, "training_method": method}))
    named = [f"training_method {method}"] * (method != "LORA")
    assert [one.what for one in made.unpredicted] == named
    assert "train_dtype FLOAT_16" in [name for name, *_ in made.usual]
    assert not any("train_dtype" in name for name, _ in made.means)


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
    said = str(made.unpredicted)
    assert "VAE is on the device" not in said and "adapters of text encoders train too" in said
    assert "text encoders" not in str(of_text(tmp_path, "b.sh", f"{text} {CACHED}").unpredicted)


def test_a_directory_without_a_size_has_the_general_one_and_a_stage_that_caches_has_none():
    made = reading(files.read([FILES / "general-size/c.toml"]), "wan2.2-5b")
    assert made.frames == 49 and read("two-stages.sh").resolution == "1024x1024"


MUSUBI = {"--model_version layered": ["more"], "--network_args conv_dim=4": [""],
          "--network_args loraplus_lr_ratio=4": []}  # fmt: skip


@pytest.mark.parametrize("given", MUSUBI)
def test_what_moves_adapters_or_adds_tokens_is_named_and_nothing_else(given, tmp_path):
    made = of_text(tmp_path, "a.sh", START.format(SCRIPTS["musubi"], given))
    assert [one.errs for one in made.unpredicted] == MUSUBI[given]
    assert all(one.what == given for one in made.unpredicted)


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


SANA = "--dataset_name d --caption_column c --cache_latents --rank 8 --resolution 1024"
STAY = {
    "prompts": (f"train_dreambooth_lora_sana.py {SANA}", ["Gemma-2-2B"], ["encode:step+encoders"]),
    "both": ("", ["T5-XXL", "CLIP-L", "FLUX-VAE"], ["encode:step"]),
    "vae": ("--cache_text_encoder_outputs", ["FLUX-VAE"], ["encode:step+vae"]),
    "disk": ("--cache_text_encoder_outputs_to_disk", ["FLUX-VAE"], ["encode:step+vae"]),
    "none": (CACHED, [], []),
}


@pytest.mark.parametrize("name", STAY)
def test_models_that_stay_are_counted(name, tmp_path):
    given, stay, phases = STAY[name]
    command = START.format(SCRIPTS["sd-scripts"], f"--network_train_unet_only {given}")
    made = of_text(tmp_path, "a.sh", f"python {given}" if "sana" in given else command)
    assert made.also == stay and not any("device too" in one.why for one in made.unpredicted)
    for own, counted in ([], (stay, phases)), (["2GiB"], (["2GiB"], [])):
        given = {"also": own, "phases": [], "cached": False, "average": 0.0, **SIZES}
        asked = asked_of(argparse.Namespace(**given), made)
        assert (asked.also, asked.phases) == counted


def test_quantized_encoders_stay_in_their_type(tmp_path):
    text = (FILES / "layer-offloading.yaml").read_text()
    text = text.replace("cache_text_embeddings: true, ", "")
    given = text.replace("quantize: false", "quantize_te: true, quantize_dtype: int8")
    made = of_text(tmp_path, "a.yaml", given)
    assert "quantize_dtype int8: without effect: ai-tool" in str([*map(str, made.unpredicted)])
    encoders = [one for one in made.also if "VAE" not in one]
    assert encoders and all(one.endswith(":int8") for one in encoders)
    assert not made.phases, "passes are predicted of 16 bits"
