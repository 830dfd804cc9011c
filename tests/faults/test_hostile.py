"""Files and words from somebody else: read, or refused in one line, within bounds."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import lzma
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness import ROOT, cli
from harness.data.latents import Folder
from harness.json_files import BadFile, atomic_file, read_json, write_json
from harness.launch import checkpoints
from harness.launch.outcome import Facts, classify
from harness.planner import records
from harness.planner.export import files as trainers_files
from harness.planner.oom import command as oom
from harness.prediction import kept
from harness.report import build
from harness.report.rendering import pages
from harness.resolve import resolve
from harness.result import BadResult, Result, Status, load
from harness.spec import Spec
from harness.subjects.library import families
from harness.suite.file import load_suite
from harness.suite.matrix import specs
from harness.worker.status import Reporter
from strategies import files, launch_file, parse
from strategies.base import BadInput
from strategies.distillation.files import header
from strategies.files import bounded_memory
from tests.children.faked import faked
from tests.made.calibrations import made
from tests.made.results import cpu_set

REFUSED = (BadInput, BadFile, BadResult, launch_file.LaunchFileError)
"""Errors that the command line prints in one line, with exit code 2."""
MOST_SECONDS, MOST_BYTES = 10.0, 2**30
"""Processor time, and memory, that reading one file may take."""


RUNS = ROOT / "docs/results/cpu-2-cores-default/runs"


def read_log(path: Path) -> None:
    oom.oom(types.SimpleNamespace(file=str(path), model="", recipe="", json=None))  # type: ignore[arg-type]


def read_suite(path: Path) -> None:
    specs(load_suite(str(path), "cpu"), {})


def read_latents(path: Path) -> None:
    """The file as the first latent of a folder."""
    folder = path.parent / f"{path.name}.folder"
    for name in ("d_features", "d_labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    np.save(folder / "d_labels" / "0.npy", np.zeros(1, np.int64))
    target = folder / "d_features" / "0.npy"
    target.unlink(missing_ok=True)
    target.symlink_to(path)
    Folder(str(folder), thorough=True)


NPY = io.BytesIO()
np.save(NPY, np.zeros((1, 4, 8, 8), np.float32))
HEAD = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
SNAPSHOT = {
    "segments": [
        {"device": 0, "address": 0, "total_size": 2**21,
         "blocks": [{"size": 2**20, "state": "active_allocated", "frames": []}]},
    ],
    "device_traces": [[{"action": "oom", "size": 2**20, "device_free": 7, "frames": []}]],
}  # fmt: skip
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23.65 GiB of which 1.00 GiB is free. Of the allocated memory 20.00 GiB is "
    "allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated."
)
SCRIPT = """A=16
accelerate launch --num_processes 2 train_dreambooth_lora_flux.py --rank=$A \\
  --resolution=512 --train_batch_size=1 --mixed_precision=bf16 --gradient_checkpointing
"""
TOML = """[model]
type = "flux"
diffusers_path = "x"
[optimizer]
type = "adamw"
"""
SUITE = "name: a\nreference: ddp\ntimeout_seconds: 60\ncpu: {steps: 2}\nrecipes: [ddp, zero2]\n"


class Reader(NamedTuple):
    """A reader, the end of its files' names, and files that it reads."""

    read: Callable[[Path], Any]
    suffix: str
    seeds: tuple[bytes, ...]


def trainer(path: Path) -> None:
    trainers_files.read([path])


LAUNCH = [(ROOT / "launch_configs" / name).read_bytes() for name in ("zero2.yaml", "fsdp2.yaml")]
READERS = {
    "launch file": Reader(launch_file.read, ".yaml", tuple(LAUNCH)),
    "suite": Reader(read_suite, ".yaml", (SUITE.encode(),)),
    "shell script": Reader(trainer, ".sh", (SCRIPT.encode(),)),
    "TOML": Reader(trainer, ".toml", (TOML.encode(),)),
    "YAML": Reader(trainer, ".yaml", (LAUNCH[0],)),
    "JSON": Reader(trainer, ".json", ((ROOT / "launch_configs/zero2.json").read_bytes(),)),
    "log": Reader(read_log, ".txt", (LOG.encode(),)),
    "snapshot": Reader(read_log, ".pickle", (pickle.dumps(SNAPSHOT), pickle.dumps(SNAPSHOT, 2))),
    "result": Reader(load, ".json", (next(RUNS.glob("*/result.json")).read_bytes(),)),
    "JSON file": Reader(read_json, ".json", (b'{"a": [1, {"b": null}]}',)),
    "prediction": Reader(kept, ".json", (next(RUNS.glob("*/prediction.json")).read_bytes(),)),
    "records": Reader(records._lines.__wrapped__, ".xz",
                      (lzma.compress(b'a\t["day", {}, "usual", {}]\n'),)),
    "configuration": Reader(lambda p: families.find("diffusers:FluxTransformer2DModel", str(p)),
                            ".json", (b'{"num_layers": 2, "in_channels": 64}',)),
    "latents": Reader(read_latents, ".npy", (NPY.getvalue(),)),
    "weights": Reader(lambda p: header(str(p)), ".safetensors",
                      (len(HEAD).to_bytes(8, "little") + HEAD + bytes(8),)),
}  # fmt: skip
QUIET = ("prediction", "records", "weights")
"""Readers for which an unreadable file is a missing one."""


def outcome(reader: Reader, path: Path) -> Exception | None:
    """The refusal of a file, if it is one; any other error, and too much time or memory, fails."""
    began = time.process_time()
    try:
        with bounded_memory(MOST_BYTES):
            reader.read(path)
        refusal = None
    except REFUSED as error:
        refusal = error
        assert len(str(error).splitlines()) == 1, str(error)
    assert time.process_time() - began < MOST_SECONDS
    return refusal


# ---- what is no regular file, or too large ----


@pytest.mark.parametrize("kind", ["fifo", "device", "a terabyte that takes no space"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_of_a_usual_size_is_refused_at_once(name, kind, tmp_path):
    path = tmp_path / f"a{READERS[name].suffix}"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)
    refusal = outcome(READERS[name], path)
    read = name in QUIET or (name in ("latents", "log") and kind.startswith("a terabyte"))
    assert read or refusal is not None


@pytest.mark.parametrize("name", READERS)
def test_each_reader_reads_what_it_is_for(name, tmp_path):
    for seed in READERS[name].seeds:
        path = tmp_path / f"a{READERS[name].suffix}"
        path.write_bytes(seed)
        assert outcome(READERS[name], path) is None


# ---- bombs ----

BOMBS = {
    "memo": ("snapshot", b"\x80\x02]r\xff\xff\xff\x7f."),
    "sizes": ("snapshot", pickle.dumps({**SNAPSHOT, "segments": [
        {**SNAPSHOT["segments"][0], "total_size": 10**400}]})),  # type: ignore[index]
    "variables": ("shell script", b"A=aa\n" + b"A=$A$A\n" * 60 + b"python train.py $A\n"),
    "dots": ("TOML", b".".join([b"a"] * 60_000) + b" = 1\n"),
    "brackets": ("TOML", b"a = " + b"[" * 100_000),
    "aliases": ("YAML", b"a: &a [x]\n" + b"b: [*a, *a]\n" * 20),
    "nested": ("launch file", b"a: " + b"[" * 4000),
    "lists": ("result", b"[" + b"[]," * 2_000_000 + b"[]]"),
    "xz": ("records", lzma.compress(bytes(2**24)) * 64),  # a GiB, in streams
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_grows_when_it_is_read_is_refused_within_bounds(bomb, tmp_path):
    name, content = BOMBS[bomb]
    path = tmp_path / f"a{READERS[name].suffix}"
    path.write_bytes(content)
    assert outcome(READERS[name], path) is not None or name in QUIET


# ---- absurd sizes ----


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("steps: 2", "steps: 2, repeat: 1000000000", "repeat"),
        ("timeout_seconds: 60", "timeout_seconds: -1", "timeout_seconds"),
        ("steps: 2", "processes: 100000000", "processes"),
    ],
)
def test_an_absurd_number_in_a_suite_is_refused_with_its_key(tmp_path, old, new, key):
    path = tmp_path / "a.yaml"
    path.write_text(SUITE.replace(old, new))
    with pytest.raises(BadInput, match=f"{key} is "):
        read_suite(path)


# ---- any bytes ----

HOSTILE = [
    *(b"\x00", b"\xff\xfe", b"\x1b]0;x\x07", b"{", b"[" * 60, b"]", b'"', b"'", b"\\", b"\n" * 9),
    *(b"&a *a", b"!!python/object:os.system", b"9" * 400, b"-1", b"1e999", b"nan", b"${A:-$A}"),
    *(b"$(", b"`", b"((", b"\r", b"<<: *a", b"? [a]", b": ", b"- " * 99, b"null", b"true", b"1_0"),
    *(b"\xc2\x85", b"\xf0\x9f\x98\x80", b".", b"=", b"--", b"#", b"\t", b"0." * 300),
    *(b"r\xff\xff\xff\x7f", b"c__builtin__\neval\n", b"\x81"),
]


@st.composite
def spoiled(draw: Any, seeds: tuple[bytes, ...]) -> bytes:
    """A file that is read, with pieces cut, repeated, moved, or replaced by hostile ones."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        at, length = draw(st.integers(0, len(data))), draw(st.integers(0, 40))
        kind = draw(st.sampled_from(("put", "instead", "cut", "again", "byte")))
        piece = draw(st.sampled_from(HOSTILE)) if kind in ("put", "instead") else b""
        piece = data[at : at + length] * draw(st.integers(2, 50)) if kind == "again" else piece
        piece = bytes([draw(st.integers(0, 255))]) if kind == "byte" else piece
        data = data[:at] + piece + data[at + (0 if kind == "put" else length) :]
    return data


@settings(max_examples=60, deadline=None, derandomize=True, database=None,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(case=st.sampled_from(sorted(READERS)).flatmap(
    lambda name: st.tuples(st.just(READERS[name]), spoiled(READERS[name].seeds))))  # fmt: skip
def test_any_bytes_are_read_or_refused(case, tmp_path):
    reader, data = case
    path = tmp_path / f"a{reader.suffix}"
    path.write_bytes(data)
    outcome(reader, path)


# ---- broken files of results, odd words, and what is written ----


ROWS = ("ddp-", "zero2-")
SOME = settings(
    max_examples=int(os.environ.get("HEADROOM_EXAMPLES", 6)), deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
"""A few in each run of the tests, alike each time; HEADROOM_EXAMPLES=5000 by hand."""
ESCAPE = "\x1b]0;owned\x07\x1b[2J=cmd|'/c calc'!A1"
ODD = (
    None, True, -1, 0, 10**18, 1e308, float("nan"), float("inf"), "", "a", ESCAPE, "../ESCAPED",
    "\x00", "=1+1", "x" * 16_000, [], {}, [[]], [None] * 3, {"a": 1}, {"": {"": None}},
    [1, "a", {}],
)  # fmt: skip
"""Values in the place of others."""
LITERALS = ("9" * 400, "-1e400", '"\\ud800"', "[" * 60 + "]" * 60, "[" * 9999, '"\\u001b[2J"')
"""The same as text that no value writes."""
DEEP = "[" * 100_000


def places(data: Any, at: tuple = ()) -> Iterator[tuple]:
    """The way to each value in ``data``; of a list to its first two."""
    yield at
    inner = data.items() if isinstance(data, dict) else enumerate(data[:2])
    for key, value in inner if isinstance(data, (dict, list)) else ():
        yield from places(value, (*at, key)) if isinstance(value, (dict, list)) else [(*at, key)]


@st.composite
def odd(draw: Any, text: str) -> str:
    """JSON with one value replaced, left out or added, or with a byte changed."""
    data = json.loads(text)
    at = draw(st.sampled_from([way for way in places(data) if way]))
    holder = copy.deepcopy(data)
    inner = holder
    for key in at[:-1]:
        inner = inner[key]
    kind = draw(st.sampled_from(("value", "value", "value", "literal", "gone", "more", "cut")))
    if kind == "value":
        inner[at[-1]] = draw(st.sampled_from(ODD))
    elif kind == "literal":
        inner[at[-1]] = "PUT HERE"
    elif kind == "gone":
        del inner[at[-1]]
    elif kind == "more":
        (inner if isinstance(inner, dict) else holder)["surprise"] = 1
    text = json.dumps(holder).replace('"PUT HERE"', draw(st.sampled_from(LITERALS)))
    return text[: draw(st.integers(0, len(text)))] if kind == "cut" else text


def held(words: list[str], codes: tuple[int, ...] = (0, 2)) -> tuple[int, str]:
    """Exit code and output of a command in this process, held to what is promised of any input."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
    printed, errors = out.getvalue(), told.getvalue()
    assert code in codes, errors
    assert code != 2 or len(errors.splitlines()) == 1, errors
    assert "\x1b" not in printed + errors and "\x07" not in printed + errors
    return code, printed + errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder of two rows with their predictions, a suite and a calibration."""
    folder = tmp_path_factory.mktemp("hostile") / "inner" / "results"
    for run in sorted((RUNS).iterdir()):
        if run.name.startswith(ROWS) and "+" not in run.name:
            shutil.copytree(run, folder / "runs" / run.name)
    shutil.copy(RUNS.parent / "suite.json", folder)
    made().write(folder / "calibration.json")
    assert held(["report", str(folder)])[0] == 0
    return folder


@pytest.mark.parametrize(
    "name", ["result.json", "prediction.json", "suite.json", "calibration.json"]
)
def test_a_broken_file_stops_no_report_and_writes_nowhere_else(name, whole):
    path = next(iter(sorted(whole.rglob(name))))
    good = path.read_text(encoding="utf-8")

    @SOME
    @given(odd(good))
    @example(DEEP)
    @example("")
    @example(json.dumps(json.loads(good) | {"name": "../ESCAPED"}))
    def broke(text: str) -> None:
        path.write_text(text, encoding="utf-8")
        try:
            code, printed = held(["report", str(whole)])
        finally:
            path.write_text(good, encoding="utf-8")
        assert code == 0, printed
        made = [file.read_text(encoding="utf-8") for file in whole.glob("*.*")]
        assert len(made) >= 6 and not any("\x1b" in text or "\x00" in text for text in made)
        assert [p.name for p in whole.parent.parent.iterdir()] == ["inner"]
        assert [p.name for p in whole.parent.iterdir()] == ["results"]
        if text == DEEP:
            assert name in printed and name in (whole / "report.md").read_text(encoding="utf-8")

    broke()


# ---- settings, recipes, suites ----

WORDS = st.sampled_from(
    ("num_layers", "=", "[1,", "[", "]", ",", "!!python/object/apply:os.system [true]", "&a [*a]",
     "2020-01-01", "9" * 400, ".inf", "null", "~", "{", "a: b", "\x1b[2J", "\x00", "2", ":", "'")
)  # fmt: skip


@SOME
@given(st.lists(WORDS, max_size=6).map("".join))
@example("num_layers=[1,")
@example("num_layers=!!python/object/apply:os.system [touch x]")
@example("num_layers=2020-01-01")
@example(f"num_layers={'9' * 400}")
def test_settings_of_a_model_are_plain_data_or_refused(text):
    try:
        found = families.values(text)
    except BadInput as error:
        assert len(str(error)) < 400
    else:
        json.dumps(found, allow_nan=False)


@SOME
@given(st.text(alphabet="dpz3bf16+:=,[]{}.-\x1b\x00\n\u20ac", max_size=40))
@example("ddp+" * 3000)
@example("checkpoint:every=" + "9" * 400)
def test_a_recipe_is_read_or_refused(text):
    with contextlib.suppress(BadInput):
        assert parse(parse(text).text).text == parse(text).text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x 1\nb: *x", "line 2: .*alias"),
        ("[" * 41 + "]" * 41, "nested deeper than 40 levels"),
        ("9" * 20, "a whole number of 67 bits"),
        ("-.inf", "no finite number"),
        ("a: 1\na: 2", "line 2: .*given twice"),
        ("!!python/object:os.system {}", "line 1: "),
    ],
)
def test_what_yaml_has_beyond_plain_data_is_named(text, said):
    with pytest.raises(ValueError, match=said):
        files.parse_yaml(text)
    assert files.parse_yaml("day: 2026-11-24") == {"day": "2026-11-24"}


# ---- what is written, and where ----


def test_what_is_written_follows_no_link_and_keeps_the_users_umask(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    inside.mkdir()
    (outside / "kept").write_text("kept")
    for name in (".lock", "report.md"):
        (inside / name).symlink_to(outside / "kept")
    before = os.umask(0o027)
    try:
        write_json(inside / "a.json", {})
        with atomic_file(inside / "report.md") as stream:
            stream.write("new")
    finally:
        os.umask(before)
    assert (inside / "a.json").stat().st_mode & 0o777 == 0o640
    assert not (inside / "report.md").is_symlink()
    with pytest.raises(files.NotOurs, match="symbolic link"), files.lock_file(inside / ".lock"):
        pass
    (inside / "owned").write_text("content")
    with files.lock_file(inside / "owned"):
        pass
    assert (inside / "owned").read_text() == "content"
    assert (outside / "kept").read_text() == "kept"


def test_cells_that_a_spreadsheet_would_run_are_text():
    for text in ("=1+1", "@x", "+cmd|' /C calc'!A0", "-2+3", "\tx"):
        assert files.cell(text) == f"'{text}"
    for value in ("-", "-1.5", "+inf", "ddp+bf16", -3, None, ""):
        assert files.cell(value) == value


# ---- modules of one's own ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def make():\n    raise ValueError('odd')\n", "line 2: ValueError: odd"),
        ("def make(:\n", "line 1: SyntaxError"),
        ("def make():\n    return 1\n", "it returned int"),
        (
            "from torch import nn, randn\n"
            "def loss(model, batch): return odd(model)\n"
            "def make(): return nn.Linear(8, 8), {'x': randn(4, 8)}, loss\n",
            "line 2: NameError: name 'odd' is not defined",
        ),
    ],
)
def test_a_module_that_fails_is_one_line(text, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    _, printed = held(["plan", "--model", f"{path}:make", "--gpu", "RTX-4090"], (2,))
    assert said in printed and str(path) in printed


# ---- who can reach a run ----

STORE = """
import sys
from datetime import timedelta
from pathlib import Path
import torch.distributed
from harness.launch.command import free_port
from harness.launch.on_loopback import listen_on_loopback
for ours in (False, True):
    if ours:
        listen_on_loopback()
    port = free_port()
    made = sys.modules["torch.distributed.rendezvous"]._create_c10d_store
    store = made("127.0.0.1", port, 0, 1, timedelta(seconds=30))
    store.set("a", "b")
    lines = [l for n in ("tcp", "tcp6") for l in Path(f"/proc/net/{n}").read_text().splitlines()]
    print(*[l.split()[1].split(":")[0] for l in lines if l.split()[1].endswith(f":{port:04X}")
            and l.split()[3] == "0A"])
"""


def test_a_store_of_one_machine_is_not_reached_from_others():
    words = [sys.executable, "-c", STORE]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    torch_s, ours = done.stdout.splitlines()
    assert ours == "0100007F"
    assert torch_s != "0100007F", "torch listens there alone by itself: ours can go"


# ---- resuming, values, and ways out ----


TRAIN = ["train", "--recipe", "single", "--model", "DiT-T/8", "--steps", "20", "--resume"]
SPEC = Spec(recipe="single", model="DiT-T/8", objective="flow", steps=18, ema=0.998,
            learning_rate=2e-3, beta2=0.99)  # fmt: skip


def saved(folder: Path, step: int, *, cut: bool = False, **others) -> Path:
    """A checkpoint as a training leaves it; ``cut``: as a disk that filled up left it."""
    path = folder / f"step-{step:08d}"
    (path / "engine").mkdir(parents=True)
    (path / "engine" / "shard.pt").write_bytes(b"x" * 100)
    facts = {**checkpoints.terms(resolve(SPEC)), "step": step, "files": checkpoints.sizes(path)}
    (path / checkpoints.DONE).write_text(json.dumps(facts | others))
    if cut:
        (path / "engine" / "shard.pt").write_bytes(b"x" * 60)
    return path


def resume(folder: Path, *words: str) -> int:
    out = ["--checkpoint", str(folder), "--out", str(folder / "run"), "--dry-run"]
    with faked():
        return cli.main([*TRAIN, *out, *words])


def test_a_cut_checkpoint_is_passed_over_and_said(tmp_path, capsys):
    older, newer = saved(tmp_path, 5), saved(tmp_path, 10, cut=True)
    assert checkpoints.newest_whole(tmp_path)[0] == older
    assert resume(tmp_path) == 0
    said = capsys.readouterr().out
    why = f"{newer.name} is incomplete: engine/shard.pt has 60 of 100 bytes"
    assert f"{why}\nresumes {older.name}" in said
    (newer / "engine" / "shard.pt").unlink()
    assert "is missing" in checkpoints.fault(newer)
    (newer / checkpoints.DONE).write_text("{half")
    assert "not readable" in checkpoints.fault(newer) and checkpoints.fault(older) == ""


def test_without_a_whole_checkpoint_nothing_begins_anew_unasked(tmp_path, capsys):
    saved(tmp_path, 5, cut=True)
    assert resume(tmp_path) == 2
    assert "has no checkpoint to resume (step-00000005 is in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "single+checkpoint"], "saved with recipe single, not single+checkpoint"),
        (["--seed", "3"], "saved with seed 0, not 3"),
        (["--model", "DiT-T/8:heads=1"], "saved with model DiT-T/8, not DiT-T/8:heads=1"),
    ],
)
def test_another_training_is_refused_before_the_launch(words, said, tmp_path, capsys):
    saved(tmp_path, 5)
    assert resume(tmp_path, *words) == 2
    text = capsys.readouterr().err
    assert said in text and "; resume with the same, or start anew" in text


# ---- hostile text ----

EVIL = "<img src=x onerror=alert(1)> [here](javascript:alert(1)) ```\n# no"


def test_markdown_holds_what_results_say_as_text(tmp_path):
    results = list(cpu_set().values())
    results[0].meter_notes = [EVIL]
    for result in results:
        result.environment = {**result.environment, "cpu": EVIL}
    results[0].command = f"echo {EVIL}"
    lost = Result(status=Status.FAILED, spec=results[1].spec, reason=EVIL, way_out=EVIL)
    text = pages.render_markdown(build([*results, lost], [f"x/result.json: {EVIL}"]))
    fences = re.findall(r"^(`{3,})sh\n(.*?)^\1$", text, re.S | re.M)
    assert len(fences) == 1 and "# no" in fences[0][1], "the block ends where it was ended by us"
    prose = text.replace(fences[0][1], "")
    bare = re.sub(r"`[^`]*`", "", prose)
    assert "&lt;img" in bare and "<img" not in bare and "](javascript" not in bare


def test_the_way_out_is_the_one_that_the_reason_has(tmp_path):
    said = BadInput("latents/3.npy holds values that are not finite; extract it again")
    failures = []
    for error in (said, ValueError(str(said))):
        Reporter(tmp_path, 1).failed(error)
        failures.append(json.loads((tmp_path / "ranks" / "rank1.failure.json").read_text()))
    ended = classify(Facts(failures=(failures[0],)))
    assert ended.reason.endswith("holds values that are not finite")
    assert ended.hint == "extract it again"
    other = classify(Facts(failures=(failures[1],)))
    assert "log.txt" in other.hint and "extract it again" in other.reason
