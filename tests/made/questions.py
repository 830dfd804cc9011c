"""The outputs that docs/questions.md shows, from the commands that it shows.

``python -m tests.made.questions``, from the repository's root, runs every command and writes the
page anew; numbers behind it (``3 7``) choose commands, counted from 1.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

from harness import ROOT

PAGE = ROOT / "docs" / "questions.md"
BLOCK = re.compile(r"^```\n(\./run\.sh plan [^\n]+)\n(.*?)^```", re.S | re.M)
PROGRESS = re.compile(r"^(.*\d+ predictions?, \d+ at a time|  \[\d+/\d+\] .*)$\n?", re.M)
COLUMNS = "80"


def shown(page: str) -> list[tuple[str, str]]:
    """(command, output) of each block, as the page has them."""
    return [(match[1], match[2].strip("\n")) for match in BLOCK.finditer(page)]


def printed(command: str) -> str:
    """What a command prints, but for its progress; standard error is not the answer's."""
    words = [sys.executable, "-m", "harness", *shlex.split(command)[1:]]
    given = {**os.environ, "COLUMNS": COLUMNS}
    ended = subprocess.run(words, cwd=ROOT, env=given, stdout=subprocess.PIPE, text=True)
    assert ended.returncode in (0, 1), f"{command}: exit code {ended.returncode}"
    # A page is ASCII: a terminal's rules are left out.
    text = PROGRESS.sub("", ended.stdout).replace("\u00b1", "+-")
    lines = [line.rstrip() for line in text.splitlines() if line.isascii()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def remade(page: str, chosen: set[int]) -> str:
    """The page with the outputs of the chosen commands made anew; of all where none is chosen."""
    count = 0

    def new(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        if chosen and count not in chosen:
            return match[0]
        print(match[1], file=sys.stderr)
        return f"```\n{match[1]}\n\n{printed(match[1])}\n```"

    return BLOCK.sub(new, page)


if __name__ == "__main__":
    for number in [int(word) for word in sys.argv[1:]] or range(
        1, 1 + len(shown(PAGE.read_text()))
    ):
        # Each by itself, so that what was made stays where a later one is interrupted.
        PAGE.write_text(remade(PAGE.read_text(), {number}), encoding="utf-8")
