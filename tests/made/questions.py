"""The commands and shortened outputs of docs/how-to/questions.md."""

from __future__ import annotations

import re

from harness import ROOT

PAGE = ROOT / "docs/how-to/questions.md"
BLOCK = re.compile(r"^```\n(\./run\.sh plan [^\n]+)\n(.*?)^```", re.S | re.M)


def shown(page: str) -> list[tuple[str, str]]:
    """(command, output) of each block, as the page has them."""
    return [(match[1], match[2].strip("\n")) for match in BLOCK.finditer(page)]
