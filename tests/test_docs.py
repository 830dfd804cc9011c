"""What README.md and docs/ say that code or recorded results say too: made from it, or held to it.

``PYTHONPATH=. python tests/test_docs.py`` writes docs/architecture.md, docs/claims.md and README's
tables anew.
"""

from __future__ import annotations

import ast
import csv
import re
import subprocess
import sys
from pathlib import Path

from harness.commands import listing
from harness.report import Report, build, read_suite, stories
from harness.report.data.lookup import Rows
from harness.report.rendering import markdown
from harness.report.rendering.markdown_parts import table_lines
from harness.report.stories.claim_rules import LARGE, SMALL, activations_share
from harness.result import load_all
from harness.subjects.dit import presets
from harness.suite import file as suite_file

ROOT = Path(__file__).resolve().parent.parent
README, ARCHITECTURE = ROOT / "README.md", ROOT / "docs" / "architecture.md"
CLAIMS, RESULTS = ROOT / "docs" / "claims.md", ROOT / "docs" / "results"
TABLE = re.compile(r"(?<=## Strategies\n\n)\|.*?\|(?=\n\n)", re.S)
LADDER = re.compile(r"(?<=\n\n)\| What was added .*?\|(?=\n\n)", re.S)
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


def test_readme_s_strategies_are_the_catalog_s():
    assert TABLE.search(README.read_text())[0] == listing.markdown()


def recorded(name: str) -> Report:
    """The report of recorded results, as it would be made of them today."""
    folder = RESULTS / name
    results, skipped = load_all(folder)
    assert results and not skipped
    return build(results, skipped, read_suite(folder))


def ladder() -> str:
    """The ladder's table of recorded results."""
    (grid,) = stories.tables(recorded("cpu-2-cores-ladder"))
    return "\n".join(table_lines(grid))


def test_the_claims_page_is_what_its_results_say():
    page = markdown.render_story(recorded("cpu-2-cores-claims"))
    assert CLAIMS.read_text() == page == (RESULTS / "cpu-2-cores-claims/claims.md").read_text()


def test_in_the_claims_results_activations_outweigh_all_else_at_the_large_batch_alone():
    rows = Rows(recorded("cpu-2-cores-claims"))
    assert activations_share(rows, LARGE) > 0.5 > activations_share(rows, SMALL)


def test_readme_s_ladder_is_the_recorded_one_of_the_suite_and_ends_lowest():
    assert LADDER.search(README.read_text())[0] == ladder()
    report, suite = recorded("cpu-2-cores-ladder"), suite_file.load_suite("ladder", "cpu")
    assert report.suite.order == tuple(row.recipe for row in suite.rows)
    peaks = [Rows(report).step_bytes(recipe) for recipe in report.suite.order]
    assert peaks[-1] == min(peaks)


def test_links_lead_somewhere():
    pages = [README, *sorted((ROOT / "docs").rglob("*.md"))]
    found = [(p, t) for p in pages for t in re.findall(r"\]\(([^)#]+)\)", p.read_text())]
    inside = [(page, target) for page, target in found if "://" not in target]
    assert len(inside) > 5
    assert [f"{p.name}: {t}" for p, t in inside if not (p.parent / t).exists()] == []


def test_readme_names_every_command_and_no_other():
    asked = set(re.findall(r"^\| `\./run\.sh ([\w-]+)", README.read_text(), re.M)) - {"test"}
    words = [sys.executable, "-m", "harness", "--help"]
    told = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert asked == set(re.findall(r"^    ([a-z-]+)\s", told, re.M)) - {"test"}


def test_files_that_pages_name_are_there():
    paths = re.compile(r"`((?:harness|tests|launch_configs|strategies)/[\w./]+)`")
    pages = [README, *sorted((ROOT / "docs" / "adding").glob("*.md"))]
    named = [(page.name, name) for page in pages for name in paths.findall(page.read_text())]
    assert len(named) > 10
    assert [where for where in named if not (ROOT / where[1]).exists()] == []


def test_6nd_overstates_a_dit_by_a_third_to_six_tenths():
    """README's figure. adaLN's weights, a third of a DiT, see one token a sample and not all."""
    errors = []
    for shape in presets.PRESETS.values():
        tokens = shape.tokens(32)
        asked = 6 * presets.trainable_count(shape) * tokens
        errors.append(asked / presets.train_flops(shape) - 1)
    assert (round(min(errors), 2), round(max(errors), 2)) == (0.33, 0.61)


def test_readme_s_errors_of_predictions_are_the_report_s():
    with (ROOT / "docs/results/cpu-2-cores/report.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    worst = max(abs(float(row["predicted_worst_category_error_fraction"])) for row in rows)
    text = README.read_text()
    assert f"within {100 * worst:.2f} % on the {len(rows)} rows of `docs/results/cpu-2-" in text
    zero = [row for row in rows if row["recipe"].startswith("zero")]
    rest = [row for row in rows if row not in zero]
    over, shares = above(zero)
    assert f"the {len(zero)} ZeRO rows lies {over} above the prediction, {shares} of runs" in text
    assert f"of the {len(rest)} other rows {', '.join(above(rest))};" in text


def above(rows: list[dict[str, str]]) -> tuple[str, str]:
    """How far the resident peak lies above its prediction: in MiB, and as a share of it."""
    parts = [-float(row["predicted_peak_error_fraction"]) for row in rows]
    more = [(int(row["peak_bytes"]) - int(row["predicted_peak_bytes"])) / 2**20 for row in rows]
    shares = f"{100 * min(parts):.1f} % to {100 * max(parts):.1f} %"
    return f"{min(more):.0f} to {max(more):.0f} MiB", shares


if __name__ == "__main__":
    ARCHITECTURE.write_text(architecture())
    CLAIMS.write_text(markdown.render_story(recorded("cpu-2-cores-claims")))
    text = TABLE.sub(lambda _: listing.markdown(), README.read_text())
    README.write_text(LADDER.sub(lambda _: ladder(), text))
