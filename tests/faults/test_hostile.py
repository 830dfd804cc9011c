"""Files and words from somebody else's hand: each is one line and exit 2, or the right answer."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness import ROOT, cli
from harness.json_files import whole as whole_file
from harness.json_files import write_json
from harness.subjects.library import families
from strategies import files, parse
from strategies.base import BadInput
from tests.made.calibrations import made

RESULTS = ROOT / "docs" / "results" / "cpu-2-cores-default"
ROWS = ("ddp-", "zero2-")
SOME = settings(
    max_examples=int(os.environ.get("HEADROOM_EXAMPLES", 6)), deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
"""A few in each run of the tests, alike each time; HEADROOM_EXAMPLES=5000 by hand."""
ESCAPE = "\x1b]0;owned\x07\x1b[2J=cmd|'/c calc'!A1"
HOSTILE = (
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
def broken(draw: Any, text: str) -> str:
    """JSON with one value replaced, left out or added, or with a byte changed."""
    data = json.loads(text)
    at = draw(st.sampled_from([way for way in places(data) if way]))
    holder = copy.deepcopy(data)
    inner = holder
    for key in at[:-1]:
        inner = inner[key]
    kind = draw(st.sampled_from(("value", "value", "value", "literal", "gone", "more", "cut")))
    if kind == "value":
        inner[at[-1]] = draw(st.sampled_from(HOSTILE))
    elif kind == "literal":
        inner[at[-1]] = "PUT HERE"
    elif kind == "gone":
        del inner[at[-1]]
    elif kind == "more":
        (inner if isinstance(inner, dict) else holder)["surprise"] = 1
    text = json.dumps(holder).replace('"PUT HERE"', draw(st.sampled_from(LITERALS)))
    return text[: draw(st.integers(0, len(text)))] if kind == "cut" else text


def told(words: list[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), errors.getvalue()


def held(words: list[str], codes: tuple[int, ...] = (0, 2)) -> tuple[int, str]:
    """The same, held to what is promised of any input; exit code and what was printed."""
    code, out, errors = told(words)
    assert code in codes, errors
    assert code != 2 or len(errors.splitlines()) == 1, errors
    assert "\x1b" not in out + errors and "\x07" not in out + errors
    return code, out + errors


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder of two rows with their predictions, a suite and a calibration."""
    folder = tmp_path_factory.mktemp("hostile") / "inner" / "results"
    for run in sorted((RESULTS / "runs").iterdir()):
        if run.name.startswith(ROWS) and "+" not in run.name:
            shutil.copytree(run, folder / "runs" / run.name)
    shutil.copy(RESULTS / "suite.json", folder)
    made().write(folder / "calibration.json")
    assert told(["report", str(folder)])[0] == 0
    return folder


@pytest.mark.parametrize(
    "name", ["result.json", "prediction.json", "suite.json", "calibration.json"]
)
def test_a_broken_file_stops_no_report_and_writes_nowhere_else(name, whole):
    path = next(iter(sorted(whole.rglob(name))))
    good = path.read_text(encoding="utf-8")

    @SOME
    @given(broken(good))
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
        with whole_file(inside / "report.md") as stream:
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
