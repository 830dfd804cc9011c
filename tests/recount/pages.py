"""Tables and sentences of a page as printed, from Markdown and from HTML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["Table", "Text", "items"]


@dataclass(frozen=True)
class Table:
    """A table: the title above it, its heads, its lines of cells."""

    title: str
    heads: list[str]
    lines: list[list[str]]


@dataclass(frozen=True)
class Text:
    """A heading, a paragraph or an item of a list."""

    text: str


def items(path: Path) -> Iterator[Table | Text]:
    """What a page says, in order, without its blocks of code."""
    text = path.read_text(encoding="utf-8")
    return html_items(text) if path.suffix == ".html" else markdown_items(text)


# ---- Markdown ----


def markdown_items(text: str) -> Iterator[Table | Text]:
    title, lines = "", iter(re.sub(r"^```.*?^```", "", text, flags=re.S | re.M).splitlines())
    for line in lines:
        head = re.match(r"#+ (.*)|<details><summary>(.*)</summary>", line)
        if head:
            title = head[1] or head[2]
        if line.startswith("|"):
            rows = [line, *_while_table(lines)]
            heads, _, *body = [_cells(row) for row in rows]
            yield Table(title, heads, body)
        elif line.strip():
            yield Text(_plain(re.sub(r"^(#+|-|>) ", "", line)))


def _while_table(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip()[1:-1])
    return [_plain(cell).replace("\\|", "|") for cell in cells]


def _plain(text: str) -> str:
    """Without marks of code and bold."""
    return re.sub(r"`|\*\*", "", text).strip()


# ---- HTML ----

TITLES = {"ranking": "Ranking", "fits": "Fits", "effects": "What each part does"}
"""Keys of tables whose title is not the heading above them."""
TEXTS = ("h1", "h2", "h3", "p", "summary", "dd", "dt", "figcaption", "li")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Table | Text] = []
        self.title, self.tag, self.text, self.term = "", "", "", ""
        self.table: list[list[str]] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.table, self.key = [], dict(attrs).get("data-key") or ""
        elif tag == "tr" and self.table is not None:
            self.table.append([])
        elif tag in ("td", "th", *TEXTS):
            self.tag, self.text = tag, ""
        elif tag == "small":
            self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_endtag(self, tag: str) -> None:
        text = " ".join(self.text.replace("\u200b", "").split())
        if tag in ("td", "th") and self.table is not None:
            self.table[-1].append(text)
        elif tag == "table":
            heads, *lines = self.table
            self.found.append(Table(TITLES.get(self.key, self.title), heads, lines))
            self.table = None
        elif tag == "b":
            self.text += ": "  # an answer's row, and what is said of it
        elif tag == "dt":
            self.term = text
        elif tag == self.tag and tag in TEXTS and self.table is None:
            self.found.append(Text(f"{self.term}: {text}" if tag == "dd" else text))
            if tag in ("h2", "h3", "summary"):
                self.title = re.sub(r" \d+ values$", "", text)


def html_items(text: str) -> Iterator[Table | Text]:
    page = _Page()
    page.feed(re.sub(r"<(style|script|svg|pre)\b.*?</\1>", "", text, flags=re.S))
    yield from page.found
