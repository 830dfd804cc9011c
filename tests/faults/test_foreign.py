"""Each reader of foreign files, on hostile ones: it reads, or refuses in one line, within bounds of
time and memory."""

from __future__ import annotations

import io
import json
import lzma
import os
import pickle
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import ROOT, cli
from harness.data.latents import Folder
from harness.json_files import BadFile, read_json
from harness.planner import records
from harness.planner.export import files as trainers_files
from harness.planner.oom import command as oom
from harness.prediction import kept
from harness.result import BadResult, load
from harness.subjects.library import families
from harness.suite.file import load_suite
from harness.suite.matrix import specs
from strategies import launch_file
from strategies.base import BadInput
from strategies.distillation.files import header
from strategies.files import bounded_memory

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
        ("steps: 2", "steps: 1000000000", "steps"),
        ("steps: 2", "processes: 100000000", "processes"),
    ],
)
def test_an_absurd_number_in_a_suite_is_refused_with_its_key(tmp_path, old, new, key):
    path = tmp_path / "a.yaml"
    path.write_text(SUITE.replace(old, new))
    with pytest.raises(BadInput, match=f"{key} is "):
        read_suite(path)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--model DiT-XL/2 --gpus 100000000", "processes"),
        ("--model DiT-S/4:depth=100000000", "depth"),
        ("--model flux-dev --set num_layers=100000000", "num_layers"),
    ],
)
def test_an_absurd_number_on_the_command_line_is_refused_with_its_key(words, key, capsys):
    assert cli.main(["plan", "--gpu", "H100-80GB", *words.split()]) == 2
    assert f"{key} is " in capsys.readouterr().err


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
