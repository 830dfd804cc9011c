"""Which facts of a row's evidence are settings, and not effects that were seen."""

from __future__ import annotations

from harness.report.data.rows import Report
from harness.report.rendering.markdown_parts import code, plain
from strategies.evidence.settings import settings

__all__ = ["HEAD", "markdown", "sentences"]

HEAD = "Settings, not effects"
NOTE = (
    "Facts of the rows' evidence that could only be read where they were set. Every other fact was "
    "read off what the training did."
)


def sentences(report: Report) -> list[tuple[str, str]]:
    """(strategy, names of its facts that are settings), of all rows, in their order."""
    found: dict[str, dict[str, None]] = {}
    for group in report.groups:
        for row in group.rows:
            for name, facts in row.first.evidence.items():
                if settings(facts):
                    found.setdefault(name, {}).update(dict.fromkeys(settings(facts)))
    return [(name, ", ".join(sorted(facts))) for name, facts in found.items()]


def markdown(report: Report) -> list[str]:
    """Lines of the Markdown report; none where every fact is an effect."""
    lines = [f"- {code(name)}: {plain(facts)}" for name, facts in sentences(report)]
    return [f"## {HEAD}", "", NOTE, "", *lines, ""] if lines else []
