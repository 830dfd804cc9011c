"""Terminals of any width, a narrow page, a reference that did not run, and folders that may only be
read: nothing is cut, changed or lost without a word."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from harness import cli
from harness.report import SuiteHead, build, write_report
from harness.report.figures import units
from harness.report.rendering import sentences, table, tables
from harness.report.rendering.export import json_text
from harness.result import Result, Status, load_all
from tests.made.results import GOLDEN, cpu_set

# ---- terminals ----


@pytest.mark.parametrize("width", [30, 52, 80, 140])
def test_every_number_of_the_ranking_is_whole_or_its_column_is_named_as_left_out(width):
    results = list(cpu_set().values())
    (group,) = build(results, [], SuiteHead(reference="ddp")).groups
    grid = tables.ranking(group)
    out = io.StringIO()
    table.print_grid(grid, Console(file=out, width=width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    left = re.search(r"Hidden columns: (.*?)\. Widen the terminal", " ".join(text.split()))
    gone = left[1].split(", ") if left else []
    assert set(gone) <= set(grid.heads) - {"Recipe", "Samples/s"}
    words = text.split()
    for index, (head, kind) in enumerate(zip(grid.heads, grid.kinds, strict=True)):
        cells = [line[index] for line in grid.lines if line[index] not in ("", units.NONE)]
        if head in gone or kind in units.TEXT:
            continue
        for cell in cells:
            assert words.count(cell) >= cells.count(cell), f"{head} {cell} at {width}"


# ---- the reference ----


@pytest.mark.parametrize("status", [Status.GPU_OOM, None])
def test_a_stand_in_for_the_reference_is_said_on_top_and_wherever_rows_are_compared(status):
    results = [r for r in cpu_set().values() if r.spec.recipe != "ddp"]
    if status:
        ddp = cpu_set()["ddp"].spec
        results.append(Result(status=status, spec=ddp, reason="it broke", way_out="mend it"))
    report = build(results, [], SuiteHead(name="x", reference="ddp"))
    (group,) = report.groups
    instead = group.reference.label
    ended = f"ended as {status.value}" if status else "is not among the results"
    said = f"NOT the requested reference: ddp {ended}, so rows are compared with {instead}"
    assert said in sentences.summary(report) and sentences.errors(group)[0].startswith(said)
    notes = {line[1]: line[-1] for line in tables.ranking(group).lines}
    assert "in place of ddp" in notes[instead]
    assert '"reference_asked_for": "ddp"' in json_text(report)


# ---- folders that may only be read ----


def test_a_report_that_cannot_be_written_is_printed_and_the_files_are_named(
    tmp_path, monkeypatch, capsys
):
    """As on a disk that may only be read: root may write to any folder, whatever its mode."""
    folder = tmp_path / "set"
    shutil.copytree(GOLDEN / "cpu" / "runs", folder / "runs")
    real = os.open

    def only_read(path, flags, *given, **more) -> int:
        if flags & os.O_CREAT and folder in Path(path).parents:
            raise OSError(30, "Read-only file system", str(path))
        return real(path, flags, *given, **more)

    monkeypatch.setattr(os, "open", only_read)
    assert cli.main(["report", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "Samples/s" in said and "zero2" in said
    for name in ("report.md", "report.csv", "report.json", "report.html"):
        assert f"not written: {folder / name}: Read-only file system" in said
    with pytest.raises(OSError, match="Read-only"):
        write_report(*load_all(folder), folder)
