"""The picture of docs/how-to/sampling.md: ten digits of each row of a run of the suite ``quality``.

From the repository's root, with the folder of such a run (``samples.png`` lies beside each result):

    PYTHONPATH=. python tests/sampling/digits_drawn.py results/quality docs/results/digits-drawn.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from harness.sampling.measure import COLUMNS
from harness.worker.audit import GAP, SIDE

STUDENT = "results/train/student/trained.safetensors"
ROWS = {
    "single": "float32",
    "single+bf16_pure": "bf16_pure",
    "single+fp16_pure": "fp16_pure",
    "single+int8": "int8",
    "single+float8": "float8",
    "single+nf4": "nf4",
    **{
        f"single+palette{'' if bits == 4 else f':bits={bits}'}": f"palette, {bits} bits"
        for bits in (8, 6, 4, 3, 2)
    },
    "single+palette:bits=3,rows=16": "palette, 3 bits, rows=16",
    f"single+distilled:student={STUDENT}": "a student of half the depth",
}
"""Recipe -> what stands beside its digits."""
TILE, LABEL, MARGIN, DIGITS = 64, 252, 4, 10
MIB = 2**20


def main(folder: Path, target: Path) -> None:
    """Write the picture; rows that were not measured are left out, and named."""
    found = {recipe: row_of(folder, recipe) for recipe in ROWS}
    rows = {recipe: row for recipe, row in found.items() if row}
    step = TILE + MARGIN
    picture = Image.new("L", (LABEL + DIGITS * step, len(rows) * step + MARGIN), 255)
    draw = ImageDraw.Draw(picture)
    for place, (recipe, (data, sheet)) in enumerate(rows.items()):
        top = MARGIN + place * step
        draw.text((8, top + 12), ROWS[recipe], fill=0, font=ImageFont.load_default(size=17))
        draw.text((8, top + 36), told(data), fill=80, font=ImageFont.load_default(size=13))
        for index in range(DIGITS):
            picture.paste(digit(sheet, index), (LABEL + index * step, top))
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.save(target, optimize=True)
    print(f"{target}: {len(rows)} rows; without {sorted(found.keys() - rows.keys())}")


def row_of(folder: Path, recipe: str) -> tuple[dict[str, Any], Image.Image] | None:
    """The result of a recipe with ten digits at least, and all that it drew."""
    for path in sorted(folder.glob("runs/*/result.json")):
        data = json.loads(path.read_text())
        wide = data["status"] == "ok" and data["spec"]["global_batch"] >= DIGITS
        if wide and data["spec"]["recipe"] == recipe:
            return data, Image.open(path.with_name("samples.png")).convert("L")
    return None


def told(data: dict[str, Any]) -> str:
    """What its weights take, and how many of its digits a classifier recognises."""
    drawn = data["drawn"]
    right = sum(a == b for a, b in zip(drawn["taken_for"], drawn["labels"], strict=True))
    size = data["ranks"][0]["categories"]["parameters"] / MIB
    return f"weights {size:.2f} MiB, {right} of {len(drawn['labels'])} recognised"


def digit(sheet: Image.Image, index: int) -> Image.Image:
    """One sample of a grid, as small as a tile."""
    down, along = divmod(index, COLUMNS)
    left, top = along * (SIDE + GAP), down * (SIDE + GAP)
    return sheet.crop((left, top, left + SIDE, top + SIDE)).resize(
        (TILE, TILE), Image.Resampling.BOX
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
