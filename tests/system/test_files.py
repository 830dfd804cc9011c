"""Outputs: no file of somebody else is deleted or overwritten, and no link is followed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import launchable

from harness import ROOT, cli, files
from harness.launch import launch
from harness.suite.run import check_out
from tests.made.results import ok

PLANNED = ["--model", "DiT-T/8", "--gpu", "RTX-4090"]
ONE = ["--device", "cpu", "--model", "DiT-T/8", "--steps", "3"]
WRITERS: dict[str, tuple[list[str], str]] = {
    "run": (["run", "--recipes", "single", *ONE, "--out", "."], "suite.json"),
    "train": (["train", "--recipe", "single", *ONE, "--out", "."], "log.txt"),
    "checkpoints": (
        ["train", "--recipe", "single", *ONE, "--out", "new", "--checkpoint", "."],
        "step-00000010",
    ),
    "weights": (
        ["train", "--recipe", "single", *ONE, "--out", "new", "--averaged", "own.safetensors"],
        "own.safetensors",
    ),
    "anatomy": (["anatomy", "single", *ONE[:-2], "--out", "."], "result.json"),
    "max-batch": (["max-batch", "--recipe", "single", *ONE[:-2], "--out", "."], "max_batch.json"),
    "script": (
        ["script", "--launch", "single", "--device", "cpu", "--out", ".", "--", "train.py"],
        "report.md",
    ),
    "export": (
        ["export", "single", *PLANNED, "--gpus", "1", "--global-batch", "1", "--out", "."],
        "accelerate.yaml",
    ),
    "plan": (["plan", *PLANNED, "--recipes", "single", "--json", "own.json"], "own.json"),
    "calibrate": (["calibrate", "--device", "cpu", "--small", "--out", "."], "calibration.json"),
    "atlas": (["atlas", "--models", "sd3.5-medium", "--out", "."], "atlas.html"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('trains')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != files.MARK
    }


@pytest.mark.parametrize(
    ("writer", "kind"),
    [*((writer, "file") for writer in WRITERS), ("run", "folder"), ("train", "link")],
)
def test_a_command_refuses_what_somebody_else_left(folder, capsys, writer, kind):
    words, name = WRITERS[writer]
    outside = folder.parent / f"{folder.name}-outside"
    outside.mkdir()
    (outside / "precious").write_text("nobody's business")
    if kind == "file":
        (folder / name).write_text("mine")
    elif kind == "folder":
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    else:
        (folder / name).symlink_to(outside / "precious")
    before = texts(folder)
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and ("--force" in line or "link" in line or "folder" in line), line
    assert {key: text for key, text in texts(folder).items() if key in before} == before
    assert (outside / "precious").read_text() == "nobody's business"


def test_a_link_in_a_run_folder_is_removed_and_not_followed(tmp_path):
    out, outside = tmp_path / "out", tmp_path / "outside"
    launch.prepare(out)
    outside.mkdir()
    (outside / "log.txt").write_text("kept")
    (out / "log.txt").symlink_to(outside / "log.txt")
    launch.prepare(out)
    assert not (out / "log.txt").is_symlink()
    (out / "profile").symlink_to(outside)
    with pytest.raises(files.Taken, match="profile is a symbolic link"):
        launch.prepare(out)
    assert (outside / "log.txt").read_text() == "kept"


@pytest.mark.parametrize("link", ["runs", "runs/single"])
def test_rows_stay_below_the_results_folder(tmp_path, link):
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    check_out(out)
    (out / link).parent.mkdir(exist_ok=True)
    (out / link).symlink_to(outside)
    with pytest.raises(files.Taken, match="is a symbolic link"):
        launch.prepare(out / "runs" / "single")
    assert not list(outside.iterdir())


@pytest.mark.parametrize("run", ["runs/ddp", "."])
def test_folders_of_older_versions_are_accepted(tmp_path, run):
    ok("ddp").write(tmp_path / run / "result.json")
    (tmp_path / run / "log.txt").write_text("of an older version")
    (tmp_path / run / "samples.png").write_bytes(b"")
    files.claim(tmp_path, files.RESULTS if run != "." else (*launch.FILES, "checkpoint"))
    files.claim(tmp_path / run, launch.FILES)


def test_a_report_is_written_again_unless_somebody_else_wrote_one(tmp_path, capsys):
    ok("ddp").write(tmp_path / "runs/ddp/result.json")
    assert cli.main(["report", str(tmp_path)]) == 0
    assert cli.main(["report", str(tmp_path)]) == 0
    (tmp_path / files.MARK).unlink()  # as an older version left it
    (tmp_path / "report.json").unlink()  # as published sets leave it out
    assert cli.main(["report", str(tmp_path)]) == 0
    other = tmp_path / "other"
    ok("ddp").write(other / "runs/ddp/result.json")
    (other / "report.md").write_text("mine")
    assert cli.main(["report", str(other)]) == 2
    assert "report.md exists, and Headroom did not write it" in capsys.readouterr().err
    assert (other / "report.md").read_text() == "mine"
    assert cli.main(["report", str(other), "--force"]) == 0
    assert (other / "report.md").read_text() != "mine"


def test_a_file_that_its_user_edited_is_not_written_again(tmp_path):
    files.write_texts(tmp_path, {"a.yaml": "a: 1\n", "b.json": "{}"})
    files.write_texts(tmp_path, {"a.yaml": "a: 2\n", "b.json": "{}"})
    (tmp_path / "a.yaml").write_text("a: 3\n")
    with pytest.raises(files.Taken, match=r"a\.yaml exists"):
        files.write_texts(tmp_path, {"b.json": "[]", "a.yaml": "a: 4\n"})
    assert (tmp_path / "b.json").read_text() == "{}", "nothing is written if one is refused"
    files.write_texts(tmp_path, {"a.yaml": "a: 4\n"}, force=True)
    assert (tmp_path / "a.yaml").read_text() == "a: 4\n"


# ---- every command in a folder of somebody else: no file there runs ----


MARK = "from pathlib import Path\nPath({marks!r}, __name__.replace('.', '_')).touch()\n"
OTHERS = (
    *("accelerate", "argcomplete", "deepspeed", "diffusers", "harness", "numpy", "packaging"),
    *("pip", "psutil", "rich"),
    *("sitecustomize", "sklearn", "strategies", "tests", "torch", "transformers"),
    *("usercustomize", "xdist", "yaml"),
)
SMALL = ["--model", "DiT-T/8", "--steps", "1", "--warmup", "1", "--global-batch", "2"]
RUN = ["--recipes", "single", "--noise-floor", "1", "--device", "cpu", *SMALL]
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
    "run": [*RUN, "--out", "ran"],
    "script": ["--check", "--device", "cpu", "--out", "scripted", "--", "scripts/train.py"],
    "test": ["--version"],
    "train": ["--recipe", "single", "--dry-run"],
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """A folder with results, settings, a log, a script, and a module of every name."""
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
def test_no_module_of_the_current_folder_is_imported(foreign, command):
    # Setting PYTHONPATH as "$PYTHONPATH:/x" leaves an empty entry, which is the current folder.
    ended = start([command, *COMMANDS.get(command, [])], foreign, PYTHONPATH=":/nowhere")
    assert sorted(path.name for path in (foreign / "marks").iterdir()) == []
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.thorough
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
