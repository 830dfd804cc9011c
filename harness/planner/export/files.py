"""Settings in a trainer's own files: commands, shell scripts, TOML, YAML, JSON and env files.
The files are parsed and never executed. ``reading`` gives their settings a meaning."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from harness.planner.export import trainers
from strategies.base import BadInput
from strategies.files import (
    DEEPEST,
    LARGEST_CONFIG,
    bounded_memory,
    nested,
    parse_yaml,
    printable,
    read_foreign,
)
from strategies.words import nearest

MOST_DOTS = 500
"""Most dots in a line of TOML."""
MOST_TEXT = 2**16
"""Most characters that the variables of one statement stand for."""
ACCELERATE, DEEPSPEED, DATASET = "accelerate", "deepspeed", "dataset"
"""Kinds of files that belong to no single trainer."""
MARKS = {
    ACCELERATE: {"distributed_type", "compute_environment"},
    DEEPSPEED: {"zero_optimization", "train_micro_batch_size_per_gpu"},
    DATASET: {"datasets", "directory", "resolutions", "frame_buckets"},
}
"""Kind -> keys, of which each file of the kind has one."""
LINKS = {"--config_file": "", "--config": "", "--accelerate_config": "",
         "--deepspeed_config_file": DEEPSPEED,
         "deepspeed_config.deepspeed_config_file": DEEPSPEED}  # fmt: skip
"""Options that name another file to read, beside each trainer's ``shape.file`` -> its kind."""
ABOVE = 5
"""Folders above a file in which the files that it names are looked for: trainers start in their
own folder, and keep configurations below it."""
TRAINS = re.compile(r"(?:.*[\\/])?(?!test)[^\\/]*\.py")
"""Scripts that may train."""
HINT = "give a trainer's command, shell script, TOML, YAML, JSON or env file"


@dataclass
class Found:
    """Settings of one file.
    ``kind``: a trainer's name, or one of ``MARKS``. ``options``: name -> value, nested keys joined
    by dots; ``data``: the same as the file nests it, of ``MARKS`` alone. ``launcher``: options of
    accelerate, torchrun or deepspeed. ``remarks``: what could not be read. ``lost``: option -> file
    that it names, which is not there, and in whose place none is given."""

    path: Path
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    script: str = ""
    launcher: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    data: Mapping[str, Any] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


def read(paths: Sequence[Path]) -> list[Found]:
    """Read the files and those that they name.

    Raises:
        BadInput: a file that cannot be read, or that is no configuration of a known trainer.
    """
    found: list[Found] = []
    seen = set[str]()
    waiting = [(path, "") for path in paths]
    while waiting:
        path, kind = waiting.pop(0)
        real = os.path.realpath(path)  # Path.resolve raises for a link to itself
        if real in seen:
            continue
        seen.add(real)
        found.append(one := _read(path, kind))
        table = trainers.table(one.kind) if one.kind in trainers.known() else {"shape": {}}
        own = table["shape"].get("files", ())  # options that name the file of the datasets
        for option, value in {**one.launcher, **one.options}.items():
            if option in (*LINKS, *own) and isinstance(value, str):
                above = [*path.parents[:ABOVE], Path()]
                there = (folder / value for folder in above if os.path.isfile(folder / value))
                linked = [(other, one.kind) for other in there][:1]
                waiting += linked
                one.lost |= {} if linked else {option: value}
    for one in found:
        others = {other.kind for other in found if other is not one}
        lost, one.lost = one.lost, {}
        for option, value in lost.items():  # for which no file of a kind that serves is given
            plain = {ACCELERATE} if option in one.launcher else {DATASET, one.kind}
            served = {LINKS[option]} if LINKS.get(option) else plain
            one.lost |= {} if others & served else {option: value}
        one.remarks += [f"{k} names {v:.80}, which is not there; give it as another FILE"
                        for k, v in one.lost.items() if k not in one.launcher]  # fmt: skip
    return found


def _read(path: Path, kind: str) -> Found:
    """Return the settings of a file; ``kind`` is the trainer whose command names it, or empty."""
    try:
        text = printable(read_foreign(path, LARGEST_CONFIG).replace("\r\n", "\n"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise BadInput(f"{path}: {why}; {HINT}") from None
    if not text.strip():
        raise BadInput(f"{path} is empty; {HINT}")
    try:
        with bounded_memory():
            suffix = path.suffix.lower()
            if suffix == ".toml":
                # The library's time and memory grow with the square of a dotted key's parts.
                if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
                    raise ValueError(f"a line with more than {MOST_DOTS} dots")
                data = tomllib.loads(text)
            elif suffix == ".json" or text.lstrip().startswith("{"):
                # Some examples of SimpleTuner end in a comma, which JSON forbids.
                data = json.loads(re.sub(r",(\s*[}\]])", r"\1", text))
            else:  # None for a script
                data = parse_yaml(text) if suffix in (".yaml", ".yml") else None
        if any(depth > DEEPEST for _, depth in nested(data)):
            raise ValueError(f"nested deeper than {DEEPEST} levels")
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: {str(error).splitlines()[0]:.200}; correct the file") from None
    return _script(path, text) if data is None else _of_data(path, data, kind)


def flat(data: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested settings by names joined by dots; an item of a list is named by its index."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        key, inner = printable(str(name)), value
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            inner = {str(i): item for i, item in enumerate(value) if isinstance(item, Mapping)}
        if isinstance(inner, Mapping) and inner:
            found |= flat(inner, f"{above}{key}.")
        elif value is not None and not isinstance(value, Mapping):
            found[f"{above}{key}"] = printable(value) if isinstance(value, str) else value
    return found


def _of_data(path: Path, data: Any, named: str) -> Found:
    if data and isinstance(data, list):
        data = {"datasets": data}
    if not isinstance(data, Mapping) or not data:
        raise BadInput(f"{path} has no settings; {HINT}")
    if not isinstance(data.get("model"), Mapping):
        kind = next((name for name, keys in MARKS.items() if keys & set(data)), "")
        if kind:
            return Found(path, kind, flat(data), data=data)
    options = flat(data)
    if any(name.startswith("config.process.1.") for name in options):
        raise BadInput(f"{path}: config.process has several trainings; keep one of them")
    for name in trainers.known():
        table = trainers.table(name)
        if table["form"] == "flags" and path.suffix != ".toml":
            continue
        root = table.get("root", "")
        own = {key.removeprefix("--").removeprefix(root): v for key, v in options.items()}
        if table["form"] == "flags":  # sections have no meaning there
            own = {f"--{key.rpartition('.')[2]}": v for key, v in options.items()}
        if name == named or any(key in own for key in table["known_by"]):
            return Found(path, name, own)
    raise BadInput(f"{path} is no configuration of {', '.join(trainers.known())}; {HINT}")


PUNCTUATION = ";&|()\n"
COMMENT = re.compile(
    r"(\\.|'[^']*'|\"(?:\\.|[^\"\\])*\")|(?<!\S)#[^\n]*|^[ \t]*(?:REM |::)[^\n]*", re.M | re.S
)
"""A comment of a shell or of Windows; what is quoted is the group, and no comment."""
CONTINUED = re.compile(r"(?m)^(?:.*[\\^`][ \t]*\n)+.*")
IF_SET = re.compile(r"\$\{(\w+):?\+([^}]*)\}")
"""Words that a shell uses if a variable has a value."""
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[@\])?(?::?-([^}]*))?\})")
ASSIGNED = re.compile(r"(\w+)=(.*)", re.S)
OPTION = re.compile(r"--?[A-Za-z]")


def _statements(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the first line and the words of each statement; an array is one statement.
    ``$_`` stands for the output of a command, which nobody knows."""
    if path.suffix.lower() in (".bat", ".cmd", ".ps1"):  # a backslash is of a path there
        text = re.sub(r"%(\w+)%", r"${\1}", text).replace("\\", "/")
    text = IF_SET.sub(lambda found: found[2] * bool(re.search(rf"\b{found[1]}=[^\s;]", text)), text)
    text = re.sub(r"\$\([^()\n]*\)", "$_", COMMENT.sub(lambda found: found[1] or "", text))

    def joined(found: re.Match[str]) -> str:
        """Return continued lines as one, with the others empty: lines keep their numbers."""
        return re.sub(r"[\\^`][ \t]*\n", " ", found[0]) + "\n" * found[0].count("\n")

    lexer = shlex.shlex(CONTINUED.sub(joined, text) + "\n", None, True, PUNCTUATION)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    line, first, words, inside = 1, 0, list[str](), False
    try:
        for token in lexer:
            if not token or set(token) - set(PUNCTUATION):
                first = first if words else line
                words.append(token)
            else:
                opens = "(" in token and bool(words) and words[-1].endswith("=")
                inside = opens or (inside and ")" not in token)
                if words and not inside:
                    yield first, words
                    words = []
            line += token.count("\n")
    except ValueError:
        raise BadInput(f"{path}: line {line}: a quote is not closed; close it") from None


class _Script:
    """Variables of a shell script, and the tests of each ``if`` around a statement.
    A test is None if it depends on more than the script."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.tests: list[list[bool | None]] = []
        self.room = MOST_TEXT

    def command(self, raw: Sequence[str]) -> list[str]:
        """Return the words of a command; nothing for an assignment, or what does not run."""
        self.room = MOST_TEXT
        words = [one for word in raw for one in self._expanded(word)]
        while words and words[0] in ("then", "do", "else", "{"):
            if words.pop(0) == "else" and self.tests:
                self._branch(True)
        head = words[0] if words else ""
        if head == "if":
            self.tests.append([_test(words)])
        elif head == "elif" and self.tests:
            self._branch(_test(words))
        elif head == "fi" and self.tests:
            self.tests.pop()
        elif all(tests[-1] is not False for tests in self.tests):
            if head == "eval" or (VARIABLE.fullmatch(raw[0]) and " " in head):
                return shlex_words(" ".join(words[head == "eval" :]))
            return self._assigned(words)
        return []

    def _branch(self, test: bool | None) -> None:
        self.tests[-1].append(False if True in self.tests[-1] else test)

    def _assigned(self, words: list[str]) -> list[str]:
        """Keep the variables that a statement sets; return its other words."""
        words = words[1:] if words and words[0] in ("export", "set", "SET") else words
        if words and re.fullmatch(r"\w+=", words[0]):
            self.names[words[0][:-1]] = words[1:]
            return []
        while words and (found := ASSIGNED.match(words[0])):
            options = found[2].startswith("-")
            self.names[found[1]] = shlex_words(found[2]) if options else [found[2]]
            words = words[1:]
        return words

    def _expanded(self, word: str) -> list[str]:
        """Return the words that a word stands for; an unknown variable stays as it is written."""
        variable = VARIABLE.fullmatch(word)
        if variable and (known := self.names.get(variable[1] or variable[2])) is not None:
            return self._counted(known)

        def value(found: re.Match[str]) -> str:
            known = self.names.get(found[1] or found[2])
            text = (found[3] or found[0]) if known is None else " ".join(known)
            return self._counted([text])[0]

        return [VARIABLE.sub(value, word)]

    def _counted(self, words: list[str]) -> list[str]:
        """Return words that a variable stands for, within the room of the statement.
        Nested variables double their text with each line."""
        self.room -= sum(map(len, words)) + len(words)
        if self.room < 0:
            raise ValueError(f"variables stand for more than {MOST_TEXT} characters")
        return words


def shlex_words(text: str) -> list[str]:
    """Return the words of a text; the text itself if its quotes do not match."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def _test(words: Sequence[str]) -> bool | None:
    """Return the result of ``if [ A == B ]``; None if it depends on more than the script."""
    inner = [word for word in words[1:] if word not in ("[", "]", "[[", "]]")]
    known = len(inner) == 3 and inner[1] in ("=", "==", "!=") and "$" not in inner[0] + inner[2]
    return (inner[0] == inner[2]) == (inner[1] != "!=") if known else None


def _script(path: Path, text: str) -> Found:
    """Return the settings of the command that trains, or of an env file."""
    script, trainings = _Script(), list[tuple[int, Found]]()
    strange: list[str] = []
    for line, raw in _statements(path, text):
        try:
            words = script.command(raw)
        except ValueError as error:
            raise BadInput(f"{path}: line {line}: {error}") from None
        found = _training(path, words)
        if found:
            known = any((one.options, one.script) == (found.options, found.script)
                        for _, one in trainings)  # fmt: skip
            trainings += [] if known else [(line, found)]
        else:
            strange += [f"{word} in line {line}" for word in words if TRAINS.fullmatch(word)]
    caches = [pair for pair in trainings if "data_process" in str(pair[1].options.get("--task"))]
    trainings = [pair for pair in trainings if pair not in caches] or trainings
    if len(trainings) > 1:
        lines = " and ".join(f"line {line} ({one.script})" for line, one in trainings[:3])
        raise BadInput(f"{path}: {lines} train; keep the command that you run")
    if trainings:
        return trainings[0][1]
    table = trainers.table("simpletuner")
    own = {table["environment"].get(n, n.lower()): " ".join(v) for n, v in script.names.items()}
    if set(own) & set(table["known_by"]):
        return Found(path, "simpletuner", own)
    scripts = {name for name in _scripts() if name.endswith(".py")}
    reason = f"{strange[-1]} is no script that is known" if strange else "no command trains in it"
    near = nearest(PurePosixPath(strange[-1].split()[0]).name, scripts) if strange else HINT
    raise BadInput(f"{path}: {reason}; {near}")


@functools.cache
def _scripts() -> Mapping[str, str]:
    found = {"simpletuner": "simpletuner", "run.py": "ai-toolkit"}
    for name in trainers.known():
        table = trainers.table(name)
        if table["form"] == "flags":
            words = (w for m in table["models"].values() for w in m.values() if isinstance(w, str))
            found |= {PurePosixPath(word.split()[0]).name: name for word in words}
    return found


def _of_options(options: Mapping[str, Any]) -> str:
    """Return the trainer of a script ``train.py``, whose name does not tell it."""
    for name in trainers.known():
        table = trainers.table(name)
        words = [str(m.get("any", "-")) for m in table["models"].values()]
        own = any(PurePosixPath(word.split()[0]).name == "train.py" for word in words)
        _, script, after = table["start"].partition("train.py")
        started = table["form"] != "flags" and script and {*flags(after.split())} <= {*options}
        if started or (own and {*table["known_by"]} & {*options}):
            return name
    return "finetrainers"


def _training(path: Path, words: Sequence[str]) -> Found | None:
    """Return the settings of a command if it starts a known trainer."""
    scripts = _scripts()
    names = [PurePosixPath(word.replace("\\", "/")).name for word in words]
    at = next((i for i, n in enumerate(names) if n in scripts or n == "train.py"), None)
    if at is None or (names[at] == "simpletuner" and words[at + 1 : at + 2] != ["train"]):
        return None
    options, launcher = flags(words[at + 1 :]), flags(words[:at])
    kind = scripts.get(names[at], "")
    if names[at] == "train.py":
        kind = _of_options(options)
    declared, given, options = trainers.options(kind, names[at]), options, {}
    for name, value in given.items():  # argparse takes a beginning of a name
        able = [one for one in declared if one.startswith(name) and name not in declared]
        if len(able) > 1:
            raise BadInput(f"{path}: {name} could be {', '.join(able[:3])}; write one of them")
        options[able[0] if able else name] = value
    if kind == "ai-toolkit":
        options = {"--config": words[at + 1]} if len(words) > at + 1 else {}
    if trainers.table(kind)["form"] != "flags":  # its own file has all settings
        launcher, options = {**launcher, **options}, {}
    found = Found(path, kind, options, names[at], launcher)
    for name, value in {**launcher, **options}.items():
        unset = re.search(r"\$[\w{(]+[^ ]*", str(value))
        if unset:
            found.remarks.append(f"{name} is {value}, which the file does not set")
            options.pop(name, launcher.pop(name, None))
    return found


def flags(words: Sequence[str]) -> dict[str, Any]:
    """Return ``--name value`` words as name -> value: True without a value, a list for several.
    The last of an option that is given twice counts, as in argparse."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if OPTION.match(word):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word)
    return {n: True if not v else v[0] if len(v) == 1 else v for n, v in found.items()}
