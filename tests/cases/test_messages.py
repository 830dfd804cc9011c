"""Messages of memory that ran out, as people post them, and the same ones in other clothes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from harness import cli
from harness.planner.oom import log, reading

FILES = Path(__file__).parent / "oom"
READ = {  # name -> cause, words of the diagnosis, words of the first measure
    "underflow": ("integrated", "underflow: about -51 MiB", "choose the other GPU"),
    "copy-to-cpu": ("pinned", "does not block", "pin less"),
    "flat-buffer": ("pinned", "buffers of an offload", "pin less"),
    "swap-to-cpu": ("pinned", "does not block", "pin less"),
    "swap-in-a-box": ("pinned", "does not block", "pin less"),
    "driver-alone": ("either", "on the GPU or of the host", "nvidia-smi"),
    "own-memory": ("own", "7.0 GiB of GPU 0 are this process's own", "beside PyTorch"),
    "hip-outside": ("unseen", "13.2 GiB of GPU 0 are outside", "rocm-smi"),
    "loader-killed": ("worker", "The host ran out", "fewer loader workers"),
    "full-shm": ("shm", "/dev/shm is full", "--shm-size"),
    "shm-of-a-file": ("shm", "/dev/shm is full", "--shm-size"),
    "slurm": ("scheduled", "lack of host memory", "--mem"),
    "many-mappings": ("mappings", "limit on mapped files", "vm.max_map_count"),
    "large-mapping": ("mapped", "to map 4.6 GiB of a file", "max_map_count"),
    "pinned-by-tensorflow": ("pinned", "pinned", "pin less"),
    "paging-file": ("paged", "page file", "enlarge the page file"),
    "paging-file-of-rust": ("paged", "page file", "enlarge the page file"),
    "npu": ("full", "NPU 1: 58.5 GiB", "checkpointing"),
    "xpu": ("large", "2.0 GiB exceeds the at most 0.7 GiB", "checkpointing"),
    "xpu-driver": ("outside", "no memory on the GPU", "nvidia-smi"),
    "without-free": ("full", "10.2 GiB", "checkpointing"),
    "without-allocated": ("cut", "A request of 0.5 GiB failed with 100 MiB free", "checkpointing"),
    "bar-behind": ("full", "22.9 GiB", "limit the largest sample"),
}
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
    cause, sentence, measure = READ[name]
    found, failure = read((FILES / f"{name}.txt").read_text())
    assert (found.cause, sentence in found.sentence) == (cause, True), found
    assert measure in found.measures[0] and "page file" not in " ".join(found.measures[1:])
    assert name != "bar-behind" or (failure.steps, failure.phase) == (300, "backward")
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
