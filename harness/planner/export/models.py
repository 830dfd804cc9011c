"""Model and largest sample of a trainer's configuration."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from harness.planner.export.files import DATASET, Found
from harness.planner.export.launches import positive_int
from harness.planner.export.matching import Reading, same
from harness.subjects.library import families
from harness.subjects.names import suggestion
from strategies.base import BadInput

PATHS = ("--pretrained_model_name_or_path", "pretrained_model_name_or_path", "model.name_or_path",
         "--dit", "model.diffusers_path", "model.transformer_path", "model.ckpt_path")  # fmt: skip
"""Options that name the model's weights."""
BASE = "base_model_name"
"""Option that names the model's weights beside another that names its class, in OneTrainer."""
PLACES = ("path", "models/", "<", "./")
"""Beginnings of names of files, which no name of the Hub has."""
ALIKE = 0.01
"""Relative difference of two models' sizes below which either may be planned for the other."""


def model_of(
    table: Mapping[str, Any], options: Mapping[str, Any], script: str
) -> tuple[str, list[str]]:
    """Return the preset of a configuration's model, and what was assumed for it.

    Raises:
        BadInput: no model that is known, several of different sizes, or two that contradict.
    """
    every = _named(table, options, script)
    path = next((str(options[key]) for key in PATHS if options.get(key)), "")
    stem = PurePosixPath(path.replace("\\", "/")).name
    # The whole name first: LTX-2.5 has no ending.
    texts = (path, stem, stem.rpartition(".")[0])
    names = dict.fromkeys(families.canonical(text) for text in texts)
    found = [name for name in names if name in families.table()]
    if both := [name for name in found if name in every] or (found if not every else []):
        return both[0], []
    if found:
        raise BadInput(
            f"the weights are {found[0]}'s, and {script or 'the model'} is one of "
            f"{', '.join(every)}; correct one, or give --model NAME"
        )
    flavour = str(options.get("model_flavour", "")).lower()
    flavours = {name: table["models"][name].get("flavours", [flavour]) for name in every}
    able = [name for name in every if flavour in flavours[name]]
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith(PLACES)
    sure = len(able) == 1 and any(key in options for key in table.get("model", ()))
    if hub and not sure and not re.search(r"\.[a-z]{2,11}$", stem):
        hint = suggestion(path)
        stop = "" if hint.endswith(("?", ".")) else "."
        raise BadInput(f"model {path} is not known; {hint}{stop} Give --model NAME")
    if not able:
        keys = [key for key in (*table.get("model", ()), "model_flavour") if key in options]
        said = ", ".join(f"{key} {options[key]}" for key in keys) or "it"
        known = ", ".join(table["models"])
        raise BadInput(f"no model is known for {said}; give --model, of {known}")
    base = str(options.get(BASE, ""))
    if (own := families.canonical(base)) in able:
        return own, []
    sizes = [families.table()[name].parameters["built"] for name in able]
    if max(sizes) > (1 + ALIKE) * min(sizes):
        unknown = f"model {base} is not known; " if base else ""
        raise BadInput(f"{unknown}which of {', '.join(able)}? Give --model NAME")
    weights = f", for weights {path}" if path else ""
    return able[0], [f"model {able[0]}{weights}"] if path or len(able) > 1 else []


def _named(table: Mapping[str, Any], options: Mapping[str, Any], script: str) -> list[str]:
    """Return the presets that the table has for the script or the model's key."""
    found: dict[str, int] = {}
    for name, words in table["models"].items():
        some = [words[kind] for kind in ("any", "lora", "full") if kind in words]
        some += words.get("alike", [])
        found[name] = max(_agrees(word, table, options, script) for word in some)
    best = max(found.values(), default=0)
    return [name for name, score in found.items() if score == best > 0]


def _agrees(word: str, table: Mapping[str, Any], options: Mapping[str, Any], script: str) -> int:
    """Return how many words of a table's model agree with the options; 0 if one does not."""
    for key in table.get("model", ()):
        return int(same(word, options.get(key)))
    own, *rest = shlex.split(f"'' {word}" if word.startswith("-") else word)
    if script and own and PurePosixPath(own).name != script:
        return 0
    pairs = zip(rest[::2], rest[1::2], strict=True)
    asked = [pair for pair in pairs if not (script and pair[0] == "--network_module")]
    right = [any(same(value, one) for one in str(options.get(name)).split(","))
             for name, value in asked]  # fmt: skip
    return (len(right) + bool(script and own)) * all(right)


MEGAPIXELS = 20
"""Value of a resolution below which it is an area in megapixels, as in SimpleTuner."""
MOST = 10**6
"""Pixels or frames that no sample has."""
Size = tuple[int, int, int]
"""Frames, height and width in pixels."""


def sample_options(shape: Mapping[str, Any]) -> set[str]:
    """Return the options that describe a sample."""
    found = {one for key in ("resolution", "sides", "area", "frames", "batch", "text", "files")
             for one in _several(shape.get(key, ()))}  # fmt: skip
    return found | {f"--{one}" for one in found}


def _several(value: Any) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def read_sample(
    made: Reading, shape: Mapping[str, Any], options: Mapping[str, Any], found: Sequence[Found]
) -> None:
    """Put the largest sample of the files into a reading, and name the others.

    Raises:
        BadInput: a resolution that is no size.
    """
    files = [one for one in found if one.kind == DATASET]
    known = "files" not in shape or shape.get("own") or bool(files)
    usual = shape.get("usual", {}) if known else {}
    own = dict(options)
    sides = [positive_int(options.get(name)) for name in shape.get("sides", ())]  # width and height
    area = str(options.get(shape.get("area", "")))
    if sides and all(sides):
        own[shape["resolution"]] = sides
    elif re.fullmatch(r"\d{1,12}", area):
        own[shape["resolution"]] = math.isqrt(int(area))
    sources = [*(one.options for one in files), own]
    preset = families.table().get(made.model)
    moves = preset is None or bool(preset.family.every)  # into videos; an unknown model may
    groups = _groups(sources, shape)
    sizes: list[tuple[int, int, Size]] = []
    for group in groups or [{}]:
        batch = positive_int(group.get("batch")) or made.micro_batch
        for size in _sizes({**usual, **group}, shape):
            size = size if moves else (min(size[0], 1), *size[1:])
            sizes.append((math.prod((max(1, size[0]), *size[1:], batch)), batch, size))
    text = str(options.get(shape.get("text", ""), ""))
    made.text = positive_int(text)
    if not sizes:
        made.assumed.append("resolution: the model's usual one; the files name none")
        return
    largest = max(sizes)
    made.micro_batch = largest[1]
    _put(made, largest[2], {size for _, _, size in sizes})
    size_words = f"{made.resolution}{f', {made.frames} frames' * (made.frames > 1)}"
    if groups:
        made.means.append(("largest sample", f"{size_words}, micro batch {made.micro_batch}"))
    else:
        made.usual.append(("resolution", size_words, shape["where"]))


def _groups(sources: Sequence[Mapping[str, Any]], shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each dataset by their meaning; general ones count for all."""
    meanings = {one: key for key in ("resolution", "frames", "batch")
                for one in _several(shape.get(key, ()))}  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        for name, value in source.items():
            parts = name.removeprefix("--").split(".")
            above = ".".join(parts[:2]) if parts[0] in ("datasets", "directory") else parts[0]
            above = "" if len(parts) == 1 or parts[0] == "general" else above
            own = parts[0] in ("datasets", "directory")
            data = not above or own
            if own and len(parts) > 2:
                found.setdefault(above, {})  # one without a size has the general one
            if parts[-1] in meanings and data:
                found.setdefault(above, {}).setdefault(meanings[parts[-1]], value)
    usual = found.pop("", {})
    for one, source in itertools.product(list(found), sources):  # SimpleTuner's of no samples
        kind = str(source.get(f"{one}.dataset_type", "")).lower()
        if kind.endswith(("embeds", "cache")) or source.get(f"{one}.disabled") is True:
            found.pop(one, None)
    return [usual | one for one in found.values()] or ([usual] if usual else [])


def _sizes(group: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[Size]:
    frames = group.get("frames", 0)  # 0: the model's usual number
    most = max(map(positive_int, frames if isinstance(frames, list) else [frames]), default=0)
    if "resolution" not in group:
        return
    value = group["resolution"]
    if shape.get("buckets"):  # frames x height x width, several behind one option
        texts = value if isinstance(value, list) else [value]
        value = [_numbers(one) if isinstance(one, str) else one for one in texts]
    if isinstance(value, str):
        value = _numbers(value) or value
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    pair = isinstance(value, list) and len(value) == 2 and shape.get("pairs")
    every = [value] if pair or not isinstance(value, list) else value
    for one in every:
        numbers = one if isinstance(one, list) else [one]
        right = all(isinstance(n, (int, float)) and 0 < n < MOST for n in numbers)
        if not right or not 1 + bool(shape.get("buckets")) <= len(numbers) <= 3:
            raise BadInput(f"resolution is {value!r:.60}; give pixels, as 1024 or [960, 544]")
        if shape.get("buckets"):
            count, high, wide = numbers if len(numbers) == 3 else (most, *numbers)
            yield int(count), int(high), int(wide)
        elif len(numbers) > 1:
            count = int(numbers[2]) if len(numbers) == 3 else most
            yield count, int(numbers[1]), int(numbers[0])
        else:
            (side,) = numbers
            side = round(16 * math.sqrt(side)) * 64 if side < MEGAPIXELS else side
            yield most, int(side), int(side)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,6}", text)]


def _put(made: Reading, size: Size, every: set[Size]) -> None:
    """Set resolution and frames, as multiples that the model takes."""
    frames, height, width = size
    known = families.table().get(made.model)
    if known:
        step = known.usual.get("down", known.family.down) * known.family.tile
        height, width = (max(step, side // step * step) for side in (height, width))
        if every_n := known.family.every:
            made.frames = 1 + (frames - 1) // every_n * every_n if frames else 0
            made.assumed += [] if frames else ["frames: the model's usual number"]
    made.resolution = f"{height}x{width}"
    if (height, width) != size[1:]:
        made.assumed.append(
            f"{made.resolution} in the place of {size[1]}x{size[2]}, for its multiples of {step}"
        )
    if len(every) > 1:
        sizes_text = ", ".join(f"{h}x{w}" + f"x{f}" * (f > 1) for f, h, w in sorted(every))
        made.assumed.append(f"the largest of the sizes {sizes_text}: it decides the memory")
