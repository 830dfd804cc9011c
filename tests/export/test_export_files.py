"""What an export writes, without starting it: launch files and other trainers' options."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import cli
from harness.planner import verdict
from harness.planner.adapters.zero import NVME_BLANK
from harness.planner.export import settled, trainers
from harness.planner.export.settled import Bundle, bundle
from harness.planner.plan.candidates import asked_for
from harness.planner.plan.request import defaults, export_command, parameters, techniques
from harness.resolve import Resolved, resolve
from harness.spec import Spec
from harness.subjects.library import families
from harness.system import cards
from strategies import CATALOG
from strategies.base import BadInput, Slot
from strategies.engines.zero.config import buffer_sizes
from tests.made.recipes import SETTINGS
from tests.made.translated import REAL, models

FOLDER = Path("/home/me/take_home")
SHARDINGS = tuple(name for name, kind in CATALOG.items() if kind.slot is Slot.SHARD)
RECIPES = [text for texts in SETTINGS.values() for text in texts]
"""Every strategy, with each meaning of its parameters."""


def asked(recipe: str, device: str = "cuda", **more: Any) -> Resolved:
    """A recipe for eight GPUs, or one where it trains alone."""
    alone = recipe.startswith("single")
    spec = Spec(recipe=recipe, model="DiT-S/4:depth=2", data="synthetic:32", device=device)
    more = {"processes": 1 if alone else 8, "global_batch": 64, **more}
    return resolve(dataclasses.replace(spec, **more))


@functools.cache
def made(recipe: str, device: str = "cuda") -> Bundle:
    return bundle(asked(recipe, device), FOLDER, trainers.EXPORTED)


def possible(recipes: list[str]) -> list[str]:
    return [recipe for recipe in recipes if not asked(recipe).refusal]


# ---- launch files ----


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16:scale=1024", "bf16_pure"])
def test_every_number_of_a_launch_file_is_settled(sharding, precision):
    resolved = asked(f"{sharding}+{precision}+accumulate:steps=2", grad_clip=0.5)
    if resolved.refusal:
        pytest.skip(str(resolved.refusal))
    found = bundle(resolved, FOLDER, ())
    content = yaml.safe_load(found.files["accelerate.yaml"])
    assert content["num_processes"] == resolved.launch.processes
    texts = [text for name, text in found.files.items() if name.endswith(".json")]
    for text in texts:
        config = json.loads(text)
        assert '"auto"' not in text
        samples = config["train_micro_batch_size_per_gpu"] * 2 * resolved.launch.processes
        assert config["train_batch_size"] == 64 == samples
        assert config["gradient_clipping"] == 0.5
        wanted = buffer_sizes(resolved.subject.survey.sizes)
        fields = {k: v for k, v in config["zero_optimization"].items() if k in wanted}
        assert fields and fields == {k: wanted[k] for k in fields}
    word = settled.mixed_precision(resolved)
    in_yaml = content.get("mixed_precision")
    assert in_yaml == (None if texts else word), "accelerate refuses it beside a DeepSpeed file"


def test_what_only_the_user_knows_is_a_blank_that_is_named():
    found = made("zero3_nvme")
    (key,) = found.blanks
    name, path = key.split(": ")
    node = json.loads(found.files[name])
    for part in path.split("."):
        node = node[part]
    assert node == NVME_BLANK and "NVMe" in found.blanks[key]
    rest = [text for sharding in SHARDINGS for text in made(sharding).files.values()]
    assert sum(NVME_BLANK in text for text in rest) == 1, "and there is no other"


# ---- other trainers ----


@pytest.mark.parametrize("recipe", possible(RECIPES))
def test_nothing_of_a_recipe_is_left_out_in_silence(recipe):
    """Each part has options, or is named with a word; those that need neither are known."""
    resolved = asked(recipe)
    for each in made(recipe).translations:
        named = {thing.what for thing in (*each.lacks, *each.notes)}
        for part in techniques(resolved):
            if str(part) in named or part.name == "accumulate" or str(part) == "ema:place=none":
                continue
            given, usual = parameters(part), defaults(part)
            written = each.trainer["strategies"].get(part.name, ())
            rule = trainers.fitting(written, given, resolved.launch, usual)
            title = each.trainer["title"]
            if title == "SimpleTuner" and part.name == "adamw" and not rule:
                continue  # under DeepSpeed the optimizer is of the settings
            assert rule and {"options", "launch"} & set(rule), f"{title}: {part}"
            assert set(rule.get("options", ())) <= set(each.options)
            if "launch" in rule:
                assert rule["launch"] == {"--mixed_precision": settled.mixed_precision(resolved)}


@pytest.mark.parametrize("name", trainers.EXPORTED)
def test_traps_of_other_trainers_are_stepped_around(name):
    """No clipping, betas, adapters: each trainer spells them in its own, dangerous way."""
    launch = "single" if name == "ai-toolkit" else "ddp"
    recipe = f"{launch}+bf16_pure:autocast=on+lora:rank=16+checkpoint"
    more = {"model": models(name)[0], "data": "synthetic", "objective": "flow", "beta2": 0.95}
    text = bundle(asked(recipe, **more), FOLDER, [name]).files["trainers.md"]
    for words in REAL[name]["page"]:
        assert words in text.replace(" \\\n    ", "\n"), words
    blocks = dict(re.findall(r"```(json|yaml|toml)\n(.*?)```", text, re.S))
    readers = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads}
    for kind, block in blocks.items():
        assert readers[kind](block)


def test_a_trainer_that_cannot_shard_is_not_started_with_the_sharding_s_file():
    starts = {each.trainer["title"]: each.start for each in made("zero2+lora").translations}
    assert "accelerate.yaml" not in starts["musubi-tuner"] + starts["SimpleTuner"]
    assert str(FOLDER / "accelerate.yaml") in starts["diffusers' training scripts"]


# ---- the command ----

CARD = ["--gpu", "A100-80GB"]


def test_the_command_says_what_was_written_and_what_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["export", "zero3_nvme+bf16+checkpoint:keep=nothing", *CARD, "--out", "home"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    there = {path.name for path in (tmp_path / "home").iterdir()} - {".headroom.json"}
    assert there == {"accelerate.yaml", "deepspeed.json", "trainers.md"}
    assert all(name in text for name in there)
    assert "nvme_path" in text and "checkpoint:keep=nothing" in text
    last = "  accelerate launch --config_file home/accelerate.yaml YOUR_TRAINER.py"
    assert text.splitlines()[-1] == last


@pytest.mark.parametrize("words", [
    ["ddp+zero3", *CARD], ["ddp+bf16", "--gpu", "V100"], ["ddp+chekpoint", *CARD],
    ["ddp", *CARD, "--global-batch", "7"],
])  # fmt: skip
def test_what_a_plan_refuses_is_refused_in_its_words(words, tmp_path, capsys):
    assert cli.main(["export", *words, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert cli.main(["plan", "--recipes", *words]) == 2 or "V100" in words
    planned = capsys.readouterr()
    assert said == planned.err or said.removeprefix("error: ddp+bf16: ").strip() in planned.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("recipe", "more", "told"), [
    ("fsdp2+tp:ranks=2", CARD, "cannot be exported.*tp_size"),
    ("ddp+sp:ranks=2", CARD, "cannot be exported.*sp_size"),
    ("pp:stages=2", [*CARD, "--gpus", "2"], "cannot be exported.*no stages"),
    *((recipe, ["--cpu"], "only on GPUs") for recipe in ("fsdp2", "fsdp2_offload+bf16", "hsdp")),
    ("ddp", [*CARD, "--trainers", "musubi-tunr"], "did you mean 'musubi-tuner'"),
])  # fmt: skip
def test_what_cannot_be_exported_is_refused_by_name(recipe, more, told, tmp_path, capsys):
    words = ["export", recipe, "--gpus", "4", "--global-batch", "8", *more]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 2
    assert re.search(told, capsys.readouterr().err) and not (tmp_path / "out").exists()


ASKED = [
    ("single+bf16_pure+lora:rank=16", []),
    ("ddp+bf16+checkpoint", ["--gpus", "2", "--global-batch", "6", "--host-memory", "100.7GiB"]),
    ("zero3+bf16+lora+accumulate:steps=2", ["--gpus", "8", "--global-batch", "32"]),
    ("single+bf16", ["--gpus", "8", "--also", "CLIP-L"]),
    ("fsdp2+bf16", ["--gpus", "16", "--nodes", "4", "--resolution", "512"]),
    ("zero2_offload", ["--gpus", "16", "--text", "100", "--set", "num_layers=4"]),
]
SIZED = ["--gpu-memory 8GiB", "--gpu-memory 10GB", "--gpu-memory 23.7GiB"]
MODELS = [*families.table(), "DiT-XL/2", "DiT-S/4:depth=2",
          "depth=12,width=768,heads=12,patch=2"]  # fmt: skip


def test_an_export_is_of_what_was_planned_for_every_preset_and_card():
    """And a plan of what was exported is of the same again."""
    parser, tried = cli._parser(), 0
    on = [f"--gpu {name}" for name in cards.table()] + SIZED
    for place in range(4 * max(len(on), len(MODELS))):
        recipe, more = ASKED[place % len(ASKED)]
        words = ["--recipes", recipe, "--model", MODELS[place % len(MODELS)], *more]
        options = parser.parse_args(["plan", *on[place % len(on)].split(), *words])
        try:
            asked = asked_for(options)
        except BadInput:
            continue
        row, gpu, tried = asked.resolved[0], asked.gpu, tried + 1
        line = shlex.split(export_command(verdict.cannot(row, gpu, "")))[1:]
        again = asked_for(parser.parse_args(line))
        assert again.resolved[0].spec == row.spec
        for name in ("memory_bytes", "name", "also", "host_memory"):
            assert getattr(again.gpu, name) == getattr(gpu, name), name
        alike = (again.gpu.node, again.gpu.beside) == (gpu.node, gpu.beside)
        assert alike or row.spec.processes <= gpu.node
    assert tried > 2 * max(len(on), len(MODELS))


def test_several_machines_are_in_the_launch_file_and_their_ranks_are_blanks(tmp_path, capsys):
    words = ["--gpus", "16", "--nodes", "4", *CARD, "--out", str(tmp_path)]
    assert cli.main(["export", "fsdp2+bf16", *words]) == 0
    content = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert (content["num_machines"], content["num_processes"]) == (4, 16)
    text = capsys.readouterr().out
    assert "machine_rank" in text and content["main_process_ip"] == "FILL.IN.THE.FIRST.MACHINE"
    assert "main_process_ip" in text
