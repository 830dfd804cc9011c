"""The files of the atlas. No torch."""

from __future__ import annotations

from pathlib import Path

from harness.commands.atlas.lines import Lines, as_csv, values
from harness.commands.atlas.markdown import FOLDER, of_model, overview
from harness.commands.atlas.page import page
from harness.commands.planning.plan.asked import PlanError
from harness.json_files import whole

__all__ = ["write"]


def write(lines: Lines, folder: Path) -> list[Path]:
    """Write ``atlas.csv``, ``atlas.md`` with a page a model beside it, and ``atlas.html`` into
    ``folder``; the paths of the three."""
    pages = folder / FOLDER
    pages.mkdir(exist_ok=True)
    if pages.is_symlink():
        raise PlanError(f"{pages} is a symbolic link; remove it, or give another --out")
    texts = {pages / f"{name}.md": of_model(name, lines) for name in values(lines, "Model")}
    made = {"csv": as_csv(lines), "md": overview(lines), "html": page(lines)}
    texts |= {folder / f"atlas.{kind}": text for kind, text in made.items()}
    for path, text in texts.items():
        with whole(path) as stream:
            stream.write(text)
    return [folder / f"atlas.{kind}" for kind in made]
