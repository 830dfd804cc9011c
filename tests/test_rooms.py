"""The house: imports point one way between rooms, nothing imports itself by others, and an engine
is known in its own file alone. Read from the sources, without running them."""

from __future__ import annotations

import ast

import pytest
from conftest import LONGEST

from harness import ROOT
from harness.launch.sources import MEASURED
from strategies.engines import ENGINES

ORDER = (
    "harness.api",
    "harness.planner",
    "harness.script",
    "harness.cli",
    "harness.train",
    "harness.commands",
    "harness.suite",
    "harness.report",
    "harness.sampling",
    "harness.worker",
    "harness.launch",
    "harness.prediction",
    "harness.system",
    "harness.memory",
    "harness.resolve",
    "harness.void",
    "harness.result",
    "harness.subjects",
    "harness.data",
    "harness.spec",
    "harness.hooks",
    "harness.files",
    "harness.opened",
    "harness.phases",
    "harness.json_files",
    "harness.exits",
    "strategies",
)
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


def imported(text: str, known: Sources) -> set[str]:
    """Modules that a text imports anywhere: in functions and for types, too."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: a relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else node.module for name in inside}
    return names


def circle(texts: Sources) -> list[str]:
    """Modules that import one another in a circle; empty where there is none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        onward = sorted(imported(texts[module], texts) & set(texts))
        rounds = (walk(name, [*path, module]) for name in onward)
        found = next((round for round in rounds if round), [])
        done.add(module)
        return found

    return next((found for module in texts if (found := walk(module, []))), [])


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
    assert circle(house) == []


def test_what_a_worker_runs_makes_kept_results_stale(house):
    """By rooms, so that no list of files has to be kept: ``system`` says what a machine is, and a
    result is keyed by its answers."""
    reached, waiting = set(), ["harness.train"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += [n for n in imported(house[module], house) if n in house]
    rooms = {name.split(".")[1] for name in reached if name.count(".") > 1 and "harness." in name}
    assert rooms <= {*MEASURED, "system"} and {"worker", "memory", "subjects"} <= rooms


def test_every_test_file_has_a_name_of_its_own():
    """Without packages pytest imports a second file of one name as the first, and fails."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) > 100 and sorted(set(names)) == sorted(names)


def test_no_test_imports_another():
    """What two of them need lies in tests/made; conftest is nobody's test."""
    tests = sources("tests")
    named = {module: imported(text, tests) for module, text in tests.items()}
    files = {m for m in tests if m.rpartition(".")[2].startswith("test_")}
    assert len(files) > 50
    assert {f"tests.{name.replace('/', '.')}" for name in LONGEST} <= files
    assert {m: found for m, names in named.items() if (found := names & files)} == {}


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


def engine_questions(text: str) -> list[str]:
    """Conditions of a module that ask which engine there is: by name, stage or launch file."""
    conditions = [
        part
        for node in ast.walk(ast.parse(text))
        if isinstance(
            node, (ast.If, ast.IfExp, ast.While, ast.comprehension, ast.BoolOp, ast.Compare)
        )
        for part in ([node] if isinstance(node, (ast.BoolOp, ast.Compare)) else _tests(node))
    ]
    found = (ast.unparse(part) for part in conditions if _asked_of(part) & NAMES)
    return sorted(set(found))


def _tests(node: ast.AST) -> list[ast.expr]:
    return node.ifs if isinstance(node, ast.comprehension) else [node.test]


def _asked_of(condition: ast.AST) -> set[str]:
    """Words, attributes and classes of a condition, in lower and as they are."""
    words: set[str] = set()
    for node in ast.walk(condition):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value.rstrip("0123456789"))
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Name):
            words.add(node.id)
    return words | {kind.__name__ for kind in ENGINES.values() if kind.__name__ in words}


def test_nobody_but_an_engine_asks_which_engine_there_is(house):
    asked = {
        module: found
        for module, text in house.items()
        if not module.startswith(ENGINES_OWN) and (found := engine_questions(text))
    }
    assert set(asked) == set(ABOUT_DEEPSPEED), asked


@pytest.mark.parametrize(
    "line",
    [
        'if trained.accelerator.distributed_type == "DEEPSPEED": pass',
        "x = 1 if launch.engine.stage == 3 else 2",
        'found = [p for p in parts if p.kind in ("MULTI_GPU", "MULTI_CPU")]',
        'if sharding.startswith("zero"): pass',
        'if config.get("deepspeed"): pass',
    ],
)
def test_a_question_is_noticed(line):
    assert engine_questions(line)


# ---- the test itself ----

MADE = {
    "harness.report": "from harness.report.rendering.pages import render",
    "harness.report.rendering.pages": "from harness.report.data import rows",
    "harness.report.data.rows": "from harness.report.figures import units",
    "harness.report.data.grid": "",
    "harness.report.figures.units": "",
}


def report_ways(texts: Sources) -> list[str]:
    return wrong_ways({n: t for n, t in texts.items() if n != "harness.report"}, REPORT)


def test_a_house_in_order_passes():
    assert report_ways(MADE) == [] and circle(MADE) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("data.rows", "from harness.report.rendering import pages"),
        ("data.rows", "def late():\n    import harness.report.rendering.pages"),
        ("figures.floor", "if TYPE_CHECKING:\n    from harness.report.data import rows"),
    ],
)
def test_an_arrow_back_is_noticed(module, line):
    assert len(report_ways({**MADE, f"harness.report.{module}": line})) == 1


def test_a_circle_of_types_is_noticed():
    texts = {
        **MADE,
        "harness.report.data.rows": "from harness.report.data import grid",
        "harness.report.data.grid": (
            "if TYPE_CHECKING:\n    from harness.report.data.rows import Row"
        ),
    }
    assert report_ways(texts) == []
    assert circle(texts) == ["harness.report.data.rows", "harness.report.data.grid"]


def test_a_module_in_no_room_is_noticed():
    with pytest.raises(AssertionError, match="in no room"):
        report_ways({**MADE, "harness.report.helpers": "from harness.report.data import rows"})
