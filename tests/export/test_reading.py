"""A trainer's configuration is read by the tables that an export writes with, and what does nothing
or is not predicted is told."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import ROOT, cli
from harness.planner import verdict
from harness.planner.export import files, settled, trainers
from harness.planner.export.matching import Reading
from harness.planner.export.reading import TOGETHER, reading
from harness.planner.plan.given import SIZES, asked_of
from harness.planner.verdict import Uncounted
from harness.resolve import Resolved, resolve
from harness.system import cards
from strategies import CATALOG, parse
from strategies.base import BadInput, Slot
from tests.made.predictions import asked as planned_for
from tests.made.predictions import made_up, prediction
from tests.made.translated import FEW, REAL, asked, models, trained_whole

OWN = ROOT / "tests/cases/trainers"
"""Files as people have them."""

SPREAD = [
    *FEW, "single+fp32", "single+tf32", "single+bf16", "single+bf16_pure:autocast=on",
    "single+bf16_pure:autocast=on+lora:rank=16+checkpoint+adam8bit",
    "single+bf16_pure+lora:rank=4,dtype=fp32+accumulate:steps=4",
    "ddp+bf16_pure:autocast=on+lora:dtype=fp32+checkpoint", "zero2+bf16+checkpoint",
    "zero2_offload+bf16_master", "zero3_offload+bf16+checkpoint", "fsdp2+bf16_pure+checkpoint",
    "hsdp+bf16", "single+bf16_pure+dora:rank=4",
    "single+bf16_pure+qlora:rank=16,dtype=fp32+checkpoint",
    "single+bf16_pure:autocast=on+lokr:rank=16,factor=8",
    "single+cast:to=fp8+bf16_pure+lora:dtype=fp32",
    "single+bf16_pure:autocast=on+block_swap:blocks=27+lora+checkpoint",
    "single+checkpoint:every=2", "single+bf16_pure+checkpoint+offload_activations:what=checkpoints",
    "single+bf16_pure:autocast=on+adamw_bf16:write=kahan", "single+bf16_pure+sgd:momentum=0.9",
    "single+bf16+adafactor", "ddp+bf16+paged_adam8bit", "single+compile:scope=model",
    "single+attend:kernel=math",
]  # fmt: skip


def exported(folder: Path, name: str, resolved: Resolved) -> list[Path]:
    """The files of an export for one trainer, as its page shows them."""
    folder.mkdir()
    made = trainers.translated(name, resolved, str(folder / "accelerate.yaml"))
    blocks = re.findall(r"(?:(\S+):\n\n)?```\w+\n(.*?)\n```", trainers.written(made), re.S)
    found = [folder / (name or "run.sh") for name, _ in blocks]
    for path, (_, text) in zip(found, blocks, strict=True):
        path.write_text(text)
    file = resolved.launch.engine.file
    content = {**file.content, "num_processes": resolved.launch.processes}
    word = settled.mixed_precision(resolved)
    if "deepspeed_config" in content:
        content["deepspeed_config"] = {"deepspeed_config_file": str(folder / "deepspeed.json")}
        half = {name: {"enabled": name == word} for name in ("bf16", "fp16")}
        (folder / "deepspeed.json").write_text(json.dumps({**file.settings, **half}))
    else:
        content["mixed_precision"] = word
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(content))
    return found[:2] if made.trainer["form"] != "flags" else found[:1]


def parts(recipe: str) -> dict[Slot, str]:
    """Strategies by slot; under DeepSpeed, bf16 is bf16_master."""
    text = recipe.replace("bf16_master", "bf16")
    return {part.slot: str(part) for part in parse(text, ema=False).strategies}


def zero_of(recipe: str) -> tuple[int, str, str]:
    """Stage of ZeRO, and where optimizer state and parameters are, of a recipe's launch file."""
    engine = CATALOG[recipe.partition("+")[0]].engine("cuda")
    return engine.stage, engine.place("optimizer"), engine.place("parameters")


def pairs(name: str) -> list[tuple[str, str]]:
    """The spread on a model that the trainer trains whole too, and two recipes on each other."""
    usual = trained_whole(name)
    others = [model for model in models(name) if model != usual]
    return [(usual, text) for text in SPREAD] + [(m, text) for m in others for text in FEW[:2]]


@pytest.mark.parametrize("name", trainers.known())
def test_an_export_reads_back_as_the_recipe_or_names_the_difference(name, tmp_path):
    equal = 0
    for index, (model, recipe) in enumerate(pairs(name)):
        resolved = asked(recipe, model)
        made = resolved and trainers.translated(name, resolved, "a.yaml")
        if not made or "SCRIPT" in made.start or "MODEL" in made.start:
            continue
        lacked = {missing.what for missing in made.lacks}
        told = lacked | {missing.what for missing in made.notes}
        given = parts(str(resolved.recipe))
        try:
            back = reading(files.read(exported(tmp_path / str(index), name, resolved)), model)
        except BadInput as error:  # the trainer has no such precision or adapter
            assert lacked & {str(resolved.recipe.in_slot(slot)) for slot in TOGETHER}, error
            continue
        read = parts(back.recipe)
        off = {slot for slot in {*given, *read} if given.get(slot) != read.get(slot)}
        launch = resolved.launch
        for slot in off if launch.sharding not in lacked else ():
            both = {given.get(one) for one in TOGETHER} if slot in TOGETHER else {given.get(slot)}
            both |= set() if slot in given else {f"no {slot.name.lower()}"}
            assert told & both, (model, recipe, back.recipe)
        if launch.sharding not in lacked:
            micro = 1 if "micro batch" in lacked else resolved.micro_batch
            sizes = (micro, launch.accumulation, launch.processes)
            assert (back.micro_batch, back.accumulation, back.processes) == sizes, (model, recipe)
        equal += not off - {Slot.CAST}  # the layers of each trainer, which a note tells
    assert equal >= 5


# ---- public configurations ----


def text(name: str, place: int = 0) -> str:
    """A published configuration's first file."""
    return next(iter(REAL[name]["published"][place]["files"].values()))


MUSUBI, DIFFUSERS, AI_TOOLKIT, FINETRAINERS = map(
    text, ("musubi-tuner", "diffusers", "ai-toolkit", "finetrainers")
)
SECOND = (text(name, 1) for name in ("sd-scripts", "musubi-tuner", "diffusers"))
KOHYA, MUSUBI_FULL, DIFFUSERS_FULL = SECOND
PUBLIC = [pytest.param(one, id=f"{n}-{i}") for n, told in REAL.items()
          for i, one in enumerate(told["published"])]  # fmt: skip


def read(folder: Path, named: dict[str, str], **more) -> Reading:
    folder.mkdir(exist_ok=True)
    for name, text in named.items():
        (folder / name).write_text(text)
    return reading(files.read([folder / name for name in named]), **more)


@pytest.mark.parametrize("told", PUBLIC)
def test_a_public_configuration_has_its_recipe(told, tmp_path):
    made = read(tmp_path, told["files"])
    found, expected = parts(made.recipe), parts(told["recipe"])
    if found[Slot.SHARD].startswith("@"):  # the file's own settings: the engine that it starts
        assert zero_of(made.recipe) == zero_of(told["recipe"])
        found[Slot.SHARD] = expected[Slot.SHARD]
    assert (made.model, found) == (told["model"], expected)
    sample = f"{made.resolution} {made.frames} {made.micro_batch}"
    assert told.get("sample", sample) == sample
    for key in ("unpredicted", "differs"):
        said = "\n".join(map(str, getattr(made, key)))
        assert all(words in said for words in told.get(key, ())), said
    assert not any("learning_rate" in str(one) for one in made.unpredicted)


# ---- what a file means ----

Named = dict[str, str]
"""Name of a file -> its text."""
START = "accelerate launch {} --mixed_precision bf16 --network_dim 8 --gradient_checkpointing {}"
FLUX = ("flux_train_network.py --pretrained_model_name_or_path flux1-dev.safetensors "
        "--network_module networks.lora_flux --resolution 512")  # fmt: skip
CACHED = "--cache_latents --cache_text_encoder_outputs --network_train_unet_only"
PIPE = """
micro_batch_size_per_gpu = 1
activation_checkpointing = true
{more}
[model]
type = '{type}'
dtype = 'bfloat16'
transformer_dtype = 'float8_e4m3fn'
[adapter]
type = 'lora'
rank = 32
dtype = 'bfloat16'
[optimizer]
type = 'adamw'
"""
OFFLOADED = {"gradient_checkpointing": "CPU_OFFLOADED", "layer_offload_fraction": 0.5}


def sh(text: str) -> Named:
    return {"a.sh": text}


def kohya(more: str = "", script: str = FLUX) -> Named:
    return sh(START.format(script, more))


def musubi(more: str) -> Named:
    given = "--dit q.safetensors --network_module networks.lora_qwen_image"
    return kohya(more, f"qwen_image_train_network.py {given}")


def wan(script: str) -> Named:
    """musubi-tuner's guide for another model."""
    return sh(MUSUBI.replace("wan_train_network.py --task t2v-1.3B", script))


def onetrainer(**more: Any) -> Named:
    usual = {"model_type": "FLUX_DEV_1", "training_method": "LORA", "train_dtype": "BFLOAT_16",
             "transformer": {"weight_dtype": "FLOAT_8"},
             "layer_filter": "transformer_block"}  # fmt: skip
    return {"config.json": json.dumps({**usual, **more})}


def simpletuner(model: str, **more: Any) -> Named:
    usual = {"model_family": model, "model_type": "lora", "lora_type": "standard", "lora_rank": 8}
    return {"config.json": json.dumps({**usual, **more})}


def toolkit(part: str, **more: Any) -> Named:
    """ai-toolkit's example with other settings in a part."""
    job = yaml.safe_load(AI_TOOLKIT)
    job["config"]["process"][0][part] |= more
    return {"a.yaml": yaml.safe_dump(job)}


def pipe(kind: str, dataset: str, more: str = "") -> Named:
    return {"a.toml": PIPE.format(type=kind, more=more), "dataset.toml": dataset}


def own(name: str, *changes: tuple[str, str]) -> Named:
    text = (OWN / name).read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return {Path(name).name: text}


MESH = "--dp_degree 4 --dp_shards 2"
MEANS: dict[str, tuple[Named, dict[str, Any]]] = {
    # -- what stays beside, and what is a default
    "prodigy": (sh(DIFFUSERS_FULL), {
        "has": ["prodigy", "--gradient_checkpointing"], "unpredicted": []}),
    "an unread option": (sh(MUSUBI_FULL), {"has": ["--vae"]}),
    "prompts of sana": (
        sh("accelerate launch train_dreambooth_lora_sana.py --dataset_name d --caption_column c "
           "--cache_latents --rank 8 --resolution 1024"),
        {"also": ["Gemma-2-2B"], "phases": ["encode:step+encoders"]}),
    "encoders of finetrainers": (sh(FINETRAINERS), {
        "also": ["UMT5-XXL", "Wan-VAE"], "phases": ["encode:step"], "never": ["device too"]}),
    "all weights and an encoder": (
        sh("accelerate launch flux_train.py --mixed_precision bf16 --full_bf16 "
           "--pretrained_model_name_or_path flux1-dev.safetensors --optimizer_type adafactor "
           "--resolution 512"),
        {"also": ["T5-XXL", "CLIP-L", "FLUX-VAE"], "never": ["adapters of text encoders"]}),
    # -- SimpleTuner gives peft the endings of names (helpers/models/MODEL/model.py)
    "layers of krea2": (simpletuner("krea2"), {"has": ["targets=attention,reach=model"]}),
    "layers of all": (simpletuner("flux", flux_lora_target="all+ffs"), {
        "has": ["proj_mlp/proj_out,reach=model"]}),
    "layers by name": (simpletuner("flux", peft_lora_target_modules=["to_q"]), {
        "has": ["peft_lora_target_modules ['to_q']"]}),
    "layers that contain a word": (
        toolkit("network", network_kwargs={"only_if_contains": [".img_attn."]}),
        {"says": ["only_if_contains", "the trainer needs less"]}),
    # -- OneTrainer's migrations 4, 9 and 10 (TrainConfig.py): most public files are older than 11
    "recomputed in host memory": (onetrainer(**OFFLOADED), {"has": [
        "+block_swap:blocks=28+", "+checkpoint", "+offload_activations:what=checkpoints"]}),
    "recomputed on the device": (
        onetrainer(**OFFLOADED, enable_activation_offloading=False),
        {"has": ["+block_swap:blocks=28+", "+checkpoint"], "lacks": ["offload_activations"]}),
    "kept": (onetrainer(gradient_checkpointing="OFF"), {"lacks": ["checkpoint"]}),
    "the type of all parts": (
        onetrainer(transformer={"weight_dtype": "NONE"}, weight_dtype="NFLOAT_4"),
        {"has": ["+qlora:rank=16,dtype=fp32", "training_method LORA"]}),
    "a saving without a recipe": (
        onetrainer(**OFFLOADED, training_method="FINE_TUNE", optimizer={"optimizer": "ADAFACTOR"},
                   transformer={"weight_dtype": "BFLOAT_16"}),
        {"says": ["layer_offload_fraction", "the trainer needs less", "block_swap"]}),
    "a method without a row": (
        onetrainer(training_method="FINE_TUNE_VAE", transformer={"weight_dtype": "BFLOAT_16"}),
        {"says": ["training_method FINE_TUNE_VAE"]}),
    # -- samples
    "a video's usual frames": (onetrainer(model_type="HUNYUAN_VIDEO"), {
        "frames": 25, "resolution": "512x512"}),
    "the largest of several": ({"a.yaml": AI_TOOLKIT}, {
        "has": ["512x512, 768x768, 1024x1024"]}),
    "an image has no frames": (
        pipe("flux", "resolutions = [512]\nframe_buckets = [1, 33]\n[[directory]]\n"
             "resolutions = [1024]"), {"resolution": "1024x1024"}),
    "a variable without a value": (sh(DIFFUSERS.replace("size=1", "size=$BATCH")), {
        "micro_batch": 4, "has": ["$BATCH"]}),
    # -- which model
    "flux2 by its base": (
        onetrainer(model_type="FLUX_2", base_model_name="black-forest-labs/FLUX.2-dev"),
        {"model": "flux2-dev"}),
    "edit 2511 by a version": (wan("qwen_image_train_network.py --model_version edit-2511"), {
        "model": "qwen-image-edit-2511"}),
    # -- engines and precision
    "groups of shards": (
        sh(re.sub(r"--dp_degree \d+ --dp_shards \d+", MESH, FINETRAINERS)),
        {"has": ["hsdp:replicate=4"], "processes": 8}),
    "fp16 of ai-toolkit": (toolkit("train", dtype="fp16"), {"has": ["bf16_pure"]}),
    "compiled blocks": (
        pipe("wan", "resolutions = [512]", "compile = true\nblocks_to_swap = 20"),
        {"has": ["+block_swap:blocks=20", "+cast:to=fp8,layers=all"], "says": ["compile"],
         "given": "wan2.1-14b"}),
    "a base of four bits": (own("nf4/c.toml") | own("nf4/d.toml"), {"has": ["+qlora:rank=16"]}),
    # -- SimpleTuner's should_checkpoint_block: blocks 0, 2, 4, ... of Qwen-Image at 2
    "every second block": (
        simpletuner("qwen_image", gradient_checkpointing=True, gradient_checkpointing_interval=2),
        {"has": ["+checkpoint:share=0.5,spread=on"]}),
    "every block": (
        simpletuner("qwen_image", gradient_checkpointing=True, gradient_checkpointing_interval=1),
        {"has": ["+checkpoint"], "lacks": ["share"]}),
    "chunks": (simpletuner("flux", model_type="full", gradient_checkpointing_interval=2), {
        "has": ["+checkpoint"], "lacks": ["every"], "errs": {"interval": [""]}}),
    "chunks that are off": (
        simpletuner("auraflow", model_type="full", gradient_checkpointing_interval=2,
                    gradient_checkpointing=False),
        {"lacks": ["checkpoint"], "errs": {"interval": ["none"]}}),
    "blocks that stay once backward had them": (
        simpletuner("flux", gradient_checkpointing=True, musubi_blocks_to_swap=40),
        {"lacks": ["block_swap"], "errs": {"musubi_blocks_to_swap": ["less"]}}),
    "adapter options that do nothing": (own("rank-without-type.json"), {
        "errs": {"lora_rank": ["none"]}, "has": ["+lora:rank=16"],
        "says": ["model_type full is the default"]}),
    # -- shells
    "a command in a variable": (own("eval.sh"), {
        "has": ["ddp+", "+lora:rank=64"], "processes": 2, "resolution": "512x768", "frames": 49}),
    "a launch file that is lost": (
        own("eval.sh", ("--num_processes 2", "--config_file lost.yaml")),
        {"has": ["--config_file lost.yaml"]}),
    "torchrun on two nodes": (
        own("eval.sh", ("accelerate launch --num_processes 2",
                        "torchrun --nnodes 2 --nproc_per_node 4")), {"processes": 8}),
    "words of a variable that is set": (
        sh("BLOCKS=18\n" + START.format(FLUX, "${BLOCKS:+--blocks_to_swap $BLOCKS} " + CACHED)),
        {"has": ["+block_swap:blocks=27+", "+checkpoint"]}),
    "a batch file": (
        {"a.bat": 'set "N=18"\n' + START.format(f".\\sd\\{FLUX}", f"--blocks_to_sw %N% {CACHED}")},
        {"has": ["+block_swap:blocks=27+"]}),
    "an older name of an option": (kohya(f"--split_mode {CACHED}"), {
        "has": ["+block_swap:blocks=27+"]}),
    "a stage that caches": (own("two-stages.sh"), {"resolution": "1024x1024"}),
    "a directory without a size": (own("general-size/c.toml") | own("general-size/d.toml"), {
        "frames": 49, "given": "wan2.2-5b"}),
    # -- settings that move adapters, tokens or one expert
    "one expert": (
        kohya("--dit a.safetensors --blocks_to_swap 20",
              "wan_train_network.py --task t2v-A14B --network_module networks.lora_wan"),
        {"has": ["+block_swap:blocks=20"], "never": ["--blocks_to_swap"]}),
    "two experts": (
        kohya("--dit a.safetensors --dit_high_noise b.safetensors --blocks_to_swap 20",
              "wan_train_network.py --task t2v-A14B --network_module networks.lora_wan"),
        {"lacks": ["block_swap"], "says": ["--blocks_to_swap"]}),
    "layers of an image": (musubi("--model_version layered"), {
        "errs": {"--model_version layered": ["more"]}}),
    "clip trains beside t5": (kohya("--cache_latents_to_disk --cache_text_encoder_outputs"), {
        "says": ["adapters of text encoders train too"], "never": ["VAE is on the device"]}),
    "encoders in 8 bits": (
        own("layer-offloading.yaml", ("cache_text_embeddings: true, ", ""),
            ("quantize: false", "quantize_te: true, quantize_dtype: int8")),
        {"also": ["Qwen3-4B:int8"], "phases": [],
         "says": ["quantize_dtype int8: without effect: ai-tool"]}),
}  # fmt: skip
"""What a file says -> what is read of it: words that its reading ``has``, its recipe ``lacks``, and
that what is not predicted ``says`` or ``never`` says; directions in which that ``err``s; the model
``given`` beside the file; and fields."""


@pytest.mark.parametrize("case", MEANS)
def test_a_file_means_what_its_trainer_makes_of_it(case, tmp_path):
    named, wanted = MEANS[case][0], {**MEANS[case][1]}
    keys = "has", "lacks", "says", "never", "errs", "given"
    has, lacks, says, never, errs, given = (wanted.pop(key, ()) for key in keys)
    made = read(tmp_path, named, **({"model": given} if given else {}))
    left, beside = [*map(str, made.unpredicted)], (made.usual, made.means, made.unread)
    told = " ".join(map(str, [made.recipe, made.intended, *made.assumed, *left, *beside]))
    assert [word for word in has if word not in told] == [], told
    assert not any(word in made.recipe for word in lacks), told
    assert all(word in " ".join(left) for word in says), left
    assert not any(word in " ".join(left) for word in never), left
    for word, directions in dict(errs).items():
        assert [one.errs for one in made.unpredicted if word in one.what] == directions
    assert {key: getattr(made, key) for key in wanted} == wanted


def test_a_path_is_found_from_the_folder_above_the_configurations():
    made = reading(files.read([OWN / "simpletuner/config/config.json"]))
    assert made.resolution == "512x512" and not made.assumed


@pytest.mark.parametrize(("more", "stay", "phases"), [
    ("", ["T5-XXL", "CLIP-L", "FLUX-VAE"], ["encode:step"]),
    ("--cache_text_encoder_outputs_to_disk", ["FLUX-VAE"], ["encode:step+vae"]), (CACHED, [], []),
])  # fmt: skip
def test_models_that_stay_are_counted(more, stay, phases, tmp_path):
    made = read(tmp_path, kohya(f"--network_train_unet_only {more}"))
    assert made.also == stay and not any("device too" in one.why for one in made.unpredicted)
    for own, counted in ([], (stay, phases)), (["2GiB"], (["2GiB"], [])):
        given = {"also": own, "phases": [], "cached": False, "average": 0.0, **SIZES}
        asked = asked_of(argparse.Namespace(**given), made)
        assert (asked.also, asked.phases) == counted


STREAMED = "block_swap:blocks=14+checkpoint+adafactor:write=stochastic"


@pytest.mark.parametrize(("name", "model", "parts"), [
    ("onetrainer", "krea-2", STREAMED), ("sd-scripts", "flux-dev", "checkpoint+adafactor"),
    ("musubi-tuner", "z-image", STREAMED),
    ("diffusion-pipe", "wan2.1-14b", "checkpoint+adam8bit:write=kahan"),
])  # fmt: skip
def test_all_weights_that_step_in_backward_go_to_a_trainer_and_back(name, model, parts, tmp_path):
    recipe = f"single+bf16_pure:autocast=on+{parts}+optimizer_in_backward"
    spec = asked("single+bf16_pure+checkpoint", model).spec
    resolved = resolve(dataclasses.replace(spec, recipe=recipe, grad_clip=0.0, ema=0.0))
    assert trainers.translated(name, resolved, "a.yaml").lacks == []
    back = reading(files.read(exported(tmp_path / "a", name, resolved)), model)
    assert (back.recipe, back.unpredicted) == (recipe, [])


TWICE = KOHYA.replace("--sdpa", "--use_8bit_adam").replace("AdamW8bit", "Lion")
SEVERAL = AI_TOOLKIT.replace("'sd_trainer'", "x\n    - type: y")
WRONG = [
    ("a.toml", "", "is empty"),
    ("a.toml", "x = 1", "is no configuration of"),
    ("a.json", "[" * 60 + "]" * 60, "nested deeper"),
    ("a.yaml", "a: &b [*b]", "alias"),
    ("a.yaml", SEVERAL, "several trainings"),
    ("a.yaml", AI_TOOLKIT.replace("512, 768", "big"), "resolution is ['big', 1024]"),
    ("a.sh", "echo hi", "no command trains"),
    ("a.sh", "accelerate 'launch", "line 1: a quote is not closed"),
    ("a.sh", kohya("--cache_text_encoder")["a.sh"], "--cache_text_encoder could be"),
    (
        "c.json",
        onetrainer(model_type="FLUX_2", base_model_name="x/FLUX.2-pruned")["config.json"],
        "pruned is not known; which of flux2-dev",
    ),
    ("a.sh", TWICE, "contradict each other"),
    ("a.sh", DIFFUSERS.replace("Qwen-Image", "Qwen-Imagine"), "did you mean qwen-image? Give"),
    ("a.sh", DIFFUSERS.replace("size=1", "size=two"), "give one whole number"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG)
def test_rubbish_is_refused_in_one_line(name, text, said, tmp_path):
    with pytest.raises(BadInput) as error:
        read(tmp_path, {name: text})
    assert said in str(error.value) and "\n" not in str(error.value)


def test_nothing_of_a_script_is_executed(tmp_path):
    text = f"touch {tmp_path}/made\nX=$(touch {tmp_path}/made)\n`touch {tmp_path}/made`\n"
    assert read(tmp_path, {"a.sh": text + DIFFUSERS}).model == "qwen-image"
    assert not (tmp_path / "made").exists()


# ---- the command ----


SEEDED = """
import sys
from pathlib import Path
from harness.planner.export import files
from harness.planner.export.reading import reading
for text in sys.argv[1:]:
    print(reading(files.read([Path(text)])).model)
"""


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_reading_depends_on_no_order_of_hashes(seed, tmp_path):
    """LTX-2.5 is also LTX-2 with an ending; a script's name is of more than one kind of words."""
    given = simpletuner("ltxvideo2", pretrained_model_name_or_path="Lightricks/LTX-2.5")
    texts = given | musubi(CACHED)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SEEDED, *texts], cwd=tmp_path, env=env, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["ltx-2.5", "qwen-image"]


@pytest.fixture
def predicted(monkeypatch, tmp_path):
    """Predictions of weights and activations that are made up, and the files of two trainers."""

    def need(row: Resolved) -> float:
        kept = 2 if "recomputes" in row.launch.traits else 16
        return 20 + kept * row.micro_batch

    made_up(monkeypatch, need)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for name, text in {"flux.sh": KOHYA, "full.sh": DIFFUSERS_FULL, "job.yaml": AI_TOOLKIT}.items():
        (tmp_path / name).write_text(text)


def plan(*words: str) -> int:
    return cli.main(["plan", "--gpu", "RTX-4090", *words])


def test_a_plan_predicts_the_configuration_then_its_own_answer(predicted, capsys):
    assert plan("--from", "flux.sh", "--json", "plan.json") == 0
    said = capsys.readouterr().out
    # its adapters of CLIP-L are not counted
    assert "needs at least 22.7" in said and "--blocks_to_swap 18 -> block_swap:blocks=27" in said
    order = [said.index(head) for head in ("sd-scripts: single", "Read from flux.sh", "Adapters: ")]
    assert order == sorted(order)
    assert "All weights:" not in said, "the answer is of adapters, as the configuration"
    assert json.loads(Path("plan.json").read_text())["read"]["model"] == "flux-dev"


def test_a_difference_adds_up_and_names_its_causes(predicted, capsys):
    assert plan("--from", "job.yaml", "--diff", "full.sh") == 0
    said = capsys.readouterr().out
    assert "full.sh needs 9.5 GiB more than job.yaml" in said
    rows = re.findall(r"^  [a-z ]+?  +([\d.]+) +([\d.]+) +([+-][\d.]+)$", said, re.M)
    first, second, change = (sum(map(float, column)) for column in zip(*rows, strict=True))
    assert (round(first, 1), round(second, 1), round(change, 1)) == (27.4, 36.9, 9.5)
    assert re.search(r"models that stay +4.7 +0.2 +-4.5", said), "its encoders are not cached"
    assert "recompute: checkpoint against none" in said
    assert re.search(r"activations, 7.0 GiB:.*checkpoint against none", said, re.S)


def test_an_option_without_its_file_is_refused(predicted, capsys):
    assert plan("--diff", "full.sh") == 2
    assert "give --from FILE" in capsys.readouterr().err
    assert plan("--from", "flux.sh", "job.yaml") == 2
    assert "files of sd-scripts and ai-toolkit" in capsys.readouterr().err


# ---- verdicts: what is not predicted stands beside them ----


@pytest.mark.parametrize(("size", "errs", "sure"), [
    *((size, errs, False) for size, errs in ((1, "more"), (1, ""), (90, "less"), (90, ""))),
    *((size, errs, True) for size, errs in ((1, "less"), (90, "more"))),
])  # fmt: skip
def test_a_verdict_is_sure_only_if_what_is_left_out_cannot_turn_it(size, errs, sure):
    fit = verdict.judge(planned_for("ddp"), prediction(size), cards.find("RTX-4090"))
    assert fit.verdict == ("fits" if size == 1 else "no")
    found = verdict.with_uncounted(fit, [Uncounted("a setting", "a reason", errs)])
    assert found.verdict == (fit.verdict if sure else "tight")


NO_OFFLOAD = ("layer_offloading: true,", "")
THREE_BITS = (NO_OFFLOAD, ("quantize: false", "quantize: true, qtype: uint3"))


@pytest.mark.parametrize("more", [[], ["--check"]])
@pytest.mark.parametrize(("gib", "card", "changes", "said"), [
    (20, "RTX-3060", (), ["cannot tell: ", "less than 20.7", "layer_offloading", "not counted"]),
    (20, "RTX-3060", THREE_BITS, ["cannot tell: ", "less than 20.7", "uint3", "not counted"]),
    (10, "RTX-4090", [NO_OFFLOAD], ["needs 10.7"]),
    # Qwen3-4B stays, and takes 7.5 GiB.
    (10, "RTX-4090", [NO_OFFLOAD, ("cache_text_embeddings: true, ", "")], ["needs 18.2"]),
])  # fmt: skip
def test_a_verdict_counts_what_stays_and_is_no_no_where_less_is_needed(
    more, gib, card, changes, said, monkeypatch, capsys, tmp_path
):
    made_up(monkeypatch, lambda row: gib)
    monkeypatch.setenv("COLUMNS", "400")
    text = (OWN / "layer-offloading.yaml").read_text()
    for before, after in changes:
        text = text.replace(before, after)
    (tmp_path / "a.yaml").write_text(text)
    code = cli.main(["plan", "--from", str(tmp_path / "a.yaml"), "--gpu", card, *more])
    lines = capsys.readouterr().out.splitlines()
    assert any(all(word in line for word in said) for line in lines), lines
    assert card != "RTX-3060" or code == bool(more)
