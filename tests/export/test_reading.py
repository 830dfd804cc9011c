"""A trainer's configuration is read by the tables that an export writes with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from harness import cli
from harness.planner import pool
from harness.planner.export import files, lines, trainers
from harness.planner.export.matching import Reading
from harness.planner.export.reading import TOGETHER, reading
from harness.resolve import Resolved
from harness.subjects.library.subject import Library
from strategies import parse
from strategies.base import BadInput, Slot
from tests.made.predictions import prediction
from tests.made.translated import FEW, asked, models

SPREAD = [
    *FEW,
    "single+fp32",
    "single+tf32",
    "single+bf16",
    "single+bf16_pure:autocast=on",
    "single+bf16_pure:autocast=on+lora:rank=16+checkpoint+adam8bit",
    "single+bf16_pure+lora:rank=4,dtype=fp32+accumulate:steps=4",
    "ddp+bf16_pure:autocast=on+lora:dtype=fp32+checkpoint",
    "zero2+bf16+checkpoint",
    "zero2_offload+bf16_master",
    "zero3_offload+bf16+checkpoint",
    "fsdp2+bf16_pure+checkpoint",
    "hsdp+bf16",
    "single+bf16_pure+dora:rank=4",
    "single+bf16_pure+qlora:rank=16,dtype=fp32+checkpoint",
    "single+bf16_pure:autocast=on+lokr:rank=16,factor=8",
    "single+cast:to=fp8+bf16_pure+lora:dtype=fp32",
    "single+bf16_pure:autocast=on+block_swap:blocks=27+lora+checkpoint",
    "single+checkpoint:every=2",
    "single+bf16_pure+checkpoint+offload_activations:what=checkpoints",
    "single+bf16_pure:autocast=on+adamw_bf16:write=kahan",
    "single+bf16_pure+sgd:momentum=0.9",
    "single+bf16+adafactor",
    "ddp+bf16+paged_adam8bit",
    "single+compile:scope=model",
    "single+attend:kernel=math",
]


@pytest.fixture(autouse=True)
def names_alone(monkeypatch):
    """Names of attention's layers, for which a model would be built in seconds."""
    monkeypatch.setattr(Library, "attention_linears", ("attn.to_q",))


def exported(folder: Path, name: str, resolved: Resolved) -> list[Path]:
    """The files of an export for one trainer, as its page shows them."""
    folder.mkdir()
    made = trainers.translated(name, resolved, str(folder / "accelerate.yaml"))
    blocks = re.findall(r"```(\w+)\n(.*?)\n```", trainers.written(made), re.S)
    named = {"sh": "run.sh", "yaml": "your-job.yaml", "json": "config.json", "toml": "config.toml"}
    for kind, text in blocks:
        if kind == "yaml":
            text = yaml.safe_dump({"config": {"process": [yaml.safe_load(text)]}})
        (folder / named[kind]).write_text(text)
    file = resolved.launch.engine.file
    content = {**file.content, "num_processes": resolved.launch.processes}
    content["mixed_precision"] = lines.mixed_precision(resolved)
    if "deepspeed_config" in content:
        content["deepspeed_config"] = {"deepspeed_config_file": str(folder / "deepspeed.json")}
        (folder / "deepspeed.json").write_text(json.dumps(file.settings))
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(content))
    settings = "\n".join(text.rpartition(": ")[2] for text in made.beside)
    (folder / "data.toml").write_text(f"[general]\n{settings}\n[[datasets]]\n")
    found = [folder / "run.sh", *(folder / named[kind] for kind, _ in blocks if kind != "sh")]
    return [*found, folder / "data.toml"] if made.beside else found


def parts(recipe: str) -> dict[Slot, str]:
    """Strategies by slot; under DeepSpeed, bf16 is bf16_master."""
    text = recipe.replace("bf16_master", "bf16")
    return {part.slot: str(part) for part in parse(text, ema=False).strategies}


def pairs(name: str) -> list[tuple[str, str]]:
    """The spread on a model that the trainer trains whole too, and two recipes on each other."""
    usual = {"musubi-tuner": "z-image"}.get(name, "flux-dev")
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
        equal += not off
    assert equal >= 5


@pytest.mark.parametrize("name", trainers.known())
def test_every_row_of_a_reading_names_what_there_is(name):
    table = trainers.table(name)
    for row in table.get("read_as", ()):
        assert row.get("is") or row.get("parts")
        parse("+".join(filter(None, ["single", row.get("parts", "")])))
    assert all(source for some in table["defaults"].values() for _, source in some.values())
    assert {errs for errs, _ in table["unpredicted"].values()} <= {"more", "less", ""}


# ---- public configurations ----

KOHYA = """
accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py \\
  --pretrained_model_name_or_path="<path to FLUX.1 model>" --clip_l="<path to CLIP-L model>" \\
  --dataset_config="my_flux_dataset_config.toml" --network_module=networks.lora_flux \\
  --network_dim=16 --network_alpha=1 --learning_rate=1e-4 --optimizer_type="AdamW8bit" \\
  --sdpa --mixed_precision="fp16" --gradient_checkpointing --blocks_to_swap=18 --cache_latents \\
  --cache_text_encoder_outputs
"""
"""kohya-ss/sd-scripts, docs/flux_train_network.md at 063ef10."""
MUSUBI = """
accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 \\
    src/musubi_tuner/wan_train_network.py --task t2v-1.3B \\
    --dit path/to/wan2.1_xxx_bf16.safetensors \\
    --dataset_config path/to/toml --sdpa --mixed_precision bf16 --fp8_base \\
    --optimizer_type adamw8bit --learning_rate 2e-4 --gradient_checkpointing \\
    --network_module networks.lora_wan --network_dim 32 --timestep_sampling shift
"""
"""kohya-ss/musubi-tuner, docs/wan.md at 12aab39."""
MUSUBI_FULL = """
accelerate launch --num_cpu_threads_per_process 1 src/musubi_tuner/zimage_train.py \\
    --dit path/to/dit_model --vae path/to/vae_model --dataset_config path/to/toml \\
    --sdpa --mixed_precision bf16 --gradient_checkpointing --optimizer_type adafactor \\
    --learning_rate 1e-6 --fused_backward_pass --max_grad_norm 0 \\
    --optimizer_args "relative_step=False" "scale_parameter=False" "warmup_init=False"
"""
"""kohya-ss/musubi-tuner, docs/zimage.md at 30c658c."""
MUSUBI_DATA = """
[general]
resolution = [960, 544]
batch_size = 1
[[datasets]]
video_directory = "C:\\\\videos"
target_frames = [1, 25, 45]
[[datasets]]
image_directory = "/path/to/image_dir"
batch_size = 4
"""
"""kohya-ss/musubi-tuner, docs/dataset_config.md at 30c658c, with a dataset of images."""
DIFFUSERS = """
export MODEL_NAME="Qwen/Qwen-Image"
accelerate launch train_dreambooth_lora_qwen_image.py \\
  --pretrained_model_name_or_path=$MODEL_NAME  \\
  --instance_data_dir=$INSTANCE_DIR \\
  --mixed_precision="bf16" --resolution=1024 --train_batch_size=1 \\
  --gradient_accumulation_steps=4 --use_8bit_adam --learning_rate=2e-4 --push_to_hub
"""
"""huggingface/diffusers, examples/dreambooth/README_qwen.md at 58eb52c."""
DIFFUSERS_FULL = """
export MODEL_NAME="black-forest-labs/FLUX.1-dev"
accelerate launch train_dreambooth_flux.py --pretrained_model_name_or_path=$MODEL_NAME \\
  --mixed_precision="bf16" --resolution=1024 --train_batch_size=1 \\
  --gradient_accumulation_steps=4 --optimizer="prodigy" --learning_rate=1.
"""
"""huggingface/diffusers, examples/dreambooth/README_flux.md at 12ea447."""
SIMPLETUNER = """{
    "base_model_precision": "int8-quanto", "controlnet": false,
    "data_backend_config": "config/examples/multidatabackend-small-dreambooth-512px.json",
    "gradient_checkpointing": true, "learning_rate": 1e-4, "lora_alpha": 16, "lora_rank": 16,
    "lora_type": "standard", "mixed_precision": "bf16", "model_family": "flux",
    "model_type": "lora", "optimizer": "adamw_bf16", "quantize_via": "cpu",
    "train_batch_size": 1, "use_ema": false, "validation_resolution": "1024x1024",
}"""
"""bghira/SimpleTuner, simpletuner/examples/flux.peft-lora/config.json at 2a7b387."""
AI_TOOLKIT = """
job: extension
config:
  process:
    - type: 'sd_trainer'
      network: {type: "lora", linear: 16, linear_alpha: 16}
      datasets:
        - folder_path: "C:\\\\path\\\\to\\\\images"
          resolution: [ 512, 768, 1024 ]
      train: {batch_size: 1, gradient_accumulation_steps: 1, gradient_checkpointing: true,
              optimizer: "adamw8bit", lr: 1e-4, ema_config: {use_ema: true, ema_decay: 0.99},
              dtype: bf16}
      model: {name_or_path: "black-forest-labs/FLUX.1-dev", is_flux: true, quantize: true}
      sample: {width: 1024}
"""
"""ostris/ai-toolkit, config/examples/train_lora_flux_24gb.yaml at 27a03a9."""
FINETRAINERS = """
#!/bin/bash
BACKEND="ptd"
NUM_GPUS=2
DDP_2="--parallel_backend $BACKEND --pp_degree 1 --dp_degree 2 --dp_shards 1 --cp_degree 1"
parallel_cmd=(
  $DDP_2
)
model_cmd=(
  --model_name "wan"
  --pretrained_model_name_or_path "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
)
# We target just the attention projections layers for LoRA training here.
training_cmd=(
  --training_type "lora"
  --batch_size 1
  --rank 32
  --target_modules "blocks.*(to_q|to_k|to_v|to_out.0)"
  --gradient_checkpointing
  # --resume_from_checkpoint 3000
)
if [ "$BACKEND" == "accelerate" ]; then
  accelerate launch --gpu_ids $CUDA_VISIBLE_DEVICES train.py "${parallel_cmd[@]}" \\
    "${model_cmd[@]}"
elif [ "$BACKEND" == "ptd" ]; then
  torchrun --standalone --nproc_per_node=$NUM_GPUS train.py "${parallel_cmd[@]}" \\
    "${model_cmd[@]}" "${training_cmd[@]}" --optimizer "adamw" --lr 5e-5
fi
"""
"""a-r-r-o-w/finetrainers, examples/training/sft/wan/crush_smol_lora/train.sh at f476c37."""
PIPE = """
micro_batch_size_per_gpu = 1
pipeline_stages = 1
gradient_accumulation_steps = 1
gradient_clipping = 1.0
activation_checkpointing = true
[model]
type = 'hunyuan-video'
transformer_path = '/data2/hunyuan_video_720_cfgdistill_fp8_e4m3fn.safetensors'
dtype = 'bfloat16'
transformer_dtype = 'float8'
[adapter]
type = 'lora'
rank = 32
dtype = 'bfloat16'
[optimizer]
type = 'adamw_optimi'
lr = 2e-5
"""
"""tdrussell/diffusion-pipe, examples/main_example.toml at 8f83dbf."""
PIPE_DATA = "resolutions = [512]\nframe_buckets = [1, 33]\n[[directory]]\npath = '/home'\n"
"""tdrussell/diffusion-pipe, examples/dataset.toml at 8f83dbf."""
DIFFSYNTH = """
accelerate launch examples/wanvideo/model_training/train.py \\
  --dataset_base_path data/diffsynth_example_dataset/wanvideo/Wan2.1-T2V-1.3B \\
  --height 480 \\
  --width 832 \\
  --model_id_with_origin_paths "Wan-AI/Wan2.1-T2V-1.3B:diffusion_pytorch_model*.safetensors,\
Wan-AI/Wan2.1-T2V-1.3B:models_t5_umt5-xxl-enc-bf16.pth,Wan-AI/Wan2.1-T2V-1.3B:Wan2.1_VAE.pth" \\
  --learning_rate 1e-4 \\
  --lora_base_model "dit" \\
  --lora_target_modules "q,k,v,o,ffn.0,ffn.2" \\
  --lora_rank 32
"""
"""DiffSynth-Studio, examples/wanvideo/model_training/lora/Wan2.1-T2V-1.3B.sh, fed7b18."""
DIFFSYNTH_FULL = """
accelerate launch --config_file b.yaml examples/flux/model_training/train.py \\
  --dataset_base_path data/diffsynth_example_dataset/flux/FLUX.1-dev \\
  --max_pixels 1048576 \\
  --model_id_with_origin_paths "black-forest-labs/FLUX.1-dev:flux1-dev.safetensors,\
black-forest-labs/FLUX.1-dev:ae.safetensors" \\
  --learning_rate 1e-5 \\
  --trainable_models "dit" \\
  --use_gradient_checkpointing
"""
"""DiffSynth-Studio, examples/flux/model_training/full/FLUX.1-dev.sh, fed7b18."""
DIFFSYNTH_LAUNCH = """
deepspeed_config: {gradient_accumulation_steps: 1, offload_optimizer_device: none,
                   offload_param_device: none, zero3_init_flag: false, zero_stage: 2}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
"""
"""DiffSynth-Studio, examples/flux/model_training/full/accelerate_config.yaml, fed7b18."""
BFP, FP32 = "bf16_pure:autocast=on", "dtype=fp32"

PUBLIC = [
    ({"a.sh": KOHYA}, "flux-dev",
     f"single+{BFP}+block_swap:blocks=27+lora:rank=16,{FP32}+checkpoint+adam8bit", ""),
    ({"a.sh": MUSUBI, "b.toml": MUSUBI_DATA}, "wan2.1-1.3b",
     f"single+{BFP}+cast:to=fp8+lora:rank=32,{FP32}+checkpoint+adam8bit", "544x960 45 1"),
    ({"a.sh": MUSUBI_FULL}, "z-image", "single+bf16+checkpoint+adafactor", ""),
    ({"a.sh": DIFFUSERS}, "qwen-image",
     f"single+{BFP}+lora:rank=4,targets=attention+adam8bit+accumulate:steps=4", "1024x1024 0 1"),
    ({"a.sh": DIFFUSERS_FULL}, "flux-dev", "single+bf16+prodigy+accumulate:steps=4",
     "1024x1024 0 1"),
    ({"a.json": SIMPLETUNER}, "flux-dev",
     f"single+{BFP}+cast+lora:rank=16+checkpoint+adamw_bf16:write=kahan", "1024x1024 0 1"),
    ({"a.yaml": AI_TOOLKIT}, "flux-dev",
     f"single+bf16_pure+cast:to=fp8+lora:rank=16,{FP32}+checkpoint+adam8bit", "1024x1024 0 1"),
    ({"a.sh": FINETRAINERS}, "wan2.1-1.3b",
     f"ddp+bf16_pure+lora:rank=32,targets=attention,{FP32}+checkpoint", ""),
    ({"a.toml": PIPE, "b.toml": PIPE_DATA}, "hunyuanvideo",
     f"single+{BFP}+cast:to=fp8+lora:rank=32+checkpoint+adamw_bf16:write=kahan", "512x512 33 1"),
    ({"a.sh": DIFFSYNTH}, "wan2.1-1.3b", "single+bf16_pure+lora:rank=32+checkpoint",
     "480x832 81 1"),
    ({"a.sh": DIFFSYNTH_FULL, "b.yaml": DIFFSYNTH_LAUNCH}, "flux-dev", "zero2+bf16+checkpoint",
     "1024x1024 0 1"),
]  # fmt: skip


def read(folder: Path, named: dict[str, str], **more) -> Reading:
    folder.mkdir(exist_ok=True)
    for name, text in named.items():
        (folder / name).write_text(text)
    return reading(files.read([folder / name for name in named]), **more)


@pytest.mark.parametrize(("named", "model", "recipe", "sample"), PUBLIC)
def test_a_public_configuration_has_its_recipe(named, model, recipe, sample, tmp_path):
    made = read(tmp_path, named)
    assert (made.model, parts(made.recipe)) == (model, parts(recipe))
    assert not sample or f"{made.resolution} {made.frames} {made.micro_batch}" == sample


def test_what_is_not_predicted_is_named_with_its_direction(tmp_path):
    made = read(tmp_path, {"a.sh": DIFFUSERS_FULL})
    assert "prodigy" in made.recipe and not made.unpredicted
    assert ("--gradient_checkpointing", "off") in [one[:2] for one in made.usual]
    full = read(tmp_path, {"a.sh": MUSUBI_FULL})
    assert any(
        t.startswith("--fused_backward_pass: the trainer needs less") for t in full.unpredicted
    )
    assert "--vae" in full.unread and "--optimizer_type" not in full.unread
    assert not read(tmp_path, {"a.sh": FINETRAINERS}).unpredicted, "each of its settings has a row"
    wan = read(tmp_path, {"a.sh": DIFFSYNTH})
    assert any("no --task: the trainer needs more" in text for text in wan.unpredicted)
    assert any("recomputes" in text for text in wan.differs)
    assert not any("--learning_rate" in text for text in wan.unpredicted)
    assert "--use_gradient_checkpointing" not in [name for name, *_ in wan.usual]


def test_an_unset_variable_is_named_and_the_largest_size_counts(tmp_path):
    text = DIFFUSERS.replace("--train_batch_size=1", "--train_batch_size=$BATCH")
    made = read(tmp_path, {"a.sh": text})
    assert made.micro_batch == 4 and any("$BATCH" in said for said in made.assumed)
    made = read(tmp_path, {"a.yaml": AI_TOOLKIT})
    assert any("512x512, 768x768, 1024x1024" in said for said in made.assumed)


def test_accelerate_and_deepspeed_files_are_read_as_launch_files(tmp_path):
    folder = Path(__file__).parents[2] / "launch_configs"
    for name in ("zero2", "zero3_offload", "zero3_hpz", "fsdp2", "hsdp", "fsdp2_offload"):
        named = [folder / f"{name}.yaml", folder / f"{name}.json"]
        made = reading(files.read([p for p in named if p.exists()]), "flux-dev", 2)
        assert made.recipe.split("+")[0] == name and not made.assumed[:-1]
    inline = "distributed_type: DEEPSPEED\nnum_processes: 4\nmixed_precision: bf16\n"
    inline += "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
    text = DIFFUSERS_FULL.replace("launch", "launch --config_file b.yaml")
    made = read(tmp_path, {"a.sh": text, "b.yaml": inline})
    assert made.recipe.startswith("zero2_offload+bf16") and made.processes == 4


TWICE = KOHYA.replace("--sdpa", "--use_8bit_adam").replace("AdamW8bit", "Lion")
SEVERAL = AI_TOOLKIT.replace("'sd_trainer'", "x\n    - type: y")
WRONG = [
    ("a.toml", "", "is empty"),
    ("a.toml", "[model", "a.toml"),
    ("a.toml", "x = 1", "is no configuration of"),
    ("a.json", "{", "a.json"),
    ("a.json", "[]", "has no settings"),
    ("a.json", "[" * 60 + "]" * 60, "nested deeper"),
    ("a.yaml", "a: &b [*b]", "alias"),
    ("a.yaml", "- 1", "has datasets alone"),
    ("a.yaml", "config: {process: 3}", "is no configuration"),
    ("a.yaml", SEVERAL, "several trainings"),
    ("a.yaml", AI_TOOLKIT.replace("512, 768", "big"), "resolution is ['big', 1024]"),
    ("a.sh", "echo hi", "no command trains"),
    ("a.sh", "python train_flux.py --a", "train_flux.py in line 1"),
    ("a.sh", "accelerate 'launch", "line 1: a quote is not closed"),
    ("a.sh", KOHYA + MUSUBI, "keep the command that you run"),
    ("a.sh", TWICE, "contradict each other"),
    ("a.sh", DIFFUSERS.replace("Qwen-Image", "Qwen-Imagine"), "did you mean 'qwen-image'"),
    ("a.sh", DIFFUSERS.replace("size=1", "size=two"), "give one whole number"),
    ("a.sh", DIFFUSERS.replace("bf16", "fp8"), "--mixed_precision is fp8"),
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


@pytest.fixture
def predicted(monkeypatch, tmp_path):
    """Predictions of weights and activations that are made up, and the files of two trainers."""

    def need(row: Resolved) -> float:
        kept = 2 if "recomputes" in row.launch.traits else 16
        return 20 + kept * row.micro_batch

    monkeypatch.setattr(
        pool, "predict_all", lambda rows, *_, **__: [prediction(need(r)) for r in rows]
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    for name, text in {"flux.sh": KOHYA, "full.sh": DIFFUSERS_FULL, "job.yaml": AI_TOOLKIT}.items():
        (tmp_path / name).write_text(text)


def plan(*words: str) -> int:
    return cli.main(["plan", "--gpu", "RTX-4090", *words])


def test_a_plan_predicts_the_configuration_then_its_own_answer(predicted, capsys):
    assert plan("--from", "flux.sh", "--json", "plan.json") == 0
    said = capsys.readouterr().out
    assert "needs 22.5" in said and "--blocks_to_swap 18 -> block_swap:blocks=27" in said
    order = [said.index(head) for head in ("sd-scripts: single", "Adapters: ", "Read from flux.sh")]
    assert order == sorted(order)
    assert "All weights:" not in said, "the answer is of adapters, as the configuration"
    assert max(len(line) for line in said.splitlines() if "./run.sh" not in line) <= 80
    assert json.loads(Path("plan.json").read_text())["read"]["model"] == "flux-dev"


def test_options_replace_the_settings_of_a_file(predicted, capsys):
    words = ["--global-batch", "2", "--resolution", "512", "--gpus", "2", "--check"]
    assert plan("--from", "flux.sh", *words) == 1
    said = capsys.readouterr().out
    assert "ddp+" in said and "global batch 2" in said


def test_a_difference_adds_up_and_names_its_causes(predicted, capsys):
    assert plan("--from", "job.yaml", "--diff", "full.sh") == 0
    said = capsys.readouterr().out
    assert "full.sh needs 14.0 GiB more than job.yaml" in said
    rows = re.findall(r"^  [a-z ]+?  +([\d.]+) +([\d.]+) +([+-][\d.]+)$", said, re.M)
    first, second, change = (sum(map(float, column)) for column in zip(*rows, strict=True))
    assert (round(first, 1), round(second, 1), round(change, 1)) == (22.5, 36.5, 14.0)
    assert "recompute: checkpoint against none" in said
    assert re.search(r"activations, 7.0 GiB:.*checkpoint against none", said, re.S)


def test_an_option_without_its_file_is_refused(predicted, capsys):
    assert plan("--diff", "full.sh") == 2
    assert "give --from FILE" in capsys.readouterr().err
    assert plan("--from", "flux.sh", "job.yaml") == 2
    assert "files of sd-scripts and ai-toolkit" in capsys.readouterr().err


def test_the_page_shows_what_public_configurations_become():
    page = (Path(__file__).parents[2] / "docs/how-to/from-your-trainer.md").read_text()
    shown = [recipe for _, _, recipe, _ in PUBLIC if f"`{recipe}`" in page]
    assert len(shown) == len(trainers.known())
