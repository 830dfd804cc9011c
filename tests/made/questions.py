"""The outputs that docs/how-to/questions.md shows, from the commands that it shows.

``python -m tests.made.questions``, from the repository's root, runs every command and writes the
page anew; numbers behind it (``3 7``) choose commands, counted from 1.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

from harness import ROOT

PAGE = ROOT / "docs/how-to/questions.md"
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
    return cleaned(ended.stdout)


def cleaned(told: str) -> str:
    """What was printed, as the page has it: without progress, and in ASCII."""
    text = PROGRESS.sub("", told).replace("\u00b1", "+-")  # a terminal's rules are left out
    lines = [line.rstrip() for line in text.splitlines() if line.isascii()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def remade(page: str, outputs: Mapping[str, str]) -> str:
    """The page with the outputs of some commands."""

    def new(match: re.Match[str]) -> str:
        output = outputs.get(match[1])
        return match[0] if output is None else f"```\n{match[1]}\n\n{output}\n```"

    return BLOCK.sub(new, page)


def main(numbers: list[int]) -> None:
    """Run the commands of these numbers, of all where there is none, and write the page."""
    commands = [command for command, _ in shown(PAGE.read_text())]
    for number in numbers or range(1, 1 + len(commands)):
        command = commands[number - 1]
        print(command, file=sys.stderr)
        output = printed(command)
        # The page as it is by now, and after each: what was made stays where a later one fails.
        PAGE.write_text(remade(PAGE.read_text(), {command: output}), encoding="utf-8")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
