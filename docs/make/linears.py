"""Names of the presets' linear layers, which adapters' targets are checked against without torch.

python -m docs.make.linears [MODEL ...]    write harness/subjects/library/linears.json
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects.library import families
from harness.subjects.library.subject import LINEARS

Run = tuple[str, int, int, list[str]]
BLOCK = re.compile(r"(.+?)\.(\d+)\.(.+)")
"""Name of a layer: its group of blocks, the block's number, and the name within the block."""


def runs(names: Iterable[str]) -> list[Run]:
    """Return runs of blocks with equal linear layers: (group, first, last, names within one)."""
    found: list[Run] = []
    each = [BLOCK.fullmatch(name).groups() for name in names]
    for (group, number), some in itertools.groupby(each, key=lambda one: one[:2]):
        index, ends = int(number), [end for *_, end in some]
        if found and (found[-1][0], found[-1][2] + 1, found[-1][3]) == (group, index, ends):
            found[-1] = (group, found[-1][1], index, ends)
        else:
            found.append((group, index, index, ends))
    return found


def text_of(table: dict[str, Any]) -> str:
    lines = [f"  {json.dumps(model)}: {json.dumps(table[model])}" for model in table]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    table = json.loads(LINEARS.read_text("utf-8"))
    for model in sys.argv[1:] or families.table():
        objective = families.find(model, "", "").family.objectives[0]
        spec = Spec(model=model, data="synthetic", objective=objective, recipe="single")
        subject = resolve(spec).subject
        table[model] = runs(subject.survey.linears)
        LINEARS.write_text(text_of({k: table[k] for k in families.table() if k in table}), "utf-8")
