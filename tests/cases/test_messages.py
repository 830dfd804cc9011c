"""Messages of memory that ran out, as people post them, and the same ones in other clothes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import yaml

from harness import cli
from harness.planner.oom import log, reading

FILES = Path(__file__).parent / "oom"
READ = yaml.safe_load(FILES.with_name("messages.yaml").read_text(encoding="utf-8"))
CLOTHES = {
    "a rank": lambda line: f"[rank3]: {line}",
    "a time": lambda line: f"2026-01-02 03:04:05,678 - ERROR - {line}",
    "colours": lambda line: f"\x1b[31m{line}\x1b[0m",
    "lines of Windows": lambda line: f"{line}\r",
}


def read(text: str) -> tuple[reading.Reading, log.Failure]:
    failure = log.scan(io.StringIO(text, newline=None)).first
    return reading.read(failure), failure


def test_every_file_has_its_expected_reading():
    assert {path.stem for path in FILES.iterdir()} == set(READ)


@pytest.mark.parametrize("name", READ)
def test_a_message_says_what_filled_which_memory_and_what_to_do(name, capsys):
    cause, sentence, measure, *phase = READ[name]
    found, failure = read((FILES / f"{name}.txt").read_text())
    assert (found.cause, sentence in found.sentence) == (cause, True), found
    assert measure in found.measures[0] and "page file" not in " ".join(found.measures[1:])
    assert (not phase or failure.phase == phase[0]) and failure.steps == 300 * (
        name == "bar-behind"
    )
    assert cli.main(["oom", str(FILES / f"{name}.txt")]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    rows = [line for line in shown.splitlines() if line.startswith(" ") and line.count("  ") > 3]
    assert all(len(line) <= 61 for line in rows), rows


@pytest.mark.parametrize("clothes", CLOTHES)
@pytest.mark.parametrize("name", READ)
def test_a_prefix_changes_no_reading(name, clothes):
    text = (FILES / f"{name}.txt").read_text()
    dressed = "\n".join(map(CLOTHES[clothes], text.splitlines()))
    assert read(dressed)[0].cause == READ[name][0]
