"""Pages that are made from code and from published results.

``PYTHONPATH=. python tests/test_docs.py`` writes docs/architecture.md, the table of strategies, the
published reports and their tables on pages anew.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from harness.commands import listing
from harness.result import load_all
from harness.subjects.library import families as library
from harness.suite import file as suite_file
from tests.made import pages

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README, ARCHITECTURE = ROOT / "README.md", DOCS / "architecture.md"
STRATEGIES, SUITES, CLAIMS = (
    DOCS / f"reference/{name}.md" for name in ("strategies", "suites", "claims")
)
RESULTS = DOCS / "results"
FOLDERS = ("strategies", "harness")


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return re.split(r"(?<=[a-z)`])\. (?=[A-Z`])", " ".join(paragraph.split()))[0].rstrip(".")


def rooms() -> list[Path]:
    """Every folder of modules, each behind the one that it lies in."""
    return [p.parent for name in FOLDERS for p in sorted((ROOT / name).rglob("__init__.py"))]


def architecture() -> str:
    lines = ["# Every module in a line", "", "Made from the modules by tests/test_docs.py.", ""]
    for folder in rooms():
        lines += [f"## {folder.relative_to(ROOT)}/", "", f"{sentence(folder / '__init__.py')}.", ""]
        modules = sorted(p for p in folder.glob("*.py") if p.stem != "__init__")
        if modules:
            lines += ["| module | what it is |", "|---|---|"]
        lines += [f"| `{p.stem}` | {sentence(p)} |" for p in modules] + [""]
    return "\n".join(lines)


def test_every_module_says_what_it_is_and_is_listed():
    text = architecture()
    assert ARCHITECTURE.read_text() == text
    assert "|  |" not in text and len(text.splitlines()) > 120


# ---- tables that are made ----


def catalog() -> str:
    """The strategies."""
    return listing.markdown()


def table() -> re.Pattern:
    return re.compile(r"(?<=\n\n)\| strategy .*?\|(?=\n\n)", re.S)


def test_the_table_of_strategies_is_the_catalog():
    assert table().search(STRATEGIES.read_text())[0] == catalog()


def test_the_claims_page_is_the_published_story():
    assert CLAIMS.read_text() == (RESULTS / "cpu-2-cores-claims/claims.md").read_text()


# ---- figures ----


def options(command: str) -> dict[str, str]:
    """The options of a command and their values, as it is written."""
    return dict(re.findall(r"--([\w-]+) (\S+)", command))


def test_recorded_results_were_made_as_the_pages_say():
    shown = {
        "cpu-2-cores": re.search(r"by `(\./run\.sh [^`]+)`", README.read_text())[1],
        "cpu-2-cores-ladder": re.search(r"by `(\./run\.sh [^`]+)`", SUITES.read_text())[1],
    }
    for name, command in shown.items():
        results, _ = load_all(RESULTS / name)
        settings = {k: v for k, v in options(command).items() if k != "suite"}
        assert {"steps", "warmup"} <= set(settings)
        for result in results:
            for option, value in settings.items():
                assert str(getattr(result.spec, option.replace("-", "_"))) == value, option


def test_recorded_commands_name_no_folder_of_a_machine():
    """They are to be pasted anywhere."""
    commands = [r.command for path in RESULTS.iterdir() if path.is_dir() for r in load_all(path)[0]]
    words = {word for line in commands for word in line.split() if word.startswith("/")}
    assert len(commands) > 100 and words <= {"/dev/null"}


def test_every_suite_is_told_of():
    told = re.search(r"\| suite \|.*?(?=\n\n)", SUITES.read_text(), re.S)[0]
    firsts = "".join(line.split("|")[1] for line in told.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", firsts)) == set(suite_file.known_suites())


def test_every_room_is_told_of():
    tree = (DOCS / "adding/README.md").read_text().split("```")[1]
    top = {p.parent.name for name in FOLDERS for p in (ROOT / name).glob("*/__init__.py")}
    assert {name for name in top if f" {name}/" not in tree} == set()
    modules = {p.stem for p in (ROOT / "harness").glob("*.py") if not p.stem.startswith("__")}
    assert {name for name in modules if f" {name} " not in tree} == set()


def transcript(page: Path) -> str:
    """The plan that a page shows."""
    return re.search(r"^```\n(\./run\.sh plan .*?)^```", page.read_text(), re.S | re.M)[1]


def test_the_first_screen_shows_an_excerpt_of_the_first_answer():
    """What most come for, before anything else; the whole of it is held to the predictor."""
    shown, full = transcript(README), iter(transcript(DOCS / "how-to/questions.md").splitlines())
    assert all(line in full for line in shown.splitlines() if line != " ...")
    above = README.read_text().partition(shown)[0]
    assert "\n## " not in above and len(above.splitlines()) < 6


def test_as_many_public_models_as_there_are():
    (said,) = re.findall(r"(\d+) public models", README.read_text())
    assert int(said) == len(library.table())


if __name__ == "__main__":
    ARCHITECTURE.write_text(architecture())
    STRATEGIES.write_text(table().sub(lambda _: catalog(), STRATEGIES.read_text()))
    pages.main()
