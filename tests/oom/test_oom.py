"""``./run.sh oom``: real messages are read as their threads found, and no file harms the reader."""

from __future__ import annotations

import io
import itertools
import pickle
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import ROOT, cli
from harness.planner import records
from harness.planner.oom import log, reading, snapshot
from harness.planner.oom.log import Failure
from tests.made.predictions import made_up

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))

MESSAGE = CASES["simpletuner-786"]["text"]
SHORT = ROOT / "tests/cases/oom"
for name, row in yaml.safe_load(SHORT.with_name("messages.yaml").read_text("utf-8")).items():
    CASES[name] = dict(zip(("cause", "says", "first", "phase"), row, strict=False))
    CASES[name] |= {"text": (SHORT / f"{name}.txt").read_text()}
CASES["bar-behind"]["steps"] = 300


def first(text: str) -> Failure:
    """The error that is explained."""
    return log.scan(io.StringIO(text, newline=None)).first


@pytest.mark.parametrize("name", CASES)
def test_a_message_says_what_filled_which_memory_and_what_to_do(name):
    case, failure = CASES[name], first(CASES[name]["text"])
    found = reading.read(failure)
    assert found.cause == case["cause"]
    assert failure.phase == case.get("phase", failure.phase)
    assert failure.steps == case.get("steps", failure.steps)
    for key, value in case.get("numbers", {}).items():
        stated = getattr(failure.numbers, key)
        assert (len(stated) if key == "others" else stated) == value
    measures = " ".join(found.measures)
    assert case.get("measure", "") in measures and 1 <= len(found.measures) <= 3
    assert case.get("first", "") in found.measures[0]
    assert "page file" not in " ".join(found.measures[1:])
    assert case.get("never", "nothing of this") not in measures
    assert case.get("says", "") in found.sentence and case.get("where", "") in found.where
    for prefix in ("[rank3]: ", "2026-01-02 03:04:05,678 - ERROR - "):
        dressed = "\n".join(prefix + line for line in case["text"].splitlines())
        assert reading.read(first(dressed)).cause == case["cause"], prefix


def test_a_limit_of_the_process_itself_is_the_cause():
    text = MESSAGE.replace("Of the allocated", "21.00 GiB allowed; Of the allocated")
    text = text.replace("54.00 MiB", "0.50 GiB").replace("34.56 MiB is free", "1.56 GiB is free")
    assert reading.read(first(text)).cause == "limit"


# ---- snapshots ----

MIB = 2**20
SITE = "/venv/lib/python3.11/site-packages/"
STACKS = {
    "model, as loaded": [(f"{SITE}torch/nn/modules/module.py", 1369, "_apply"),
                         ("/home/u/train.py", 20, "main")],
    "activations": [(f"{SITE}torch/nn/functional.py", 9, "gelu"),
                    ("/home/u/models/dit.py", 77, "forward"),
                    (f"{SITE}torch/nn/modules/module.py", 1747, "_call_impl"),
                    ("/home/u/train.py", 40, "main")],
    "optimizer state": [(f"{SITE}torch/optim/adamw.py", 127, "_init_group"),
                        ("/home/u/train.py", 45, "main")],
    "backward or C++, no Python stack": [],
}  # fmt: skip
"""What an allocation holds, as the reader names it -> its stack, innermost first."""


def run_out(kind: str, *sizes: int, pieces: bool = False) -> tuple[dict[str, Any], Counter[str]]:
    """A snapshot of a card of 4 GiB, as torch writes it, on which a model of 1 GiB and blocks of a
    ``kind`` of so many MiB were, and not the last one; and the bytes held then. Of ``pieces`` half
    were freed. Afterwards all but the model goes, as an exception and its handler do."""
    held = [("model, as loaded", 1024 * MIB), *((kind, size * MIB) for size in sizes[:-1])]
    ends = [*itertools.accumulate(size for _, size in held)]
    places = (2**33 + end for end in [0, *ends])
    blocks = [(what, at, size) for (what, size), at in zip(held, places, strict=False)]
    freed = blocks[1::2] if pieces else []

    def event(action: str, what: str, addr: int, size: int, **more: int) -> dict[str, Any]:
        stack = [dict(filename=path, line=line, name=name) for path, line, name in STACKS[what]]
        return dict(action=action, addr=addr, size=size, stream=0, frames=stack, **more)

    trace = [event(action, *one) for one in blocks for action in ("segment_alloc", "alloc")]
    trace += [event("free_completed", *one) for one in freed]
    trace.append(event("oom", kind, 0, sizes[-1] * MIB, device_free=4096 * MIB - ends[-1]))
    for one in blocks[1:]:
        trace += [] if one in freed else [event("free_completed", *one)]
        trace.append(event("segment_free", *one))
    stack, (_, at, size) = trace[0]["frames"], blocks[0]
    block = {"address": at, "size": size, "state": "active_allocated", "frames": stack}
    segment = {"device": 0, "address": at, "total_size": size, "blocks": [block]}
    live = Counter()
    for what, _, size in [one for one in blocks if one not in freed]:
        live[what] += size
    return {"segments": [segment], "device_traces": [trace]}, live


@pytest.mark.parametrize(("kind", "sizes", "pieces", "read_as", "phase"), [
    ("activations", (2000, 900, 300), False, "full", "forward"),
    ("optimizer state", (2000, 900, 300), False, "full", "optimizer"),
    ("activations", (64,) * 44 + (320,), True, "pieces", "forward"),
])  # fmt: skip
def test_a_snapshot_tells_what_was_held_when_the_allocation_failed(
    kind, sizes, pieces, read_as, phase
):
    """The blocks were freed before the snapshot was written."""
    data, held = run_out(kind, *sizes, pieces=pieces)
    (found,) = snapshot.snapshots(snapshot.load(io.BytesIO(pickle.dumps(data))))
    assert found.failed and found.phases == held
    stated, reserved = found.numbers, (1024 + sum(sizes[:-1])) * MIB
    assert (stated.allocated, stated.pool) == (held.total(), reserved)
    assert stated.free == 4096 * MIB - reserved < stated.requested == sizes[-1] * MIB
    failure = Failure(log.GPU, "", frames=found.frames)
    assert reading.read(failure, stated).cause == read_as and failure.phase == phase
    for name, what in {"train.py": "model, as loaded", "dit.py": "activations"}.items():
        assert sum(size for line, size in found.lines.items() if name in line) >= held[what]


class Runs:
    """An object whose load makes a file."""

    def __reduce__(self):
        return (Path.touch, (Path("made-by-a-pickle"),))


# ---- bad and odd files ----

DATA = pickle.dumps(run_out("activations", 2000, 2000)[0])
BAD = {
    "empty": (b"", "it is empty"),
    "binary": (bytes(range(256)) * 8, "neither text nor a pickle"),
    "no error": (b"all is well\n" * 9, "no out-of-memory message that is known (lines read: 9)"),
    "cut snapshot": (DATA[:-400], "cut off or damaged"),
    "pickle that runs": (pickle.dumps({"segments": Runs()}), "nothing was run"),
    "pickle in a list": (pickle.dumps([[Runs()]], protocol=0), "no out-of-memory message that is"),
    "other pickle": (pickle.dumps({"weights": [1]}), "no segments and device_traces"),
    "odd segments": (pickle.dumps({"segments": [{"device": 0}]}), "no segments"),
    "other error": (
        b"RuntimeError: CUDA error: device-side assert triggered\n"
        b"RuntimeError: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`\n",
        "another error of the GPU came first",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_the_remedy(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    content, reason = BAD[name]
    Path("given").write_bytes(content)
    assert cli.main(["oom", "given"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line and "given" in line and "_dump_snapshot" in line
    assert not Path("made-by-a-pickle").exists()


def test_a_missing_file_and_a_model_without_a_recipe_are_refused(tmp_path, capsys):
    assert cli.main(["oom", str(tmp_path / "none.log")]) == 2
    assert cli.main(["oom", str(tmp_path), "--model", "flux-dev"]) == 2
    missing, model = capsys.readouterr().err.splitlines()
    assert "No such file" in missing and "add --recipe" in model


ODD = {
    "lines of Windows": f"Traceback\n{MESSAGE}\n".replace("\n", "\r\n").encode(),
    "PowerShell": f"{MESSAGE}\r\n".encode("utf-16"),
    "colours": f"\x1b[31m{MESSAGE.replace('54.00', '54.00' + chr(27) + '[0m')}\x1b[0m".encode(),
    "German numbers": MESSAGE.replace(".00 MiB", ",00 MiB").replace("23.63", "23,63").encode(),
    "wrapped": MESSAGE.replace(". ", ".\n").encode(),
    "bytes that are no text": b"\xff\xfa\n" + MESSAGE.encode() + b"\xc3",
    "lines without end": b"/x.py" * 10**5 + b" " * 10**5 + b"\n" + MESSAGE.encode(),
    "progress without line feeds": b"\r 5%|#  | 1/9 [\r" * 2000 + b"\n" + MESSAGE.encode(),
}


def given(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """What is piped into a command."""
    pipe = io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))
    monkeypatch.setattr(sys, "stdin", pipe)


@pytest.mark.parametrize("name", ODD)
def test_an_odd_log_gives_the_same_numbers(name, tmp_path, monkeypatch, capsys):
    given(monkeypatch, ODD[name])
    assert cli.main(["oom", "-"]) == 0
    text = capsys.readouterr().out
    assert "20.7 GiB of 23.6 GiB" in text and "process 1114104" in text
    assert max(map(len, text.splitlines())) <= 80 and "\x1b" not in text


def test_the_first_error_of_several_ranks_is_explained():
    other = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB."
    lines = [f"[rank{rank}]: {text}" for rank, text in ((1, MESSAGE), (0, other), (1, MESSAGE))]
    found = log.scan(io.StringIO("\n".join([*lines, "exits with return code = -9"])))
    assert [one.rank for one in found.failures] == ["1", "0", ""]
    assert found.first.rank == "1" and found.first.numbers.beside > 2**30


# ---- changes that fit ----


def need_of(recipe: str) -> float:
    """GiB that a recipe needs in these tests."""
    large = 28 if "checkpoint" not in recipe else 12
    return large / 2 if "share" in recipe else large


def answer(monkeypatch, capsys, *words: str, need=need_of) -> str:
    """The output after the measures for ``MESSAGE``, with made predictions."""
    made_up(monkeypatch, lambda row: need(str(row.recipe)))
    monkeypatch.setattr(records, "find", lambda *_: None)
    given(monkeypatch, MESSAGE.encode())
    assert cli.main(["oom", "-", *words]) == 0
    return capsys.readouterr().out.partition("Try, cheapest first:")[2]


DIT = ("--model", "DiT-XL/2", "--gpus", "1", "--recipe")


def test_changes_fit_the_card_of_the_message_without_what_others_hold(monkeypatch, capsys):
    text = answer(monkeypatch, capsys, *DIT, "single+bf16")
    assert "of 23.6 GiB, 1.6 GiB of it for other processes" in " ".join(text.split())
    changes = re.findall(r"^- (\+.+): ([\d.]+) GiB, time", text, re.M)
    assert changes[0][0] == "+checkpoint" and 1 < len(changes) <= 3
    assert all(float(size) < 23.6 for _, size in changes)
    export = " ".join(text.split()).partition("export the first: ")[2]
    assert export.startswith("./run.sh export single+bf16+checkpoint --model DiT-XL/2")
    assert "--gpu-memory 24197MiB" in export and export.endswith("--also 1612MiB")


def test_the_plan_is_searched_where_no_single_change_fits(monkeypatch, capsys):
    def need(recipe: str) -> int:
        return 12 if "to=fp8" in recipe and "block_swap" not in recipe else 28

    words = ("--model", "flux-dev", "--recipe", "single+bf16_pure+lora:rank=16")
    text = answer(monkeypatch, capsys, *words, need=need)
    assert "Smallest changes predicted to fit" in text and "- +cast:to=fp8" in text, text


def test_a_card_that_the_message_does_not_state_is_asked_for(monkeypatch, capsys):
    given(monkeypatch, b"RuntimeError: CUDA out of memory.")
    assert cli.main(["oom", "-", *DIT, "single+bf16"]) == 2
    assert "add --gpu CARD" in capsys.readouterr().err


# ---- the page ----


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/how-to/out-of-memory.md").read_text()
    _, message, shown, *_ = re.findall(r"^```(?:sh)?\n(.*?)^```$", page, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text(message)
    command, _, output = shown.partition("\n\n")
    assert command == "./run.sh oom train.log" and cli.main(["oom", "train.log"]) == 0
    assert capsys.readouterr().out == output
