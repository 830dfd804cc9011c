"""The rendered reports: golden files, formats that agree, sets that are small or broken, terminals
of any width, and folders that may only be read.

Golden files are built again by `PYTHONPATH=. python tests/made/results.py`.
"""

from __future__ import annotations

import csv
import dataclasses
import html as html_text
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from harness import cli
from harness.report import SuiteHead, build, write_report
from harness.report.data.answers import answers, believable, front
from harness.report.data.effects import effects
from harness.report.data.rows import read_suite
from harness.report.figures import derive
from harness.report.figures.numbers import numbers
from harness.report.rendering import export, pages, sentences, tables, terminal
from harness.report.rendering.export import json_text
from harness.report.rendering.sentences import MANY
from harness.result import Check, Peak, Result, Status, load_all
from harness.void import shown_status
from tests.made.results import FULL, GOLDEN, cpu_set, done, ok


def recorded(name: str):
    return load_all(GOLDEN / name)[0]


def report_of(name: str):
    return build(*load_all(GOLDEN / name), read_suite(GOLDEN / name))


def printed(results, skipped=(), **more) -> str:
    stream = io.StringIO()
    report = build(results, list(skipped), SuiteHead(**more))
    terminal.render(report, Console(file=stream, width=100))
    return stream.getvalue()


@pytest.mark.parametrize("name", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("file", "render"), [("report.md", pages.render_markdown), ("report.csv", export.csv_text)]
)
def test_golden(name, file, render):
    assert render(report_of(name)) == (GOLDEN / name / file).read_text(encoding="utf-8")


def test_a_repetition_that_failed_is_told_on_the_row_and_listed():
    results = recorded("cpu")
    lost = next(r for r in results if r.spec.recipe == "zero2" and r.spec.repeat == 1)
    lost.status, lost.reason = Status.HOST_OOM, "killed by the kernel"
    report = build(results, [])
    row = next(r for r in report.groups[0].rows if r.label == "zero2")
    assert row.numbers.repeats == 1
    assert "a repetition ended as host_oom" in pages.render_markdown(report)
    assert "zero2 (repeat 1)" in [gone.label for gone in report.unfinished]


def test_an_unknown_gpu_has_no_mfu_and_the_report_says_why():
    results = recorded("gpu")
    for result in results:
        result.environment = {**result.environment, "device": "Abacus 3"}
    text = pages.render_markdown(build(results, []))
    assert "No MFU: Abacus 3 is not in the table of peaks" in text
    assert "MFU %" not in text


def test_a_row_whose_flops_were_not_counted_has_neither_rate_nor_mfu():
    results = recorded("gpu")
    least = next(r for r in results if r.spec.recipe == "ddp+bf16")
    least.flops_per_step = 0.0
    report = build(results, [])
    rows = {row.label: row.numbers for row in report.groups[0].rows}
    assert rows["ddp+bf16"].flops_per_second is None and rows["ddp+bf16"].mfu_fraction is None
    assert rows["ddp"].mfu_fraction > 0
    assert "No FLOP/s: ddp+bf16. FLOPs are not counted in" in pages.render_markdown(report)


def test_a_row_that_differs_is_not_on_the_front_however_fast():
    results = recorded("cpu")
    wrong = next(r for r in results if "accumulate:steps=4" in r.spec.recipe)
    for rank in wrong.ranks:
        rank.step_seconds = [s / 100 for s in rank.step_seconds]
    group = build(results, []).groups[0]
    rows = group.rows
    assert (rows[0].versus.parity, rows[0].versus.front) == ("DIFFERS", False)
    assert rows[1].versus.front
    assert answers(group)[0].row is rows[1] and rows[0] not in believable(group)
    assert front(group)[-1] is rows[1]


def test_an_exact_row_is_not_held_to_a_reference_that_is_not_exact():
    rows = build(recorded("gpu"), [], SuiteHead(reference="ddp+bf16")).groups[0].rows
    assert {row.label: row.versus.parity for row in rows}["ddp+checkpoint"] == "not comparable"


def test_without_a_gpu_every_format_says_so():
    for render in (pages.render_markdown, pages.render_html, export.json_text):
        assert "Do NOT compare" in render(report_of("cpu"))
    assert "Do NOT compare" in " ".join(printed(recorded("cpu")).split())
    assert "Do NOT compare" not in pages.render_markdown(report_of("gpu"))


def test_rows_on_other_devices_or_of_other_work_are_not_ranked_together():
    report = build(recorded("cpu") + recorded("gpu"), [], SuiteHead(reference="ddp"))
    assert len(report.groups) == 2
    assert report.groups[0].unlike == ""
    assert "H100" in report.groups[1].unlike
    assert "global_batch 64 (not 16)" in report.groups[1].unlike
    assert "Not ranked with group 1" in pages.render_html(report)
    assert "Not ranked with" in printed(recorded("cpu") + recorded("gpu"))


@pytest.mark.parametrize(
    ("wanted", "names", "found"),
    [
        ("checkpoint+zero2", (), "zero2+checkpoint"), ("nothing", (), "ddp"), ("", (), "ddp"),
        ("", ("zero3", "zero3+checkpoint", "ddp+bf16"), "zero3"),
    ],
)  # fmt: skip
def test_the_reference_is_the_one_asked_for_else_the_plainest_exact_row(wanted, names, found):
    results = [r for r in recorded("cpu") if not names or r.spec.recipe in names]
    report = build(results[::-1], [], SuiteHead(reference=wanted))
    assert report.groups[0].reference.label == found


def test_nothing_finished():
    for results in ([], [r for r in recorded("cpu") if r.status is not Status.OK]):
        report = build(results, ["x: not a result file"])
        assert export.csv_text(report) and export.json_text(report)
        for text in (pages.render_markdown(report), pages.render_html(report), printed(results)):
            assert "No run finished" in text


def test_broken_and_foreign_files_are_named_and_skipped(tmp_path):
    shutil.copytree(GOLDEN / "cpu", tmp_path, dirs_exist_ok=True)
    for name, text in {"a": "{", "b": '{"schema": 99, "spec": {}}', "c": "[]"}.items():
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "result.json").write_text(text)
    results, skipped = load_all(tmp_path)
    paths = write_report(results, skipped, tmp_path)
    assert len(skipped) == 3
    assert [p.name for p in paths] == ["report.md", "report.csv", "report.json", "report.html"]
    for path in paths:
        if path.suffix != ".csv":
            assert "schema 99" in path.read_text(encoding="utf-8")
    assert len(list(csv.reader(io.StringIO(paths[1].read_text())))) == 15
    assert "schema 99" in " ".join(printed(results, skipped).split())
    assert list(tmp_path.glob(".report*")) == []


def test_not_a_number_is_null_in_json():
    results = recorded("cpu")
    results[1].losses[3] = float("nan")
    data = json.loads(export.json_text(build(results, [])), parse_constant=pytest.fail)
    assert data["groups"]


def test_html_stands_alone_and_escapes_what_runs_say():
    results = recorded("cpu")
    results[0].status, results[0].reason = Status.FAILED, "<script>alert(1)</script>"
    results[0].log_tail = "</pre><b>bold"
    text = pages.render_html(build(results, []))
    assert "<script>alert(1)" not in text
    assert "</pre><b>bold" not in text
    links = re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", text)
    assert links == []
    assert not re.search(r"url\(|@import", text)


# ---- what a CPU's peak is of ----


def edited(edit) -> str:
    """The Markdown report of the CPU's set with its zero3_offload row edited."""
    results = recorded("cpu")
    for result in results:
        for rank in result.ranks if result.spec.recipe == "zero3_offload" else ():
            edit(rank)
    return pages.render_markdown(build(results, []))


def test_places_that_are_not_known_are_said_in_the_row():
    words = "unknown: 4 operations of forward took operands in both places, as aten.mm"
    told = edited(lambda rank: setattr(rank.categories, "placed_by", words))
    assert f"Placement of zero3_offload's tensors: {words}. All count as on the device." in told
    assert "places unknown" in next(
        x for x in told.splitlines() if re.match(r"\| [\d-]+ \| `zero3_off", x)
    )


def test_what_was_not_traced_has_no_peak_and_is_in_no_answer_about_memory():
    told = edited(lambda rank: setattr(rank, "categories", None))
    line = next(x for x in told.splitlines() if re.match(r"\| [\d-]+ \| `zero3_off", x))
    assert "not traced: resident 0.530 GiB" in line
    assert "**Least memory**: `zero3+checkpoint`" in told
    assert "**Least memory**: `zero3_offload`" in edited(lambda rank: None)


# ---- many rows ----


def test_a_page_of_many_rows_ranks_all_and_shows_the_fastest_in_detail():
    others = (done(f"ddp+checkpoint:every={n}", 0.4 + n / 100, FULL) for n in range(1, 200))
    report = build([done("ddp", 0.4, FULL), *others], [], SuiteHead())
    page = pages.render_html(report)
    (ranked,) = re.findall(r'<table data-key="ranking".*?</table>', page, re.S)
    assert ranked.count("<tr") == 1 + 200 and page.count('<div class="command">') == MANY
    assert f"all but the fastest {MANY} rows" in page
    assert sentences.left_out(report) in html_text.unescape(page)


# ---- the table of effects ----


def test_a_sharding_is_held_against_the_reference_s():
    rows = ["ddp", "zero2", "zero3", "ddp+checkpoint", "zero3+checkpoint"]
    results = [done(name, 1.0, (30, 2, 60, 30, 160, 40)) for name in rows]
    group = build(results, [], SuiteHead(reference="ddp")).groups[0]
    assert [(e.part, e.replaced, e.base.label) for e in effects(group)] == [
        ("zero2", "ddp", "ddp"), ("zero3", "ddp", "ddp"), ("zero3", "ddp", "ddp+checkpoint"),
        ("checkpoint", "", "ddp"), ("checkpoint", "", "zero3"),
    ]  # fmt: skip


# ---- narrow terminals, a lost reference, folders that may only be read ----


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


# ---- derived numbers, worked out by hand ----


def untraced(**changes) -> Result:
    """A row of three steps, of which nothing was traced."""
    made = ok("ddp")
    made.ranks[0].phases = {"load": Peak(allocated=10), "steady": Peak(allocated=100)}
    return dataclasses.replace(made, **changes)


@pytest.mark.parametrize(("device", "kind", "peak"), [
    ("NVIDIA H200", "bfloat16", 989e12), ("NVIDIA H100 80GB HBM3", "tf32", 494e12),
    ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
    ("cpu", "float32", "CPU"), ("Abacus 3", "float32", "Abacus 3"),
    ("NVIDIA H200", None, "no precision"), ("Tesla T4", "bfloat16", "no bfloat16 unit"),
])  # fmt: skip
def test_a_peak_is_known_or_its_lack_has_a_reason(device, kind, peak):
    share, reason = derive.mfu(1e12, device, kind)
    if isinstance(peak, str):
        assert share is None and peak in reason
    else:
        assert (share, reason) == (pytest.approx(1e12 / peak), None)
        share, reason = derive.mfu(None, device, kind)
        assert share is None and "FLOPs" in reason


def test_what_was_not_traced_has_no_peak_on_a_cpu_and_keeps_its_resident_mark():
    found = numbers([untraced()])
    assert (found.peak_bytes, found.need_bytes) == (None, None)
    assert (found.resident_peak_bytes, found.placed_by) == (100, None)


def test_a_row_that_died_keeps_what_its_meter_had_counted():
    gone = untraced(status=Status.GPU_OOM, reason="no room")
    assert build([gone], []).unfinished[0].so_far_bytes == 100


def test_compromise():
    best = derive.compromise([(100, 10), (50, 9), (75, 8)])
    assert best == 1, "half the memory for a tenth of the speed, not a quarter for two tenths"
    for points in ([(100, 10), (90, 5)], [(100, 10)], []):
        assert derive.compromise(points) is None, "to save a tenth for a half does not pay"


def test_a_failed_check_voids_an_ok_row():
    wrong = Check(name="micro batch", asked=[8], found=[4], ok=False)
    status, reason = shown_status(untraced(audit=[wrong]))
    assert status is Status.VOID
    assert reason == "micro batch: expected [8], found [4]"


def test_an_ok_row_without_steps_is_void():
    assert shown_status(untraced(ranks=[]))[0] is Status.VOID
    assert shown_status(untraced())[0] is Status.OK
