"""Suites for commands: read from their files, with a story that the report can tell."""

from __future__ import annotations

from harness.report.stories import STORIES
from harness.suite.file import Suite, SuiteError, load_suite

__all__ = ["load"]


def load(name: str, device: str) -> Suite:
    """The suite of that name, or in that file, for ``device`` (cpu or cuda).

    Raises:
        SuiteError: one line that names file, key, value and way out.
    """
    suite = load_suite(name, device)
    if suite.story not in ("", *STORIES):
        raise SuiteError(
            f"{suite.path}: story is {suite.story!r}; one of {', '.join(STORIES)}, or leave it out"
        )
    return suite
