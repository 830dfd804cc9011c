"""Every command in a folder of somebody else: no file there runs, scripts start from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import launchable

from harness import ROOT
from tests.made.results import ok

MARK = "from pathlib import Path\nPath({marks!r}, __name__.replace('.', '_')).touch()\n"
OTHERS = (
    *("accelerate", "argcomplete", "deepspeed", "diffusers", "harness", "numpy", "packaging"),
    *("pip", "psutil", "rich"),
    *("sitecustomize", "sklearn", "strategies", "tests", "torch", "transformers"),
    *("usercustomize", "xdist", "yaml"),
)
SMALL = ["--model", "DiT-T/8", "--steps", "1", "--warmup", "1", "--global-batch", "2"]
ONE = ["--recipes", "single", "--noise-floor", "1", "--device", "cpu", *SMALL]
PLANNED = ["--model", "DiT-T/8", "--gpu", "RTX-4090"]
COMMANDS = {
    "anatomy": ["single", "--dry-run", "--device", "cpu"],
    "atlas": ["--help"],
    "calibrate": ["--help"],
    "compare": [".", "."],
    "doctor": [],
    "export": ["single", *PLANNED, "--global-batch", "1", "--out", "exported"],
    "lint": ["settings.json"],
    "list": [],
    "max-batch": ["--recipe", "single", "--dry-run"],
    "oom": ["log.txt"],
    "plan": [*PLANNED, "--recipes", "single"],
    "report": ["."],
    "run": [*ONE, "--out", "ran"],
    "script": ["--check", "--device", "cpu", "--out", "scripted", "--", "scripts/train.py"],
    "test": ["--version"],
    "train": ["--recipe", "single", "--dry-run"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with results, settings, a log, a script, and a module of every name."""
    made = tmp_path_factory.mktemp("foreign")
    ok("ddp").write(made / "runs" / "ddp" / "result.json")
    (made / "settings.json").write_text('{"zero_optimization": {"stage": 2}}')
    (made / "log.txt").write_text("torch.OutOfMemoryError: CUDA out of memory.\n")
    (made / "scripts").mkdir()
    (made / "scripts" / "train.py").write_text("print('trains nothing')\n")
    for name in {*sys.stdlib_module_names, *OTHERS}:
        (made / f"{name}.py").write_text(MARK.format(marks=str(made / "marks")))
    (made / "marks").mkdir()
    return made


def start(words: list[str], cwd: Path, **added: str) -> subprocess.CompletedProcess[str]:
    """Start ``run.sh`` in ``cwd``, as a user whose shell has no PYTHONPATH of ours."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    env |= {"HEADROOM_PYTHON": sys.executable, **added}
    return subprocess.run(
        [str(ROOT / "run.sh"), *words], cwd=cwd, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "command",
    launchable(["--help", *COMMANDS], ("list", "oom", "report")),
)
def test_no_module_of_the_current_folder_is_imported(folder, command):
    # Setting PYTHONPATH as "$PYTHONPATH:/x" leaves an empty entry, which is the current folder.
    ended = start([command, *COMMANDS.get(command, [])], folder, PYTHONPATH=":/nowhere")
    assert sorted(path.name for path in (folder / "marks").iterdir()) == []
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_script_without_arguments_starts_from_any_folder(tmp_path):
    """It imports what lies beside it, as Python does, and so do the processes that it starts."""
    place = tmp_path / "trainer"
    place.mkdir()
    (place / "helper.py").write_text("FOUND = 'imported beside'\n")
    (place / "child.py").write_text("import helper\nprint('child', helper.FOUND)\n")
    (place / "train.py").write_text(
        "import subprocess, sys, helper\nprint(helper.FOUND, flush=True)\n"
        "subprocess.run([sys.executable, sys.path[0] + '/child.py'], check=True)\n"
    )
    words = ["--launch", "single", "--processes", "1", "--device", "cpu", "--out", "out"]
    ended = start(["script", *words, "--", "trainer/train.py"], tmp_path)
    (log,) = (path.read_text() for path in tmp_path.glob("out/runs/*/log.txt"))
    assert "Traceback" not in ended.stderr + log, ended.stderr + log
    assert "imported beside" in log and "child imported beside" in log


def test_a_clone_whose_path_has_a_colon_says_so(tmp_path):
    clone = tmp_path / "a:b"
    clone.mkdir()
    (clone / "run.sh").write_bytes((ROOT / "run.sh").read_bytes())
    env = {**os.environ, "HEADROOM_PYTHON": sys.executable}
    for words in (["--help"], ["list"]):
        ended = subprocess.run(
            ["bash", str(clone / "run.sh"), *words], env=env, capture_output=True, text=True
        )
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == 2 and "has a colon" in line and "move the clone" in line
