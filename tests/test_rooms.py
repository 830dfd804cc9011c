"""Imports point one way between rooms; an engine is known in its own file alone."""

from __future__ import annotations

import ast
import functools

import pytest

from harness import ROOT
from harness.launch.sources import MEASURED
from strategies.engines import ENGINES

ORDER = (
    "harness.api", "harness.planner", "harness.script", "harness.cli", "harness.train",
    "harness.commands", "harness.suite", "harness.report", "harness.sampling", "harness.worker",
    "harness.launch", "harness.prediction", "harness.system", "harness.memory", "harness.resolve",
    "harness.void", "harness.result", "harness.subjects", "harness.data", "harness.spec",
    "harness.hooks", "harness.files", "harness.opened", "harness.phases", "harness.json_files",
    "harness.exits", "strategies",
)  # fmt: skip
"""Each room may import from those behind it."""
REPORT = tuple(f"harness.report.{name}" for name in ("anatomy", "rendering", "data", "figures"))
"""The same within the report: its face may import from all of them, and none from it."""


def room(module: str, order: tuple[str, ...]) -> int:
    """The place of a module's room; those of no room stand in front of all, or are faces."""
    places = [i for i, name in enumerate(order) if f"{module}.".startswith(f"{name}.")]
    assert places, f"{module} is in no room"
    return places[0]


Sources = dict[str, str]
"""Name of a module -> its text."""


def sources(package: str) -> Sources:
    texts = {}
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        texts[name] = path.read_text(encoding="utf-8")
    return texts


nodes = functools.cache(lambda text: list(ast.walk(ast.parse(text))))
"""Of a text's syntax."""


def imported(text: str, known: Sources) -> set[str]:
    """Modules that a text imports anywhere: in functions and for types, too."""
    names = set()
    for node in nodes(text):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else node.module for name in inside}
    return names


def wrong_ways(texts: Sources, order: tuple[str, ...]) -> list[str]:
    """Imports from a room of one in front of it."""
    return [
        f"{module} imports {name}"
        for module, text in texts.items()
        for name in sorted(imported(text, texts) & set(texts))
        if room(name, order) < room(module, order)
    ]


@pytest.fixture(scope="module")
def house() -> Sources:
    texts = {**sources("strategies"), **sources("harness")}
    assert len(texts) > 200
    del texts["harness"], texts["harness.__main__"]  # where the house stands, and its door
    return texts


def test_imports_point_one_way_between_rooms(house):
    assert wrong_ways(house, ORDER) == []


def test_imports_point_one_way_within_the_report(house):
    report = {n: t for n, t in house.items() if n.startswith("harness.report.")}
    assert wrong_ways(report, REPORT) == []
    assert not any("harness.report" in imported(text, house) for text in report.values())


def test_nothing_imports_itself_by_others(house):
    inside = {name: imported(text, house) & set(house) for name, text in house.items()}
    while free := {name for name, others in inside.items() if not others & set(inside)}:
        inside = {name: others for name, others in inside.items() if name not in free}
    assert inside == {}, "these import one another in a circle"


def test_what_a_worker_runs_makes_kept_results_stale(house):
    """By rooms; a result is keyed by what ``system`` says of the machine."""
    reached, waiting = set(), ["harness.train"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += [n for n in imported(house[module], house) if n in house]
    rooms = {name.split(".")[1] for name in reached if name.count(".") > 1 and "harness." in name}
    assert rooms <= {*MEASURED, "system"} and {"worker", "memory", "subjects"} <= rooms


# ---- engines ----

ABOUT_DEEPSPEED = {
    "harness.commands.lint": "reads DeepSpeed's files",
    "harness.system.requirements": "says how to come by DeepSpeed",
    "harness.planner.overhead": "counts the groups that each of DeepSpeed's stages makes",
    "harness.planner.export.launches": "reads the files of others",
    "strategies.launch_keys": "checks the files of others",
    "strategies.users_launch": "reads the files of others",
}
ENGINES_OWN = ("strategies.engines", "harness.planner.adapters.")
NAMES = {*ENGINES, "deepspeed", "zero", "stage", "zero_stage", "distributed_type"}


CONDITIONS = (ast.If, ast.IfExp, ast.While, ast.comprehension, ast.BoolOp, ast.Compare)


def asked_of(condition: ast.AST) -> set[str]:
    """Words, attributes and classes of a condition."""
    words: set[str] = set()
    for node in ast.walk(condition):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value.rstrip("0123456789"))
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Name):
            words.add(node.id)
    return words | {kind.__name__ for kind in ENGINES.values() if kind.__name__ in words}


def asks_for_an_engine(text: str) -> bool:
    """Whether a condition asks which engine there is: by name, stage or launch file."""
    parts = (node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", node)]
             for node in nodes(text) if isinstance(node, CONDITIONS))  # fmt: skip
    return any(asked_of(part) & NAMES for some in parts for part in some)


def test_nobody_but_an_engine_asks_which_engine_there_is(house):
    others = {name: text for name, text in house.items() if not name.startswith(ENGINES_OWN)}
    assert {n for n, text in others.items() if asks_for_an_engine(text)} == set(ABOUT_DEEPSPEED)
    assert asks_for_an_engine("x = 1 if launch.engine.stage == 3 else 2")
