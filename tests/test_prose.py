"""Rules of style for pages, docstrings and messages.

No prose linter runs these rules without network, so the test counts sentences itself. It lists
every offence with its file, line and sentence.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST = 30
"""Most words of a sentence."""
EXEMPT = {"docs/reference/claims.md"}
"""Pages that are generated from results."""
CLAUSE = re.compile(r"(What|Where|Whether|Whose|How|Which)\b")
"""Words of a docstring that begins with a clause and not with its noun or verb."""
OLD = re.compile(
    r"\b(Books|Holdings|Imitation|stand_ins?|beside_blocks|standing_for|landmarks|deepened|"
    r"foresee|ways?[_ ]out|stories|portraits?|weighed|heard)\b"
)
"""Private words that standard terms have replaced."""
NO_PROSE = re.compile(
    r"\\[a-z.(|*]|\(\?|[{}]|</|\n {0,2}\w+:|^\s*[|#<]|^\.?[\w-]+ \{|arXiv|^error: ", re.M
)
"""Parts of strings that are no messages: patterns, markup, style sheets, tables and citations."""
LEAST = 4
"""Least words of a message. Shorter strings are labels, names and parts of sentences."""
BREAK = re.compile(r"(?<=[.?!])[*)\"]*\s+|(?<=:)\s+(?=[A-Z`*\[])")
ITEM = re.compile(r"\A\s*([-*]|\d+\.)\s")


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line and the text of each paragraph or item of Markdown."""
    text = re.sub(r"```.*?```|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    block: list[str] = []
    for at, line in enumerate([*text.splitlines(), ""], 1):
        skipped = not line.strip() or line.lstrip().startswith(("|", "#", "<"))
        if block and (skipped or ITEM.match(line)):
            yield at - len(block), "\n".join(block)
            block = []
        if not skipped:
            block.append(line)


def _sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each sentence, without the targets of links."""
    for at, block in _blocks(text):
        start = 0
        for end in [*(m.end() for m in BREAK.finditer(block)), len(block)]:
            said = re.sub(r"\]\([^)]*\)", "]", block[start:end])
            said = " ".join(ITEM.sub("", said, count=1).split())
            if said:
                yield at + block[:start].count("\n"), said
            start = end


def of_text(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and offence of each bad sentence of a page or docstring."""
    for at, said in _sentences(text):
        prose = re.sub(r"``.*?``|`[^`]*`", "_", said)
        if len(said.split()) > MOST:
            yield at, f"{len(said.split())} words: {said}"
        if prose.count(";") > 1:
            yield at, f"semicolons: {said}"
        if old := OLD.search(prose):
            yield at, f"old name {old[0]!r}: {said}"


parsed = functools.cache(ast.parse)
"""Parse a module once for all rules."""


def of_code(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and offence of each bad sentence of a module's docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(parsed(source)):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if not text:
            continue
        first = node.body[0].lineno - 1
        if CLAUSE.match(text):
            yield first + 1, f"clause: {text.splitlines()[0]}"
        prose = re.split(r"\n(?:Args|Raises|Returns|Yields):\n", text)[0]
        yield from ((first + at, offence) for at, offence in of_text(prose))


def of_messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and offence of each bad sentence of a module's messages.

    Messages are the strings outside of docstrings. A value in an f-string counts as one word.
    """
    tree = parsed(source)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Expr)
        for part in ast.walk(node)
        if part is not node and (isinstance(node, ast.JoinedStr) or part is node.value)
        if isinstance(part, ast.Constant)
    }
    for node in ast.walk(tree):
        text = _message(node)
        if id(node) in parts or len(text.split()) < LEAST or NO_PROSE.search(text):
            continue
        if CLAUSE.match(text):
            yield node.lineno, f"clause: {text}"
        yield from ((node.lineno, offence) for _, offence in of_text(text))


def _message(node: ast.AST) -> str:
    """Return the text of a string or f-string; empty for another node."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(v.value if isinstance(v, ast.Constant) else "_" for v in values)


def _pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    names = [(p, p.relative_to(ROOT).as_posix()) for p in sorted(found)]
    return [p for p, name in names if name not in EXEMPT and not name.startswith("docs/results/")]


def _modules() -> list[Path]:
    return sorted(p for name in ("harness", "strategies") for p in (ROOT / name).rglob("*.py"))


@pytest.mark.parametrize(
    ("paths", "check"), [(_pages, of_text), (_modules, of_code), (_modules, of_messages)]
)
def test_prose_keeps_the_rules_of_style(paths, check):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {offence}"
        for path in paths()
        for line, offence in check(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


LONG = " ".join(["word"] * (MOST + 1)) + "."


def _short(found: Iterator[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(line, offence.partition(":")[0]) for line, offence in found]


def test_each_offence_is_noticed():
    text = (
        f"Short.\n\n- Fine. {LONG}\n\nOne; two; three. The Holdings of a `Holdings`.\n\n| {LONG} |"
    )
    wanted = [(3, "31 words"), (5, "semicolons"), (5, "old name 'Holdings'")]
    assert _short(of_text(text)) == wanted
    source = f'"""Fine."""\n\n\ndef f():\n    """Whether it is.\n\n    Fine. {LONG}\n    """\n'
    assert _short(of_code(source)) == [(5, "clause"), (7, "31 words")]
    long = LONG.replace("word word", "{why} word", 1)
    told = f'def f():\n    """{LONG}"""\n    raise E(f"{long}")\n\n\nNOTE = "Where it is found."\n'
    assert _short(of_messages(told)) == [(6, "clause"), (3, "31 words")]
    assert _short(of_messages('x = "(?:a; b; c; d)"\n"What it is"\n')) == []


def test_pages_and_modules_are_found():
    assert {ROOT / "README.md", ROOT / "docs/adding/strategy.md"} < set(_pages())
    assert len(_pages()) > 40 and len(_modules()) > 200
