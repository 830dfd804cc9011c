"""A trainer's configuration is read by the tables that an export writes with."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from harness import ROOT, cli
from harness.planner.export import files, settled, trainers
from harness.planner.export.matching import Reading
from harness.planner.export.reading import TOGETHER, reading
from harness.resolve import Resolved, resolve
from harness.subjects.library.subject import Library
from strategies import parse
from strategies.base import BadInput, Slot
from tests.made.predictions import made_up
from tests.made.translated import FEW, REAL, asked, models, trained_whole

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


@pytest.fixture(autouse=True)
def names_alone(monkeypatch):
    """Names of attention's layers, for which a model would be built in seconds."""
    monkeypatch.setattr(Library, "attention_linears", ("attn.to_q",))


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
    name = recipe.partition("+")[0]
    file = Path(name[1:]) if name.startswith("@") else ROOT / "launch_configs" / f"{name}.yaml"
    plugin = yaml.safe_load(file.read_text())["deepspeed_config"]
    zero = json.loads((file.parent / Path(plugin["deepspeed_config_file"]).name).read_text())
    zero = zero["zero_optimization"]
    where = (
        (zero.get(f"offload_{of}") or {}).get("device", "none") for of in ("optimizer", "param")
    )
    return zero["stage"], *where


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


MUSUBI, DIFFUSERS, AI_TOOLKIT, FINETRAINERS, DIFFSYNTH = map(
    text, ("musubi-tuner", "diffusers", "ai-toolkit", "finetrainers", "diffsynth-studio")
)
SECOND = (text(name, 1) for name in ("sd-scripts", "musubi-tuner", "diffusers"))
KOHYA, MUSUBI_FULL, DIFFUSERS_FULL = SECOND
PUBLIC = [pytest.param(one, id=f"{n}-{i}") for n, told in REAL.items()
          for i, one in enumerate(told["published"])]  # fmt: skip


def left(made: Reading) -> list[str]:
    """What a reading does not predict."""
    return [str(one) for one in made.unpredicted]


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
    assert not any("learning_rate" in said for said in left(made))


def test_what_is_not_predicted_is_named_with_its_direction(tmp_path):
    made = read(tmp_path, {"a.sh": DIFFUSERS_FULL})
    assert "prodigy" in made.recipe and not made.unpredicted
    assert ("--gradient_checkpointing", "off") in [one[:2] for one in made.usual]
    full = read(tmp_path, {"a.sh": MUSUBI_FULL})
    assert "--vae" in full.unread and "--optimizer_type" not in full.unread
    for text in FINETRAINERS, DIFFSYNTH:
        made = read(tmp_path, {"a.sh": text})
        assert made.also == ["UMT5-XXL", "Wan-VAE"] and "device too" not in " ".join(left(made))
        assert made.phases == ["encode:step"]
    wan = read(tmp_path, {"a.sh": DIFFSYNTH})
    assert "--use_gradient_checkpointing" not in [name for name, *_ in wan.usual]


TARGETS = [
    ("krea2", {}, "targets=attention,reach=model"),  # its text fusion has layers of these names
    (
        "flux",
        {"flux_lora_target": "context"},
        "targets=add_k_proj/add_q_proj/add_v_proj/to_add_out",
    ),
    ("flux", {"flux_lora_target": "all+ffs"}, "proj_mlp/proj_out,reach=model"),  # the last layer
]


@pytest.mark.parametrize(("family", "more", "ends"), TARGETS)
def test_adapters_stand_in_the_layers_of_the_trainer_s_own_list(family, more, ends, tmp_path):
    """SimpleTuner gives peft the endings of names (helpers/models/MODEL/model.py)."""
    given = {"model_family": family, "model_type": "lora", "lora_rank": 8, **more}
    made = read(tmp_path, {"config.json": json.dumps(given)})
    adapters = parts(made.recipe)[Slot.ADAPT]
    assert adapters.startswith("lora") and adapters.endswith(ends)
    assert not any("linear layer of the blocks" in said for said in made.differs)


ONETRAINER = {"model_type": "FLUX_DEV_1", "training_method": "LORA", "train_dtype": "BFLOAT_16",
              "transformer": {"weight_dtype": "FLOAT_8"},
              "layer_filter": "transformer_block"}  # fmt: skip
OFFLOADED = {"gradient_checkpointing": "CPU_OFFLOADED", "layer_offload_fraction": 0.5}
OLDER = {
    "recomputed in host memory": (OFFLOADED, {"swap": "block_swap:blocks=28",
                                              "recompute": "checkpoint",
                                              "offload": "offload_activations:what=checkpoints"}),
    "recomputed on the device": ({**OFFLOADED, "enable_activation_offloading": False},
                                 {"swap": "block_swap:blocks=28", "recompute": "checkpoint",
                                  "offload": None}),
    "kept": ({"gradient_checkpointing": "OFF"}, {"recompute": None}),
    "kept, before version 5": ({"gradient_checkpointing": False}, {"recompute": None}),
    "of the type of all parts": ({"transformer": {"weight_dtype": "NONE"},
                                  "weight_dtype": "NFLOAT_4"},
                                 {"adapt": "qlora:rank=16,dtype=fp32"}),
}  # fmt: skip


@pytest.mark.parametrize("case", OLDER)
def test_a_file_of_an_older_onetrainer_means_what_its_migration_makes_of_it(case, tmp_path):
    """modules/util/config/TrainConfig.py, migrations 4, 9 and 10; most files in public are older
    than version 11."""
    more, wanted = OLDER[case]
    made = read(tmp_path, {"config.json": json.dumps({**ONETRAINER, **more})})
    found = parts(made.recipe)
    assert {slot: found.get(Slot[slot.upper()]) for slot in wanted} == wanted
    assert ("training_method LORA", "adapters") in made.means
    assert not {*more} & {*made.unread}


def test_a_saving_that_the_recipe_cannot_have_is_named_with_its_direction(tmp_path):
    whole = {**ONETRAINER, **OFFLOADED, "training_method": "FINE_TUNE"}
    whole |= {"optimizer": {"optimizer": "ADAFACTOR"},
              "transformer": {"weight_dtype": "BFLOAT_16"}}  # fmt: skip
    made = read(tmp_path, {"config.json": json.dumps(whole)})
    (said,) = [one for one in left(made) if "layer_offload_fraction" in one]
    assert "the trainer needs less" in said and "block_swap" in said


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
    assert (back.recipe, left(back)) == (recipe, [])


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


def test_compiled_blocks_are_left_out_before_what_they_exclude(tmp_path):
    """A plan compares no compiled blocks, and the swapped ones decide the memory."""
    given = PIPE.format(type="wan", more="compile = true\nblocks_to_swap = 20")
    made = read(tmp_path, {"a.toml": given, "dataset.toml": "resolutions = [512]"},
                model="wan2.1-14b")  # fmt: skip
    assert parts(made.recipe)[Slot.SWAP] == "block_swap:blocks=20"
    assert parts(made.recipe)[Slot.CAST] == "cast:to=fp8,layers=all"
    assert sum(said.startswith("compile") for said in left(made)) == 1


def test_frames_are_the_trainer_s_own_where_a_video_s_file_names_none(tmp_path):
    given = {**ONETRAINER, "model_type": "HUNYUAN_VIDEO"}
    made = read(tmp_path, {"config.json": json.dumps(given)})
    assert (made.frames, made.resolution) == (25, "512x512")
    several = {**ONETRAINER, "resolution": "512,768"}
    made = read(tmp_path, {"config.json": json.dumps(several)})
    assert any("sizes 512x512, 768x768:" in said for said in made.assumed), made.assumed
    given = "resolutions = [512]\nframe_buckets = [1, 33]\n[[directory]]\nresolutions = [1024]"
    files = {"a.toml": PIPE.format(type="flux", more=""), "dataset.toml": given}
    assert read(tmp_path, files).resolution == "1024x1024", "an image has no frames"


def test_a_class_of_several_models_is_told_by_the_weights(tmp_path):
    given = {**ONETRAINER, "model_type": "FLUX_2"}
    base = {"base_model_name": "black-forest-labs/FLUX.2-dev"}
    assert read(tmp_path, {"config.json": json.dumps(given | base)}).model == "flux2-dev"
    base = {"base_model_name": "black-forest-labs/FLUX.2-klein-base-9B"}
    assert read(tmp_path, {"config.json": json.dumps(given | base)}).model == "flux2-klein-9b"
    for version in ("klein-9b", "klein-base-9b"):
        script = f"flux_2_train_network.py --model_version {version}"
        text = MUSUBI.replace("wan_train_network.py --task t2v-1.3B", script)
        assert read(tmp_path, {"train.sh": text}).model == "flux2-klein-9b"
    base = {"base_model_name": "somebody/FLUX.2-pruned"}
    with pytest.raises(BadInput, match="pruned is not known; which of flux2-dev"):
        read(tmp_path, {"config.json": json.dumps(given | base)})


def test_a_model_that_edits_images_is_not_the_one_that_draws_them(tmp_path):
    for version, model in (("edit", ""), ("edit-2509", ""), ("edit-2511", "-2511")):
        script = f"qwen_image_train_network.py --model_version {version}"
        text = MUSUBI.replace("wan_train_network.py --task t2v-1.3B", script)
        made = read(tmp_path, {"train.sh": text})
        assert made.model == f"qwen-image-edit{model}"
    path = {"--dit path/to/wan2.1_xxx_bf16.safetensors": "--dit x/qwen_image_edit_2511.safetensors"}
    for one, other in path.items():
        assert read(tmp_path, {"train.sh": text.replace(one, other)}).model == made.model
    job = yaml.safe_load(AI_TOOLKIT)
    job["config"]["process"][0]["model"] = {
        "arch": "qwen_image_edit_plus", "name_or_path": "Qwen/Qwen-Image-Edit-2509"
    }  # fmt: skip
    assert read(tmp_path, {"a.yaml": yaml.safe_dump(job)}).model == "qwen-image-edit"


def test_groups_of_shards_are_hsdp(tmp_path):
    mesh = "--dp_degree 4 --dp_shards 2"
    text = re.sub(r"--dp_degree \d+ --dp_shards \d+", mesh, FINETRAINERS)
    assert mesh in text
    made = read(tmp_path, {"train.sh": text})
    assert (made.recipe.partition("+")[0], made.processes) == ("hsdp:replicate=4", 8)


@pytest.mark.parametrize("dtype", ["fp16", "bfloat16"])
def test_frozen_weights_of_ai_toolkit_take_16_bits_however_they_are_spelt(dtype, tmp_path):
    job = yaml.safe_load(AI_TOOLKIT)
    job["config"]["process"][0]["train"]["dtype"] = dtype
    made = read(tmp_path, {"a.yaml": yaml.safe_dump(job)})
    assert parts(made.recipe)[Slot.PRECISION].startswith("bf16_pure")


def test_all_weights_of_sd_scripts_train_no_text_encoder(tmp_path):
    words = "--mixed_precision bf16 --full_bf16 --optimizer_type adafactor --resolution 512"
    made = read(tmp_path, {"a.sh": f"accelerate launch flux_train.py {words}"}, model="flux-dev")
    assert "T5-XXL" in made.also
    assert not any("adapters of text encoders" in said for said in left(made))


def test_named_layers_of_adapters_are_not_predicted_in_silence(tmp_path):
    job = yaml.safe_load(AI_TOOLKIT)
    network = job["config"]["process"][0]["network"]
    network["network_kwargs"] = {"only_if_contains": [".img_attn."]}
    made = read(tmp_path, {"a.yaml": yaml.safe_dump(job)})
    (said,) = [one for one in left(made) if "only_if_contains" in one]
    assert "the trainer needs less" in said
    given = {"model_family": "flux", "model_type": "lora", "peft_lora_target_modules": ["to_q"]}
    made = read(tmp_path, {"config.json": json.dumps(given)})
    assert any(said.startswith("peft_lora_target_modules") for said in left(made))


def test_an_unset_variable_is_named_and_the_largest_size_counts(tmp_path):
    text = DIFFUSERS.replace("--train_batch_size=1", "--train_batch_size=$BATCH")
    made = read(tmp_path, {"a.sh": text})
    assert made.micro_batch == 4 and any("$BATCH" in said for said in made.assumed)
    made = read(tmp_path, {"a.yaml": AI_TOOLKIT})
    assert any("512x512, 768x768, 1024x1024" in said for said in made.assumed)


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
    order = [said.index(head) for head in ("sd-scripts: single", "Adapters: ", "Read from flux.sh")]
    assert order == sorted(order)
    assert "All weights:" not in said, "the answer is of adapters, as the configuration"
    assert max(len(line) for line in said.splitlines() if "./run.sh" not in line) <= 80
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
