"""Tables of pages that are made from records."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["anew", "line"]


def line(cells: Sequence[str]) -> str:
    """A row of a table; what is empty takes one blank."""
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def anew(page: str, lines: Sequence[str]) -> str:
    """The page with the table that begins with the first of these lines made anew.

    Raises:
        ValueError: the page has no such table.
    """
    before, head, rest = page.partition(lines[0] + "\n")
    if not head:
        raise ValueError(f"there is no table that begins with {lines[0]!r}")
    after = rest.splitlines(keepends=True)
    while after and after[0].startswith("|"):
        del after[0]
    return before + "\n".join(lines) + "\n" + "".join(after)
