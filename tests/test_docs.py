"""What README.md and docs/ say that code or recorded results say too: made from it, or held to it.

``PYTHONPATH=. python tests/test_docs.py`` writes docs/architecture.md and docs/claims.md anew, and
the tables of README.md, docs/strategies.md and docs/suites.md.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from harness.commands import listing, train
from harness.report import Report, build, read_suite, stories
from harness.report.data.lookup import Rows
from harness.report.figures import parity
from harness.report.rendering import explanations, markdown
from harness.report.rendering.markdown_parts import table_lines
from harness.report.stories.claim_sweeps import PLAIN, swept
from harness.result import load_all
from harness.subjects.dit import presets
from harness.subjects.library import presets as library
from harness.suite import file as suite_file
from strategies import CATALOG
from strategies.workloads import SAMPLE

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README, ARCHITECTURE, PLAN = ROOT / "README.md", DOCS / "architecture.md", DOCS / "plan.md"
STRATEGIES, SUITES, CLAIMS = DOCS / "strategies.md", DOCS / "suites.md", DOCS / "claims.md"
SAMPLING = DOCS / "sampling.md"
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


def recorded(name: str) -> Report:
    """The report of recorded results, as it would be made of them today."""
    folder = RESULTS / name
    results, skipped = load_all(folder)
    assert results and not skipped
    return build(results, skipped, read_suite(folder))


def story(name: str) -> str:
    """The table of recorded results that their suite's story has."""
    (grid,) = stories.tables(recorded(name))
    return "\n".join(table_lines(grid))


def ranking() -> str:
    """The ranking of recorded results, as their own report has it."""
    text = (RESULTS / "cpu-2-cores/report.md").read_text()
    return re.search(r"^\| # \| Recipe .*?\|(?=\n\n)", text, re.S | re.M)[0]


TABLES = {
    "strategy": (STRATEGIES, catalog),
    "What was added": (SUITES, functools.partial(story, "cpu-2-cores-ladder")),
    "Recipe | Peak GiB": (SUITES, functools.partial(story, "cpu-2-cores-sharding")),
    "# | Recipe": (README, ranking),
}
"""How a table begins -> its page, and what makes it."""


def table(begins: str) -> re.Pattern:
    return re.compile(rf"(?<=\n\n)\| {begins} .*?\|(?=\n\n)", re.S)


@pytest.mark.parametrize("begins", TABLES)
def test_a_table_is_what_it_is_made_of(begins):
    page, made = TABLES[begins]
    assert table(re.escape(begins)).search(page.read_text())[0] == made()


def test_the_claims_page_is_what_its_results_say():
    page = markdown.render_story(recorded("cpu-2-cores-claims"))
    assert CLAIMS.read_text() == page == (RESULTS / "cpu-2-cores-claims/claims.md").read_text()


def test_in_the_claims_results_activations_outweigh_all_else_at_the_large_batches_alone():
    """A sweep of which both ends were alike would not tell where a claim begins to hold."""
    shares = swept(Rows(recorded("cpu-2-cores-claims")), PLAIN).shares
    assert shares[max(shares)] > 0.5 > shares[min(shares)]


def test_the_recorded_ladder_is_the_suite_s_and_ends_lowest():
    report, suite = recorded("cpu-2-cores-ladder"), suite_file.load_suite("ladder", "cpu")
    assert report.suite.order == tuple(row.recipe for row in suite.rows)
    peaks = [Rows(report).step_bytes(recipe) for recipe in report.suite.order]
    assert peaks[-1] == min(peaks)


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


def test_the_plan_that_is_shown_agrees_with_itself():
    shown = transcript(PLAN)
    need, time = r"([\d.]+) \+-[\d.]+", r"(\d+) \+-\d+"
    rows = re.findall(rf"^ (\S+) +(fits|no) +{need} +(-?[\d.]+) .* {time} +(\d+)$", shown, re.M)
    assert {r[0] for r in rows} == set(re.search(r"--recipes ([^\n]+)", shown)[1].split())
    for recipe, word, needs, free, step, speed in rows:
        assert float(needs) + float(free) == pytest.approx(24.0), recipe
        assert (word == "fits") == (float(free) > 0)
        assert float(speed) == pytest.approx(256e3 / float(step), abs=1)
    best = max((r for r in rows if r[1] == "fits"), key=lambda r: int(r[5]))
    least = min(rows, key=lambda r: float(r[2]))
    assert f"to fit: {best[0]}, {best[5]} images/s, {best[2]} (" in shown
    assert f"Least memory: {least[0]}, {least[2]} GiB" in shown


def test_the_first_screen_shows_an_excerpt_of_the_first_answer():
    """What most come for, before anything else; the whole of it is held to the predictor."""
    shown, full = transcript(README), iter(transcript(DOCS / "questions.md").splitlines())
    assert all(line in full for line in shown.splitlines() if line != " ...")
    above = README.read_text().partition(shown)[0]
    assert "\n## " not in above and len(above.splitlines()) < 6


def test_the_limit_of_parity_is_the_report_s():
    limits = dataclasses.astuple(parity.FLOAT32)
    what = ("a loss", "a gradient norm", "a moment", "an update", "an average")
    pairs = (f"{limit:.0e} of {name}" for limit, name in zip(limits, what, strict=False))
    said = ", ".join(pairs).replace("e-0", "e-")
    assert said in (DOCS / "reading-a-report.md").read_text()
    assert said in explanations.NOTES["parity"]


def test_what_train_is_told_to_do_is_its_default():
    text = (DOCS / "your-machine.md").read_text()
    assert f"teaches {train.DEFAULTS['model']} the digits" in text
    assert f"({train.DEFAULTS['steps']} steps, " in text


def test_the_pages_name_all_that_draws_samples_alone():
    alone = {name for name, kind in CATALOG.items() if kind.workloads == (SAMPLE,)}
    for page, ends in ((STRATEGIES, "are of [sampling]"), (SAMPLING, "are refused in training")):
        (said,) = re.findall(rf"[^.;:]*{re.escape(ends)}", page.read_text())
        assert set(re.findall(r"`(\w+)`", said)) == alone, page.name


def test_as_many_public_models_as_there_are():
    (said,) = re.findall(r"(\d+) public models", README.read_text())
    assert int(said) == len(library.table())


def test_a_student_s_weights_are_as_small_as_the_page_says():
    text = (DOCS / "distil.md").read_text()
    (said,) = re.findall(r"weights of ([\d.]+) MiB beside the teacher's ([\d.]+) ", text)
    digits = {"classes": 10, "learn_sigma": False}
    for word, model in zip(said, ("DiT-T/4:depth=2", "DiT-T/4"), strict=True):
        shape = presets.shape_of(model)
        assert f"{4 * presets.parameter_count(shape, **digits) / 2**20:.1f}" == word, model


def test_6nd_overstates_a_dit_by_a_third_to_six_tenths():
    """adaLN's weights, a third of a DiT, see one token a sample and not all."""
    errors = []
    for shape in presets.PRESETS.values():
        tokens = shape.tokens(32)
        asked = 6 * presets.trainable_count(shape) * tokens
        errors.append(asked / presets.train_flops(shape) - 1)
    said = f"6ND is {100 * min(errors):.0f} % to {100 * max(errors):.0f} % too many FLOPs for a DiT"
    assert said in (DOCS / "anatomy.md").read_text()


def test_the_errors_of_predictions_are_the_report_s():
    with (ROOT / "docs/results/cpu-2-cores/report.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    worst = max(abs(float(row["predicted_worst_category_error_fraction"])) for row in rows)
    text = PLAN.read_text()
    assert f"within {100 * worst:.2f} % on the {len(rows)} rows of `docs/results/cpu-2-" in text
    zero = [row for row in rows if row["recipe"].startswith("zero")]
    rest = [row for row in rows if row not in zero]
    over, shares = above(zero)
    assert f"the {len(zero)} ZeRO rows lies {over} above the prediction, {shares} of runs" in text
    assert f"of the {len(rest)} other rows {', '.join(above(rest))}." in text
    steps = max(abs(float(row["predicted_step_error_fraction"])) for row in rows)
    assert f"the tensors of a step in all within {100 * steps:.2f} %" in text


def above(rows: list[dict[str, str]]) -> tuple[str, str]:
    """How far the resident mark lies above its prediction: in MiB, and as a share of it."""
    parts = [-float(row["predicted_run_error_fraction"]) for row in rows]
    more = [
        (int(row["resident_peak_bytes"]) - int(row["predicted_run_bytes"])) / 2**20 for row in rows
    ]
    shares = f"{100 * min(parts):.1f} % to {100 * max(parts):.1f} %"
    return f"{min(more):.0f} to {max(more):.0f} MiB", shares


if __name__ == "__main__":
    ARCHITECTURE.write_text(architecture())
    CLAIMS.write_text(markdown.render_story(recorded("cpu-2-cores-claims")))
    for begins, (page, made) in TABLES.items():
        pattern, text = table(re.escape(begins)), made()
        page.write_text(pattern.sub(lambda _, text=text: text, page.read_text()))
