"""The files of the atlas. No torch."""

from __future__ import annotations

from pathlib import Path

from harness.commands.atlas.lines import Lines, as_csv, values
from harness.commands.atlas.markdown import FOLDER, of_model, overview
from harness.commands.atlas.page import page

__all__ = ["write"]


def write(lines: Lines, folder: Path) -> list[Path]:
    """Write ``atlas.csv``, ``atlas.md`` with a page a model beside it, and ``atlas.html`` into
    ``folder``; the paths of the three."""
    pages = folder / FOLDER
    pages.mkdir(exist_ok=True)
    for model in values(lines, "Model"):
        (pages / f"{model}.md").write_text(of_model(model, lines), encoding="utf-8")
    texts = {"csv": as_csv(lines), "md": overview(lines), "html": page(lines)}
    for kind, text in texts.items():
        (folder / f"atlas.{kind}").write_text(text, encoding="utf-8")
    return [folder / f"atlas.{kind}" for kind in texts]
