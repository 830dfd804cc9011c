"""What an export says in a trainer's words, parsed by the options that this trainer really has.

The options were read in each trainer's source (its file in ``tests/made/trainers`` names files and
commit): one that is misspelt, of another type, or whose value is not allowed, fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from harness.planner import edits
from harness.planner.export import command, trainers
from harness.planner.plan import tracing
from harness.resolve import resolve
from harness.subjects.library import families
from tests.made.recipes import SETTINGS
from tests.made.translated import FEW, REAL, asked, models

TAKEN = {"int": int, "float": float, "str": str}
"""Types of argparse; a "bool" there is any text, as those trainers have it."""
HELD = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "map": (dict,),
        "list": (list,)}  # fmt: skip
"""What JSON or YAML holds for them."""
EVERY = [text for texts in SETTINGS.values() for text in texts]


class Misfit(Exception):
    """An option that the trainer would not take."""


class Strict(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise Misfit(message)


def real(name: str, script: str = "") -> dict[str, dict[str, Any]]:
    """A trainer's options as its source declares them: one read by hand, or one made from it."""
    made = trainers.options(name, script)
    if made:
        choices = REAL[name].get("choices", {})
        return {k.removeprefix("--"): {"choices": choices.get(k), **v} for k, v in made.items()}
    told = [REAL[name]["options"], REAL[name].get("scripts", {}).get(script, {})]
    choices = REAL[name]["choices"]
    return {o: {"type": kind, "choices": choices.get(o)}
            for some in told for kind, names in some.items() for o in names}  # fmt: skip


def parser_of(name: str, script: str) -> Strict:
    parser = Strict(allow_abbrev=False)
    for option, one in real(name, script).items():
        kind, needed = one["type"], one.get("required", False)
        if kind == "flag":
            parser.add_argument(f"--{option}", action="store_true")
            continue
        taken = TAKEN.get(kind.removeprefix("some "), str)
        many = {"nargs": "+"} if kind.startswith("some ") else {}
        more = {"choices": one.get("choices"), "required": needed}
        parser.add_argument(f"--{option}", type=taken, **more, **many)
    return parser


def parse(name: str, made: trainers.Translation) -> None:
    """As accelerate and the trainer read the command, the file and the blanks of the page.

    Raises:
        Misfit: one would not.
    """
    text = trainers.written(made)
    block = re.search(r"```sh\n(.*?)\n```", text, re.S)
    words = shlex.split(block[1].replace("\\\n", " ")) if block else []
    if words[:2] == ["accelerate", "launch"]:
        launch_command_parser().parse_args(words[2:])
    if made.trainer["form"] == "flags":
        place = next(i for i, word in enumerate(words) if word.endswith(".py"))
        parser_of(name, words[place]).parse_args(words[place + 1 :])
        return
    blanks = made.blanks if name in trainers.EXPORTED else {}
    own = {k: v for k, v in blanks.items() if k not in OWN}
    hold(name, {**made.options, **{re.sub(r"\.\d+\.", ".", k): v for k, v in own.items()}})


OWN = {"type", "device", "training_folder"}
"""Keys of ai-toolkit's process and not of a class (jobs/process/BaseTrainProcess.py)."""


def hold(name: str, options: Mapping[str, Any]) -> None:
    """Each is a key of the file, and its value of the key's type."""
    known = real(name)
    for option, value in options.items():
        if option == "__version":  # OneTrainer's BaseConfig.py 69
            continue
        if option not in known:
            raise Misfit(f"unrecognized key: {option}")
        kind = known[option]["type"]
        right = kind == "any" or (
            isinstance(value, HELD[kind]) and (kind == "bool" or not isinstance(value, bool))
        )
        allowed = known[option].get("choices") or [value]
        if not right or value not in allowed:
            raise Misfit(f"{option}: {value!r} is no {kind}, or none of {allowed}")
        if isinstance(value, dict):
            inner = {f"{option}.{key}": held for key, held in value.items()}
            hold(name, {k: v for k, v in inner.items() if option != "train.optimizer_params"})


# ---- the record ----


@pytest.mark.parametrize("name", trainers.known())
def test_every_model_of_a_table_is_one_that_the_trainer_names(name):
    for scripts in trainers.table(name)["models"].values():
        for word in (scripts[kind] for kind in ("any", "lora", "full") if kind in scripts):
            if word.split()[0].endswith(".py"):
                script, *more = shlex.split(word)
                names = {one.removeprefix("--") for one in more[::2]}
                assert names <= set(real(name, script)), word
            elif word.startswith("--"):
                parser_of(name, "").parse_args(shlex.split(word))
            else:
                hold(name, {REAL[name]["key"]: word})


# ---- what an export says ----


@pytest.mark.parametrize("name", trainers.known())
def test_what_an_export_says_is_taken_by_the_trainer(name):
    parsed = 0
    for place, model in enumerate(models(name)):
        for recipe in FEW if place else [*EVERY, *FEW]:
            resolved = asked(recipe, model)
            if resolved is None:
                continue
            made = trainers.translated(name, resolved, "accelerate.yaml")
            if "SCRIPT" in made.start or "MODEL" in made.start:
                continue  # said to be the options of one's own script
            try:
                parse(name, made)
            except Misfit as misfit:
                raise AssertionError(f"{model}, {recipe}: {misfit}") from None
            parsed += 1
    assert parsed > 40


@pytest.mark.parametrize("name", trainers.EXPORTED)
def test_each_value_in_capitals_is_named_as_a_blank(name):
    for model in models(name):
        resolved = asked("single+bf16_pure+lora", model)
        if resolved is None:
            continue
        made = trainers.translated(name, resolved, "accelerate.yaml")
        capitals = {k for k, v in made.blanks.items() if re.match("[A-Z]{2}", str(v))}
        named = set(re.findall("^- `(.*?)`", trainers.section(made), re.M))
        assert capitals and capitals - named == set(), model


@pytest.mark.parametrize("name", trainers.known())
@pytest.mark.parametrize("recipe", ["single+bf16_pure+lora", "single+bf16_pure", "ddp+bf16_pure"])
def test_weights_of_16_bits_are_asked_for_or_the_page_says_that_the_plan_does_not_hold(
    name, recipe
):
    made = trainers.translated(name, asked(recipe, "flux-dev"), "accelerate.yaml")
    option = REAL[name].get("sixteen")  # without one it loads 16 bits alone
    word = made.options.get(option) if option else "bf16"
    named = str(word).lower().replace("_", "") in ("bf16", "bfloat16")
    assert named or "bf16_pure" in made.unplanned
    if "lora" in recipe:
        assert "bf16_pure" not in made.unplanned, "frozen weights can be 16 bits everywhere"
    elif name == "diffusers":
        assert "bf16_pure" in made.unplanned
        assert "No command: cannot express bf16_pure" in trainers.page("", [made])


@pytest.mark.parametrize("name", trainers.known())
@pytest.mark.parametrize("dtype", ["model", "fp32"])
def test_adapters_are_of_the_planned_type_or_the_page_says_that_they_are_not(name, dtype):
    part = "lora" if dtype == "model" else "lora:dtype=fp32"
    made = trainers.translated(name, asked(f"single+bf16_pure+{part}", models(name)[0]), "a.yaml")
    parse(name, made)
    kept = REAL[name]["adapters"] in (dtype, "either")
    assert (part in made.unplanned) == (not kept and dtype == "fp32")
    told = any("lora:dtype=fp32 is planned so" in note.why for note in made.notes)
    assert told == (not kept and dtype == "model")


@pytest.mark.parametrize("name", trainers.known())
def test_clipping_that_nobody_asked_for_is_not_set(name):
    resolved = asked("single+bf16+lora", "flux-dev")
    for clip in (0.0, 0.5):
        spec = dataclasses.replace(resolved.spec, grad_clip=clip)
        made = trainers.translated(name, resolve(spec), "accelerate.yaml")
        values = [
            v for option, v in made.options.items() if "clip" in option or "grad_norm" in option
        ]
        lacked = "clip" in {missing.what for missing in made.lacks}
        assert (0.5 in values or lacked) if clip else not values
        assert clip or any("clip" in why for _, why in made.notes), "its own default is named"


@pytest.mark.parametrize("name", REAL)
def test_an_option_that_a_trainer_lacks_is_noticed(name):
    for wrong in REAL[name]["wrong"]:
        made = trainers.translated(name, asked("ddp+bf16+lora", models(name)[0]), "accelerate.yaml")
        parse(name, made)
        made.options |= wrong
        with pytest.raises(Misfit):
            parse(name, made)


SWAPPED = {
    ("sd-scripts", "flux-dev"): (19, 38, 0, 2), ("diffusion-pipe", "flux-dev"): (19, 38, 1, 2),
    ("diffusion-pipe", "flux2-dev"): (8, 48, 1, 2),
    ("musubi-tuner", "hunyuanvideo"): (20, 40, 1, 1),
}  # fmt: skip
"""Trainer and model -> its double and single blocks, how many single ones it moves beside two for
each double one, and how many of each have to stay. Source: sd-scripts 48d368f,
library/flux_models.py 974; diffusion-pipe 8f83dbf, models/flux.py 412 and its siblings;
musubi-tuner 30c658c, hunyuan_model/models.py 680."""


@pytest.mark.parametrize(("name", "model"), SWAPPED)
def test_a_number_of_swapped_blocks_is_one_that_the_trainer_takes(name, model):
    doubles, singles, more, left = SWAPPED[name, model]
    for blocks in edits.swaps(asked("single+bf16_pure+lora", model).subject.depth):
        resolved = asked(f"single+bf16_pure+block_swap:blocks={blocks}+lora", model)
        made = trainers.translated(name, resolved, "a.yaml")
        given = made.options.get("blocks_to_swap", made.options.get("--blocks_to_swap"))
        assert (given is None) == bool(made.unplanned)
        if given is None:
            assert model.startswith("flux2")
            continue
        double, single = given // 2, 2 * (given - given // 2) + more
        assert double <= doubles - left and single <= singles - left, blocks
        assert abs(blocks - (double + single)) <= 2


@pytest.mark.parametrize("name", trainers.EXPORTED)
@pytest.mark.parametrize("part", ["lora+block_swap:blocks=3", "qlora", "lora+prune"])
def test_what_a_trainer_cannot_express_has_no_command(name, part):
    """The export says so in one line: a command would train something else than was planned."""
    resolved = asked(f"single+bf16_pure+{part}", models(name)[0])
    if resolved is None:
        pytest.skip("no recipe")
    made = trainers.translated(name, resolved, "a.yaml")
    text = trainers.section(made)
    assert ("No command: cannot express" in text) == bool(made.unplanned) != ("```" in text)


def test_a_trainer_that_leaves_swapped_blocks_on_the_device_swaps_none():
    """SimpleTuner, helpers/musubi_block_swap.py at bc8e6ab: a forward alone calls stream_out."""
    row = asked("single+bf16_pure+block_swap:blocks=43+lora+checkpoint", "flux-dev")
    assert [n for n in trainers.EXPORTED if trainers.has(n, row)] == ["onetrainer", "sd-scripts"]


def test_a_trainer_without_a_part_is_named_with_its_nearest_recipe_that_fits():
    """By predictions that ship: no other recipe of the trainer that fits has fewer other parts."""
    parser, name = argparse.ArgumentParser(), "sd-scripts"
    command.add_arguments(parser)
    words = ["single+bf16_pure+qlora:rank=16+checkpoint", "--model", "flux-dev"]
    options = parser.parse_args([*words, "--gpu", "RTX-4090"])
    planned = command.asked_for(options)
    row = planned.resolved[0]
    others = command.without_recipes(options, row).resolved
    text = command.nearest_of(lambda: others, planned.gpu, row, name)
    label = re.search(r"that fits: (\S+), needs", text)[1]
    near = resolve(dataclasses.replace(row.spec, recipe=label))
    assert trainers.has(name, near) and tracing.known(near, planned.gpu).fits
    assert not trainers.has(name, row)


@pytest.mark.parametrize("name", trainers.EXPORTED)
def test_a_model_that_a_trainer_lacks_has_no_command(name):
    every, own = set(families.table()), set(trainers.table(name)["models"])
    if not every - own:
        pytest.skip("it has all")
    made = trainers.translated(name, asked("single+bf16_pure+lora", min(every - own)), "a.yaml")
    assert "it has no such model" in trainers.section(made) and "```" not in trainers.section(made)


@pytest.mark.parametrize("name", trainers.known())
def test_an_export_names_the_planned_samples_and_the_options_of_their_size(name):
    """A trainer's own default is 512 to 1024 pixels, and decides memory as much as the recipe."""
    for model, size in (("flux-dev", "1024x1024"), ("wan2.1-1.3b", "480x832 of 81 frames")):
        resolved = asked("single+bf16_pure+lora", model)
        beside = trainers.translated(name, resolved, "a.yaml").beside
        (line,) = (line for line in beside if "samples of at most" in line)
        assert size in line
        named = re.findall(r"`([^`]+)`", line)
        shape = trainers.table(name)["shape"]
        known = " ".join(map(str, [*shape.values()]))
        assert named and all(option.lstrip("-") in known for option in named)
        assert any("frame" in option for option in named) == ("frames" in shape and "wan" in model)
