"""The files that decide a row of a user's code are recorded, and compared before it is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from conftest import begin

from harness import ROOT, opened
from harness.launch import launch
from harness.result import Status
from harness.script.row import Script, row_of
from harness.suite import run as suite_run
from tests.made.machines import machine
from tests.made.script_rows import rows_in_forks

CODE = """
import json, os, sys
from harness import opened
from pathlib import Path
opened.record(Path(sys.argv[1]), 0, [Path.cwd()], ["--config", "../there/named.yaml", "--n=3"])
sys.path.insert(0, str(Path.cwd()))
import helper
open("read.txt").close()
if not os.fork():
    open("by_child.txt").close()
    os._exit(0)
os.wait()
open("made.txt", "w").close()
open("made.txt").close()
open(sys.argv[2]).close()
"""


def test_what_a_process_and_its_forks_read_is_recorded_and_what_it_writes_is_not(tmp_path):
    folder, there = tmp_path / "here", tmp_path / "there"
    for path in (folder, there):
        path.mkdir()
    for name in ("read.txt", "by_child.txt", "helper.py", "unread.txt"):
        (folder / name).write_text("")
    for name in ("named.yaml", "elsewhere.txt"):
        (there / name).write_text("")
    time.sleep(0.05)
    began = time.time()
    words = [sys.executable, "-c", CODE, str(tmp_path / "out"), str(there / "elsewhere.txt")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(words, cwd=folder, env=env, check=True)
    found = opened.inputs(tmp_path / "out", began)
    names = {"read.txt", "by_child.txt", "helper.py", "named.yaml"}
    assert {Path(name).name for name in found} == names
    assert opened.unchanged(found)
    (folder / "read.txt").write_text("other")
    assert not opened.unchanged(found)
    assert opened.inputs(tmp_path / "out", began) is None, "changed since the start: unknown"


SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from models.net import width
from torch.utils.data import DataLoader, TensorDataset

scale = float(open(sys.argv[sys.argv.index("--config") + 1]).read())
accelerator = Accelerator()
model = torch.nn.Linear(width, width)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(scale * torch.ones(32, width)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    accelerator.backward(model(x).pow(2).mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_row_of_a_script_is_kept_until_a_file_that_it_read_changes(tmp_path):
    folder = tmp_path / "mine"
    (folder / "models").mkdir(parents=True)
    texts = {"train.py": SCRIPT, "models/net.py": "width = 8\n", "cfg.yaml": "1.0\n"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    time.sleep(0.05)
    script = Script.of(["train.py", "--config", "cfg.yaml"], folder)
    fields = {"processes": 1, "device": "cpu", "warmup": 1, "steps": 1, "seed": 0}
    here = machine(tmp_path)
    (row,) = suite_run.plan([row_of(script, "single", **fields)], tmp_path / "out", here)
    with rows_in_forks(begin):
        result = launch.run(row.resolved, row.folder, timeout=300)
    assert result.status is Status.OK, result.reason
    result.identity = suite_run.identity(row.resolved, here)
    result.write(row.folder / "result.json")
    assert not suite_run.must_run(row, here, fresh=False)
    for name in ("models/net.py", "cfg.yaml"):
        (folder / name).write_text(texts[name].replace("8", "16").replace("1.0", "2.0"))
        assert suite_run.must_run(row, here, fresh=False), name
        (folder / name).write_text(texts[name])
        assert not suite_run.must_run(row, here, fresh=False), name


MODEL = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import torch
from own_helper_of_test import width


def make():
    from own_late_helper_of_test import depth
    blocks = [torch.nn.Linear(width, width) for _ in range(depth)]
    model = torch.nn.Sequential(*blocks)
    return model, {"x": torch.ones(4, width)}, lambda m, batch: m(batch["x"]).pow(2).mean()
"""
IDENTITY = """
import os
import torch._dynamo  # as a survey does
from harness.resolve import resolve
from harness.spec import Spec
from harness.subjects import own_module
for name in ("mine.py", "own_helper_of_test.py", "own_late_helper_of_test.py"):
    open(name, "a").write("# other\\n")
    if not os.fork():
        resolve(Spec(recipe="single", model="mine.py:make", objective="own", data="synthetic"))
        print(own_module.identity("mine.py:make"), flush=True)
        os._exit(0)
    os.wait()
"""


def test_predictions_of_an_own_model_are_keyed_by_its_helper_modules_too(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    (tmp_path / "own_helper_of_test.py").write_text("width = 8\n")
    (tmp_path / "own_late_helper_of_test.py").write_text("depth = 2\n")
    done = subprocess.run(
        [sys.executable, "-c", IDENTITY], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len({*done.stdout.split()}) == 3, done.stderr
