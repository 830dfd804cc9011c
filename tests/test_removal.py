"""Extensions can be deleted: the core runs without each, and a missing command says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from harness import ROOT, cli, extensions

pytestmark = pytest.mark.thorough

RECORDED = ROOT / "docs" / "results" / "cpu-2-cores-default"
SMALL = "--model DiT-T/8 --global-batch 2 --processes 1 --device cpu --seed 1 --steps 3"
COMMANDS = {
    "list": "list",
    "report": "report recorded",
    "compare": f"compare {RECORDED} {RECORDED}",
    "train": f"train --recipe single {SMALL} --out results/trained",
    "run": f"run --recipes single {SMALL} --warmup 1 --noise-floor 1 --out results/suite",
}
QUICK = "--no-predictions"
"""An option of the planner."""
SUITES = ("ladder", "sampling")
INSTALLED = [name for name in extensions.EXTENSIONS if (ROOT / "harness" / name).is_dir()]
HOOKED = [name for name in INSTALLED if hasattr(extensions._register(name), "HOOKS")]
"""Extensions that the core's own commands call where they are installed."""
EACH = [pytest.param((name,), marks=pytest.mark.thorough, id=name) for name in HOOKED]


@pytest.fixture(scope="module", params=[pytest.param(tuple(INSTALLED), id="all"), *EACH])
def removed(request, tmp_path_factory) -> tuple[set[str], Path, dict[str, subprocess.Popen]]:
    """A tree without some extensions, and the core's commands that were run in it at once."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("harness", "strategies", "launch_configs"):
        shutil.copytree(ROOT / name, tree / name)  # with bytecode, which is told by its source
    for name in request.param:
        shutil.rmtree(tree / "harness" / name)
    shutil.copytree(RECORDED, tree / "recorded")
    shutil.copy(ROOT / "pyproject.toml", tree)
    lines = {name: line.split() for name, line in COMMANDS.items()}
    if len(request.param) == 1:
        # A comparison is a report. A worker looks up one hook, and runs without all extensions; no
        # extension imports another (test_rooms).
        del lines["compare"], lines["train"]
        lines["run"].append("--dry-run")
    if "planner" not in request.param:
        lines["run"].append(QUICK)
    started = {name: start(tree, words, name) for name, words in lines.items()}
    for child in started.values():
        child.wait(900)
    return set(request.param), tree, started


def start(tree: Path, words: list[str], name: str) -> subprocess.Popen:
    with (tree / f"{name}.txt").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "harness", *words],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip


def test_the_core_runs_without_an_extension(removed):
    _, tree, started = removed
    said = {name: (tree / f"{name}.txt").read_text() for name in started}
    assert {name: said[name] for name, child in started.items() if child.returncode} == {}


def test_the_tree_without_an_extension_leaves_results_and_explains_what_is_missing(removed):
    gone, tree, _ = removed
    if len(gone) > 1:
        assert (tree / "results" / "suite" / "report.md").exists()
        assert list((tree / "results" / "trained" / "checkpoint").iterdir())
    for extension in gone:
        for word in extensions.EXTENSIONS[extension]:
            words = ["run", word, "2"] if word.startswith("-") else [word]
            assert refused(tree, words) == f"error: {told(word, extension)}"


def refused(tree: Path, words: list[str]) -> str:
    """Return what a command prints that ends with 2."""
    assert start(tree, words, "missing").wait(60) == 2
    return (tree / "missing.txt").read_text()


def told(word: str, extension: str) -> str:
    return f"{word} is not installed: harness/{extension} is missing\n"


def test_predictions_are_shown_where_the_planner_is_installed(removed):
    gone, tree, _ = removed
    for name in ("report.csv", "report.md"):
        text = (tree / "recorded" / name).read_text()
        assert ("predicted" in text) == ("planner" not in gone), name


def test_a_suite_runs_without_what_its_rows_do_not_need(removed):
    """Suites of samples need the extension that draws them."""
    gone, tree, _ = removed
    planned = {s: ["run", "--suite", s, "--device", "cpu", "--dry-run"] for s in SUITES}
    if "sampling" in gone:
        assert refused(tree, planned["sampling"]) == f"error: workload {told('sample', 'sampling')}"


@pytest.fixture
def made(monkeypatch):
    """An extension ``made`` that is installed, and another that is not."""
    words = extensions.Command(
        "fly away", "./run.sh fly", "docs/fly.md", f"{__name__}:options", f"{__name__}:fly"
    )
    table = types.SimpleNamespace(COMMANDS={"fly": words}, HOOKS={"lift": f"{__name__}:fly"})
    monkeypatch.setitem(sys.modules, "harness.made", types.ModuleType("harness.made"))
    monkeypatch.setitem(sys.modules, "harness.made.register", table)
    monkeypatch.setattr(
        extensions, "EXTENSIONS", {"gone": ("swim", "--fins"), "made": ("fly", "--wings")}
    )
    extensions._register.cache_clear()
    yield
    extensions._register.cache_clear()


def options(parser):
    parser.add_argument("--height", type=int)


def fly(asked):
    return asked.height


def test_a_command_of_an_extension_runs_with_its_options(made, capsys):
    assert cli.main(["fly", "--height", "7"]) == 7
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "fly away" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "absent"), [(["swim", "--deep"], "swim"), (["list", "--fins"], "--fins")]
)
def test_a_missing_extension_is_named(made, words, absent, capsys):
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    text = capsys.readouterr().err
    assert text == f"error: {absent} is not installed: harness/gone is missing\n"


def test_hooks_come_from_those_that_are_installed(made):
    assert extensions.hooks("lift") == [fly]
    assert extensions.hook("lift", print) is fly
    assert extensions.hook("sink", print) is print
