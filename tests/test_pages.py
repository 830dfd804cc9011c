"""Pages: links, files and commands are there; generated parts, results and plans are current."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.make import parts
from harness import ROOT, cli, train
from harness.planner import pool
from harness.result import load_all
from harness.subjects.library import families
from harness.suite import file as suite_file
from strategies import parse

README = ROOT / "README.md"
PAGES = [README, *sorted(p for p in (ROOT / "docs").rglob("*.md") if "results" not in p.parts)]
MADE_UP = "rmsprop"
"""The example of docs/adding/strategy.md, which is not there."""
ROOMS = "harness|tests|launch_configs|strategies|docs"


def prose(text: str) -> str:  # without blocks of code
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


# ---- links ----


def anchors(text: str) -> set[str]:
    """The anchors of a page's heads, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def lost_links(text: str, page: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        if "://" in target:
            continue
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            lost.append(target)
    return lost


def test_every_page_is_reached_from_readme():
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            names = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
            waiting += [(page.parent / name).resolve() for name in names]
    assert set(PAGES) <= reached


# ---- files ----


def missing_files(text: str) -> list[str]:
    names = re.findall(rf"`((?:{ROOMS})/[\w./-]+)`", text)
    return [name for name in names if "NAME" not in name and not (ROOT / name).exists()]


def test_tests_that_pages_name_are_there():
    text = "".join(page.read_text() for page in PAGES)
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", text)
    lost = [f for f, test in named if f"def {test}(" not in (ROOT / "tests" / f).read_text()]
    assert named and lost == []


# ---- commands ----


def lines_of_code(text: str) -> Iterator[list[str]]:
    """Command lines in a page's blocks, as words, from ``./run.sh`` or ``harness.train`` on."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    for block in (inner for kind, inner in blocks if kind in ("", "sh")):
        for line in block.replace("\\\n", " ").splitlines():
            # What a shell fills in is not there to be parsed.
            if "$(" in line or not ("./run.sh" in line or "harness.train" in line):
                continue
            words = shlex.split(line, comments=True)
            starts = [i for i, w in enumerate(words) if w in ("./run.sh", "harness.train")]
            if starts:
                yield words[starts[0] :]


def fault_of(words: list[str]) -> str:
    """What is wrong with a command line, which is parsed and not run; empty if nothing is."""
    program, *rest = words
    if rest[:1] == ["test"]:  # the words behind it are pytest's
        lost = [w for w in rest if w.startswith("tests/") and not (ROOT / w).exists()]
        return f"no {lost[0]}" if lost else ""
    if program != "harness.train" and (not rest or rest[0].startswith("-")):
        rest = ["run", *rest]
    try:
        own = program == "harness.train"
        options = train.parse_options(rest) if own else cli._parser().parse_args(rest)
    except SystemExit:
        return f"not parsed: {rest}"
    recipes = [*(getattr(options, "recipes", None) or []), getattr(options, "recipe", None)]
    if MADE_UP in {part.partition(":")[0] for r in recipes if r for part in r.split("+")}:
        return ""
    suite = getattr(options, "suite", None)
    if suite and suite not in suite_file.known_suites() and not suite.startswith("my_"):
        return f"no suite {suite}"
    return "" if all(parse(r) for r in recipes if r) else "no recipe"


# Without what plans print, whose sentences name commands too.
TEXTS = [parts.BLOCK.sub(r"```\n\1\n```", page.read_text()) for page in PAGES]
COMMANDS = [words for text in TEXTS for words in lines_of_code(text)]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda w: " ".join(w)[:60])
def test_commands_in_blocks_parse(words, capsys):
    assert fault_of(words) == "", capsys.readouterr().err


def wrong_options(text: str) -> list[str]:
    """Commands within a page's sentences that are none, or have no such option."""
    known, wrong = _subparsers(), []
    for line in re.findall(r"`\./run\.sh ([^`]+)`", prose(text)):
        name, *rest = line.replace("[", "").replace("]", "").split()
        words = {w for w in rest if w.startswith("--")}
        if name == "test":
            continue
        if name.startswith("--"):
            words, name = {name, *words}, "run"
        if name not in known or words - set(known[name]._option_string_actions):
            wrong.append(line)
    return wrong


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_files_and_commands_of_a_page_are_there(page):
    text = page.read_text()
    assert (lost_links(text, page), missing_files(text), wrong_options(text)) == ([], [], [])


# ---- README, and what the command line says of pages ----


def test_each_command_s_help_names_pages_that_are_there():
    for name, parser in _subparsers().items():
        pages = re.search(r"read on: (.+)", parser.epilog)[1].split(", ")
        assert all((ROOT / page) in PAGES for page in pages), name


def test_each_check_of_a_page_can_fail():
    lost = "docs/how-to/plan.md#not-there"
    assert lost_links(f"See [this]({lost}) and [plan](docs/how-to/plan.md).", README) == [lost]
    assert missing_files("`harness/cli.py`, `harness/clip.py`") == ["harness/clip.py"]
    assert wrong_options("`./run.sh plan --explain`, `./run.sh plane`") == ["plane"]
    bad = ["./run.sh runn", "./run.sh run --recipez ddp", "./run.sh run --suite nowhere"]
    for line in [*bad, "./run.sh test tests/nowhere.py", "python -m harness.train --recipe ddp"]:
        (words,) = lines_of_code(f"```\n{line}   # so\n```")
        assert fault_of(words), line


# ---- generated parts, published results ----

FLUX = ROOT / "docs/tutorial/flux-lora-24gb.md"


@pytest.mark.parametrize("page", parts.GENERATED)
def test_the_generated_parts_of_a_page_are_what_the_code_says(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- made: (\w+) -->", text)) == set(parts.GENERATED[page])
    assert text == parts.filled(page)
    assert "|  |" not in text


def test_the_published_report_is_of_its_results_made_by_readme_s_first_command():
    assert parts.REPORT.read_text(encoding="utf-8") == parts.report()
    suite = suite_file.load_suite("default", "cpu")
    results, skipped = load_all(parts.PUBLISHED)
    assert not skipped and {r.spec.recipe for r in results} == {r.recipe for r in suite.rows}
    assert {r.spec.model for r in results} == {suite.settings["model"]}
    words = {word for row in results for word in row.command.split()}  # to be pasted anywhere
    assert words and {word for word in words if word.startswith("/")} <= {"/dev/null"}


def test_the_stated_noise_floor_is_that_of_the_published_results():
    text = (ROOT / "docs/explanation/noise-and-fairness.md").read_text()
    said = re.search(r"\[it was ([\d.]+) %\]\(\.\./results/[\w-]+/report\.md\)", text)[1]
    assert f"Noise floor {said} %" in parts.REPORT.read_text(encoding="utf-8")


def test_as_many_public_models_as_there_are():
    (said,) = re.findall(r"(\d+) public models", README.read_text())
    assert int(said) == len(families.table())


# ---- plans that pages show ----


def test_the_tutorial_on_sharding_shows_the_plan_of_the_how_to():
    shown = (ROOT / "docs/tutorial/dit-xl-8-gpus.md").read_text().split("```")[1].splitlines()
    plan = (ROOT / "docs/how-to/plan.md").read_text().splitlines()
    assert len(shown) > 9 and set(shown) <= set(plan)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """(command, lines shown below it) of each block of a page that starts with a command."""
    blocks = re.findall(r"^```(?:sh)?\n(\./run\.sh [^\n]+)\n(.*?)^```", text, re.S | re.M)
    return [(command, [" ".join(line.split()) for line in output.splitlines()
                       if line.strip() not in ("", "...")])
            for command, output in blocks]  # fmt: skip


TUTORIAL = commands(FLUX.read_text(encoding="utf-8"))
RECORDED = TUTORIAL[0][0]
SHOWN = [*TUTORIAL, *(one for one in commands(README.read_text("utf-8")) if one[0] == RECORDED)]


@pytest.mark.parametrize(
    ("command", "lines"),
    # The passes of encoders are traced.
    [pytest.param(*one, marks=[pytest.mark.thorough] * ("--phases" in one[0])) for one in SHOWN],
    ids=["plan", "phases", "export", "check", "readme"],
)
def test_each_command_that_pages_show_ends_well(command, lines, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, "ROOT", tmp_path)  # of an empty folder of predictions
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    if command == RECORDED:
        monkeypatch.setattr(pool, "Worker", lambda *given: pytest.fail("a process was started"))
    assert cli.main(shlex.split(command)[1:]) == 0
    output = capsys.readouterr().out.replace("\u00b1", "+-")
    printed = [" ".join(line.split()) for line in output.splitlines()]
    assert [line for line in lines if line not in printed] == [] and (lines or command != RECORDED)
    if "--phases" in command:
        (told,) = re.findall("`(by phase: .*?)`", FLUX.read_text(encoding="utf-8"))
        assert told in " ".join(printed)
    if "--out" in command:
        assert (tmp_path / "take_home/trainers.md").is_file()


def test_the_flux_tutorial_takes_one_recipe_home():
    recipes = [shlex.split(command) for command, _ in TUTORIAL]
    named = {word for words in recipes for word in words if word.startswith("single+")}
    assert len(named) == 1 and f"Adapters: {named.pop()}" in FLUX.read_text(encoding="utf-8")
