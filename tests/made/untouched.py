"""A plugin of pytest: tests write nothing into the tree.

What is recorded or launched there is as it was before the first test when the last one has ended;
else the run fails, and says what was written. A file that is written with the same text counts: one
day its text is another.
"""

from __future__ import annotations

from pathlib import Path

import pytest

WATCHED = ("docs/results", "launch_configs", "tests/golden")
SHOWN = 5
"""Names that are told."""
Stamps = dict[str, tuple[int, int]]
BEFORE = pytest.StashKey[Stamps]()


def stamps(root: Path) -> Stamps:
    """File below ``root`` -> when it was written last (ns), and its size."""
    found = (path for name in WATCHED for path in (root / name).rglob("*"))
    stats = {path: path.stat() for path in found if path.is_file()}
    return {str(p.relative_to(root)): (s.st_mtime_ns, s.st_size) for p, s in stats.items()}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Of several workers, the process that leads them looks."""
    if not hasattr(session.config, "workerinput"):
        session.config.stash[BEFORE] = stamps(session.config.rootpath)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that wrote."""
    before = session.config.stash.get(BEFORE, None)
    if before is None:
        return
    after = stamps(session.config.rootpath)
    names = sorted(dict(before.items() ^ after.items()))
    if names:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        text = ", ".join(names[:SHOWN]) + more
        print(f"\nwritten while tests ran (by a test, or by you): {text}", flush=True)
