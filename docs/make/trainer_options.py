"""Option tables of the trainers, made from their sources at the commit of each table.

    git clone REPOSITORY SOURCES/NAME          # or a bare clone: SOURCES/NAME.git
    .venv/bin/python -m docs.make.trainer_options SOURCES [NAME ...]

``harness/planner/export/trainers/NAME.yaml`` names the repository, the commit and the scripts.
``harness/planner/export/options/NAME.json`` is written: each option's type, default, choices and
line, as the trainer's own parser declares them. The sources are parsed and never executed.
"""

from __future__ import annotations

import ast
import functools
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.planner.export import trainers
from strategies.files import own_table

Option = dict[str, Any]
"""``type``, ``at``, and where they are: ``default``, ``choices``, ``required``, ``help``."""
TYPES = {"int": "int", "float": "float", "str": "str", "bool": "bool", "dict": "map",
         "list": "list", "List": "list", "Dict": "map"}  # fmt: skip
FLAGS = ("store_true", "store_false", "BooleanOptionalAction")
LINE = 100


@dataclass(frozen=True)
class Sources:
    """A trainer's repository at one commit. ``root``: the folder above its packages."""

    clone: Path
    commit: str

    @functools.cached_property
    def files(self) -> frozenset[str]:
        return frozenset(self._git("ls-tree", "-r", "--name-only", self.commit).splitlines())

    def _git(self, *words: str) -> str:
        done = subprocess.run(["git", "-C", self.clone, *words], capture_output=True, check=True)
        return done.stdout.decode()

    @functools.cache  # noqa: B019 - one process, a few repositories
    def tree(self, path: str) -> ast.Module:
        return ast.parse(self._git("show", f"{self.commit}:{path}"))

    def module(self, dotted: str) -> str:
        """Return the file of a module, or an empty text if it is not of this repository."""
        name = dotted.replace(".", "/")
        ends = [f"{head}{name}{end}" for head in ("", "src/") for end in (".py", "/__init__.py")]
        return next((path for path in ends if path in self.files), "")

    def find(self, path: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the file and the definition of a function or a value, through imports."""
        head, _, rest = name.partition(".")
        for node in self.tree(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == head:
                return path, node
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == head:
                return path, node.value
        for origin in ast.walk(self.tree(path)):
            if not isinstance(origin, (ast.Import, ast.ImportFrom)):
                continue
            above = f"{origin.module}." if isinstance(origin, ast.ImportFrom) else ""
            for one in (one for one in origin.names if head == (one.asname or one.name)):
                if file := self.module(above + one.name):
                    return self.find(file, rest)
                if file := self.module(above.rstrip(".")):
                    return self.find(file, one.name)
        return None


def literal(node: ast.AST | None) -> Any:
    """Return a literal's value; None for any other expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def clean(option: Option) -> Option:
    """Return an option without entries that say nothing, and without what JSON cannot hold."""
    held = {k: v for k, v in option.items() if v is not None and v != [] and v != ""}
    if held.get("default") is False or "inf" in str(held.get("default")):
        del held["default"]
    return held


# ---- argparse ----


def of_parser(sources: Sources, path: str, name: str) -> Iterator[tuple[str, Option]]:
    """Yield the options that a function adds to a parser, also by functions that it calls."""
    found = sources.find(path, name)
    if found is None:
        return
    path, function = found
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        called = ast.unparse(call.func)
        if called.endswith(".add_argument"):
            yield from _declared(sources, path, call)
            continue
        words = [called, *map(ast.unparse, call.args)]
        if called != name and ("arguments" in called or any("parser" in word for word in words)):
            yield from of_parser(sources, path, called)


def _declared(sources: Sources, path: str, call: ast.Call) -> Iterator[tuple[str, Option]]:
    given = {one.arg: one.value for one in call.keywords if one.arg}
    kind = ast.unparse(given["type"]) if "type" in given else "str"
    kind = TYPES.get(kind, "bool" if "bool" in kind else "str")
    if ast.unparse(given.get("action", ast.Constant(""))).strip("'").rpartition(".")[2] in FLAGS:
        kind = "flag"
    if "nargs" in given and literal(given["nargs"]) in ("+", "*"):
        kind = f"some {kind}"
    made = {
        "type": kind,
        "default": literal(given.get("default")),
        "choices": _choices(sources, path, given.get("choices")),
        "required": literal(given.get("required")) or None,
        "at": f"{path} {call.lineno}",
        "help": _first(literal(given.get("help"))),
    }
    for one in map(literal, call.args):
        if str(one).startswith("--"):
            yield one, clean(made)


def _choices(sources: Sources, path: str, node: ast.AST | None) -> Any:
    if node is None or literal(node) is not None:
        return literal(node)
    text = ast.unparse(node).removeprefix("list(").removesuffix(")").removesuffix(".keys()")
    found = sources.find(path, text)
    if found and isinstance(found[1], ast.Dict):
        return [literal(key) for key in found[1].keys]
    return literal(found[1]) if found else None


def _named(tree: ast.AST, node: ast.AST | None) -> Any:
    """Return the list of a field's choices: a literal, or one that a variable of the file holds."""
    if isinstance(node, ast.ListComp):
        node = node.generators[0].iter
    if not isinstance(node, ast.Name):
        return literal(node)
    assigned = (n for n in ast.walk(tree) if isinstance(n, ast.Assign))
    lists = (n.value for n in assigned if ast.unparse(n.targets[0]) == node.id)
    return next((found for one in lists if (found := literal(one))), None)


def _first(text: str | None) -> str | None:
    """Return the English first sentence of a help text, on one line."""
    words = " ".join((text or "").split()).split(" / ")[0].split("。")[0].partition(". ")[0]
    words = words if words.isascii() else ""
    return words if len(words) <= LINE else f"{words[: LINE - 3]}..."


def of_script(sources: Sources, path: str) -> dict[str, Option]:
    """Return the options of a script, whose parser ``main``, or one of these functions, makes."""
    for name in ("setup_parser", "parse_args", "main"):
        if found := dict(of_parser(sources, path, name)):
            return found
    raise SystemExit(f"{path}: no parser was found")


def flags(sources: Sources, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that most scripts have alike, and each one's others.

    None is an option of most scripts that a script lacks.
    """
    words = [word for model in table["models"].values() for key, word in model.items()
             if key in ("any", "lora", "full", "qlora")]  # fmt: skip
    scripts = sorted({shlex.split(word)[0] for word in words if word.split()[0].endswith(".py")})
    if not scripts:
        raise SystemExit("the table's models name no script: write a reader, as READERS has")
    found = {one: of_script(sources, one) for one in scripts}
    common = {}
    for name in dict.fromkeys(name for one in found.values() for name in one):
        having = [one[name] for one in found.values() if name in one]
        same = [{**one, "at": "", "help": ""} for one in having]
        if all(one == same[0] for one in same) and len(same) > len(found) / 2:
            common[name] = having[0]
    rest = {script: {name: option for name, option in one.items() if name not in common}
            | dict.fromkeys(name for name in common if name not in one)
            for script, one in found.items()}  # fmt: skip
    return {"options": common, "scripts": rest}


# ---- files ----


def class_of(sources: Sources, path: str, name: str) -> ast.AST:
    found = sources.find(path, name)
    if found is None:
        raise SystemExit(f"{path}: no class {name}")
    return found[1]


def ai_toolkit(sources: Sources, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the classes of ai-toolkit's configuration take out of ``kwargs``."""
    del table
    path = "toolkit/config_modules.py"
    made: dict[str, Option] = {}
    heads = {"NetworkConfig": "network.", "TrainConfig": "train.", "ModelConfig": "model.",
             "EMAConfig": "train.ema_config.", "SaveConfig": "save.",
             "DatasetConfig": "datasets."}  # fmt: skip
    for name, head in heads.items():
        for node in ast.walk(class_of(sources, path, name)):
            target = getattr(node, "annotation", None)
            for call in ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign)) else ():
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "kwargs.get":
                    key, default = call.args[0], literal(call.args[1]) if call.args[1:] else None
                    told = ast.unparse(target).partition("[")[0] if target else ""
                    kind = TYPES.get(told) or TYPES.get(type(default).__name__, "any")
                    option = {"type": kind, "default": default, "at": f"{path} {call.lineno}"}
                    made.setdefault(head + literal(key), clean(option))
    known = ast.unparse(class_of(sources, path, "ModelArch")).partition("Literal")[2]
    more = {value for file in sources.files if file.startswith("extensions_built_in/")
            and file.endswith(".py") and "prompt" not in file
            for value in _archs(sources.tree(file))}  # fmt: skip
    made["model.arch"]["choices"] = sorted({*ast.literal_eval(known), *more})
    return {"options": made}


def _archs(tree: ast.Module) -> Iterator[str]:
    """Yield the names that the models of a file give themselves."""
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for node in owner.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "arch":
                yield from filter(None, [literal(node.value)])


def simpletuner(sources: Sources, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SimpleTuner's registry, from which its parser is made."""
    del table
    made: dict[str, Option] = {}
    kinds = {"NUMBER": "float", "CHECKBOX": "bool"}
    for path in sorted(sources.files):
        if "field_registry/" not in path and "/models/field_registry" not in path:
            continue
        if not path.endswith(".py") or "test" in path:
            continue
        for call in ast.walk(sources.tree(path)):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "ConfigField":
                continue
            given = {one.arg: one.value for one in call.keywords if one.arg}
            name = literal(given.get("arg_name"))
            kind = ast.unparse(given["field_type"]).rpartition(".")[2]
            default = literal(given.get("default_value"))
            whole = isinstance(default, int) and not isinstance(default, bool)
            held = "int" if whole and kind == "NUMBER" else kinds.get(kind, "str")
            some = _named(sources.tree(path), given.get("choices")) or []
            made.setdefault(str(name).removeprefix("--"), clean({
                "type": held, "default": default,
                "choices": [one["value"] if isinstance(one, dict) else one for one in some],
                "at": f"{path.partition('server/services/')[2] or path} {call.lineno}",
                "help": _first(literal(given.get("help_text"))),
            }))  # fmt: skip
    made["model_family"]["choices"] = sorted(_called(sources, "ModelRegistry.register"))
    return {"options": made}


def _called(sources: Sources, name: str) -> Iterator[str]:
    """Yield the first argument of each call of a function anywhere."""
    for path in sorted(path for path in sources.files if path.endswith("/model.py")):
        for call in ast.walk(sources.tree(path)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == name and call.args:
                yield literal(call.args[0])


def onetrainer(sources: Sources, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of OneTrainer's configuration, those of its nested parts too."""
    del table
    made: dict[str, Option] = {}
    _fields(sources, "TrainConfig", "", made)
    return {"options": made}


PARTS = {"TrainOptimizerConfig", "TrainModelPartConfig", "QuantizationConfig"}


def _fields(sources: Sources, name: str, head: str, made: dict[str, Option]) -> None:
    path = "modules/util/config/TrainConfig.py"
    found = sources.find(path, name)
    if found is None:
        raise SystemExit(f"{path}: no class {name}")
    path, owner = found
    for call in ast.walk(owner):
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "data.append":
            continue
        if not isinstance(call.args[0], ast.Tuple):
            continue
        key, default, kind, _ = call.args[0].elts
        told = ast.unparse(kind).partition("[")[0].partition(" ")[0]
        if told in PARTS:
            _fields(sources, told, f"{literal(key)}.", made)
            continue
        choices = None
        if told not in TYPES and (enum := sources.find(path, told)):
            some = (n for n in getattr(enum[1], "body", ()) if isinstance(n, ast.Assign))
            choices = [name for n in some if (name := ast.unparse(n.targets[0])).isidentifier()]
        value = literal(default) if told in TYPES else ast.unparse(default).rpartition(".")[2]
        made[head + literal(key)] = clean({
            "type": TYPES.get(told, "str"), "default": value, "choices": choices,
            "at": f"{path} {call.lineno}"})  # fmt: skip


READERS: dict[str, Callable[[Sources, Mapping[str, Any]], dict[str, Any]]] = {
    "ai-toolkit": ai_toolkit, "onetrainer": onetrainer, "simpletuner": simpletuner,
}  # fmt: skip
"""Trainers whose options are no argparse parser's."""


def written(found: Mapping[str, Any]) -> str:
    """Return the table as JSON with an option a line."""

    def block(options: Mapping[str, Option], indent: str) -> str:
        lines = (f"{indent}{json.dumps(n)}: {json.dumps(o)}" for n, o in options.items())
        return "{\n" + ",\n".join(lines) + "\n" + indent[1:] + "}"

    parts = [f' "{key}": {json.dumps(found[key])}' for key in ("repository", "commit")]
    parts.append(f' "options": {block(found["options"], "  ")}')
    if "scripts" in found:
        some = (f"  {json.dumps(s)}: {block(o, '   ')}" for s, o in found["scripts"].items())
        parts.append(' "scripts": {\n' + ",\n".join(some) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def make(clone: Path, name: str) -> None:
    """Write the option table of one trainer."""
    table = own_table(trainers.FOLDER / f"{name}.yaml")  # its defaults need this table
    sources = Sources(clone, table["commit"])
    head = {key: table[key] for key in ("repository", "commit")}
    found = head | READERS.get(name, flags)(sources, table)
    trainers.options_file(name).write_text(written(found), encoding="utf-8")
    counted = len(found["options"]) + sum(map(len, found.get("scripts", {}).values()))
    print(f"{name}: {counted} options")


def main(argv: list[str]) -> int:
    folder, *names = argv
    for name in names or trainers.EXPORTED:
        clones = (Path(folder, name), Path(folder, f"{name}.git"))
        make(next(one for one in clones if one.exists()), name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
