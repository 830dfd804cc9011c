"""The package: a wheel in a clean environment without the extras answers from any folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from harness import ROOT, __version__, cli
from harness.commands import options
from harness.planner import records
from harness.planner.verdict import VERDICTS
from harness.result import load_all
from strategies import launch_file

INSTALL = "pip install 'headroom-dit[run]'"
FLUX = "--model flux-dev --gpu RTX-4090"
QLORA = "single+bf16_pure+qlora:rank=16+checkpoint"
RESULTS = ROOT / "docs/results/cpu-2-cores-default"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 23.53 GiB of which 1.20 GiB is free. 20.00 GiB is allocated by PyTorch.\n"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="builds the package (extra test)")
    out = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", *words, str(ROOT)], check=True)
    return next(out.glob("headroom_dit-*.whl"))


def needed(wheel: Path) -> set[str]:
    """Distributions that the package needs without its extras, and those that they need."""
    with zipfile.ZipFile(wheel) as file:
        text = file.read(f"headroom_dit-{__version__}.dist-info/METADATA").decode()
    found, waiting = set[str](), re.findall(r"^Requires-Dist: (.*)$", text, re.M)
    while waiting:
        one = Requirement(waiting.pop())
        if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(one.name)
            waiting += metadata.requires(one.name) or []
    return found


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and what it needs, copied from this one, and no more."""
    folder = tmp_path_factory.mktemp("a clean environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in needed(wheel):
        for file in metadata.files(name) or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), packages / file)
    return folder


def started(clean: Path, folder: Path, words: list[Any], **more: Any) -> Any:
    """An ended process of the environment: nothing of this one is in its variables."""
    env = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "100"}
    words = [clean / "bin" / words[0], *words[1:]]
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, **more)


LIGHT = {
    f"plan {FLUX} --json -": "searches", f"plan {FLUX} --check --recipes {QLORA} --json -": "rows",
    "plan --gpus 8 --gpu A100-80GB --json plan.json": "", f"plan {FLUX} --gpus 1 2": "",
    "export zero2+bf16+checkpoint --gpus 8 --gpu RTX-4090 --json -": "trainers",
    "oom oom.txt --json -": "memory",
    f"oom oom.txt {FLUX} --recipe single+bf16_pure+lora:rank=16 --json -": "changes",
    "list --json -": "absent", "list zero2": "", "list models --json -": "rows",
    "list cards --json -": "rows", "list suites --json -": "rows",
    "report measured --json -": "report", "compare measured measured --json -": "changes",
    "lint --json -": "rows", "--help": "", **{f"{command} --help": "" for command in cli.COMMANDS},
}  # fmt: skip
"""Command -> a field of its answer, if it is asked for."""
LACKING = {
    "run --suite smoke": f"run needs torch, accelerate, numpy, PIL; {INSTALL}",
    "doctor": f"doctor needs torch, accelerate, numpy, PIL; {INSTALL}",
    f"plan {FLUX} --fresh": INSTALL,
    "plan --cpu": f"it is not recorded, and tracing it needs torch and accelerate; {INSTALL}",
    "plan --model DiT-S/4 --gpu RTX-4090": "The nearest recorded one: headroom plan --recipes",
    "plan --model DiT-S/4 --gpu RTX-4090 --advise --recipes single": "The nearest recorded one",
    f"plan {FLUX} --resolution 768": "--model flux-dev --gpus 1 --gpu RTX-4090",
    "plan --model mine.py:make --gpu RTX-4090": "No module named 'torch'",
}  # fmt: skip
"""Command that needs an extra, or what nothing has -> a part of its one line."""


@pytest.fixture(scope="module")
def told(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(RESULTS, folder / "measured")
    (folder / "oom.txt").write_text(OOM)
    (folder / "mine.py").write_text("import torch\n")
    child = ["python", "-I", ROOT / "tests/children/light.py"]
    done = started(clean, folder, child, input="\n".join([*LIGHT, *LACKING]))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["heavy"] == []
    assert sorted(path.name for path in (folder / "results").iterdir()) == ["export"]
    return {**json.loads(done.stdout), "folder": folder}


@pytest.mark.parametrize("line", LIGHT)
def test_it_answers_without_extras_and_without_what_other_systems_lack(line, told) -> None:
    code, out, err = told["ends"][line]
    assert code == 0 and "Traceback" not in err, err
    assert "./run.sh" not in (err if "--json -" in line else out + err)
    if LIGHT[line]:
        answer = json.loads(out)
        assert (answer["schema"], answer["command"]) == (options.SCHEMA, line.split()[0])
        assert LIGHT[line] in answer


@pytest.mark.parametrize("line", LACKING)
def test_what_needs_more_says_so_in_one_line(line, told) -> None:
    code, out, err = told["ends"][line]
    assert (code, out, err.count("\n")) == (2, "", 1) and LACKING[line] in err


def test_the_nearest_recorded_question_is_answered(told, clean) -> None:
    for line in (f"plan {FLUX} --resolution 768", "plan --model DiT-S/4 --gpu RTX-4090"):
        command = told["ends"][line][2].rpartition("recorded one: ")[2].split()
        done = started(clean, told["folder"], [*command, "--check"])
        assert done.returncode in (0, 1) and "needs" in done.stdout, done.stderr


def test_a_file_s_answer_is_that_of_the_clone(told, capsys) -> None:
    """The light installation and the clone answer a recorded question alike."""
    line = f"plan {FLUX} --json -"
    assert cli.main(line.split()) == 0
    ours, theirs = json.loads(capsys.readouterr().out), json.loads(told["ends"][line][1])
    assert ours["fastest"] == theirs["fastest"] is not None
    assert [row["need_bytes"] for row in ours["rows"]] == [r["need_bytes"] for r in theirs["rows"]]
    assert json.loads((told["folder"] / "plan.json").read_text())["schema"] == options.SCHEMA


def test_the_wheel_has_all_data_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        packed = set(file.namelist())
    kept = {path for name in ("harness", "strategies") for path in (ROOT / name).rglob("*.*")}
    names = {str(path.relative_to(ROOT)) for path in kept if "__pycache__" not in path.parts}
    ours = {f"strategies/launch_configs/{path.name}" for path in launch_file.FOLDER.iterdir()}
    assert names | ours == {name for name in packed if ".dist-info/" not in name}


def test_the_command_answers_in_a_folder_without_write_access(clean: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    assert started(clean, locked, ["headroom", "--version"]).stdout == f"headroom {__version__}\n"
    done = started(clean, locked, ["headroom-dit", "plan", *FLUX.split()])
    assert done.returncode == 0 and "headroom export " in done.stdout and done.stderr == ""
    if os.geteuid():
        done = started(clean, locked, ["headroom", "export", "ddp", "--gpus", "2", "--gpu", "L40S"])
        assert done.returncode == 2 and "give another --out DIR" in done.stderr


def test_no_prediction_is_read_from_the_working_folder(clean: Path, tmp_path: Path) -> None:
    for name in records.lines("flux-dev"):
        found = dataclasses.replace(records.find("flux-dev", name), recorded="")
        found.write(tmp_path / "results" / "predictions" / f"{name}.json")
    done = started(clean, tmp_path, ["headroom", "plan", *FLUX.split(), "--recipes", QLORA])
    assert done.returncode == 0 and "1 prediction recorded on" in done.stdout


@pytest.mark.thorough
def test_it_trains_in_any_folder_where_the_extra_is_installed(clean: Path, tmp_path: Path) -> None:
    """The packages of this environment stand for those that ``[run]`` would install again."""
    words = ["run", "--recipes", "single", "zero2+bf16", "--steps", "2", "--warmup", "1"]
    words += ["--model", "DiT-T/8:depth=1", "--data", "synthetic", "--global-batch", "4"]
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    env = {**os.environ, "PYTHONPATH": packages, "CUDA_VISIBLE_DEVICES": ""}
    command = [clean / "bin/headroom", *words, "--processes", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row.status.value for row in load_all(tmp_path / "results/recipes")[0]} == {"ok"}


# ---- the page for agents ----

PAGE = (ROOT / "SKILL.md").read_text(encoding="utf-8")


def test_the_page_for_agents_names_commands_and_fields_that_exist(told) -> None:
    lines = [line.split() for line in re.findall(r"`headroom (\w+ [^`]+)`", PAGE)]
    assert len(lines) >= 10
    for words in lines:
        assert cli._parser(words[0]).parse_args(words).command == words[0]
    answers = [json.loads(out) for line, (_, out, _) in told["ends"].items() if "--json -" in line]
    plan = json.loads(told["ends"][f"plan {FLUX} --json -"][1])
    known = {key for answer in [*answers, plan["rows"][0], plan["searches"][0]] for key in answer}
    lint = json.loads(told["ends"]["lint --json -"][1])
    fields = re.findall(r"`([a-z_]+)`", PAGE.partition("## Answers")[2].partition("Memory and")[0])
    words = {*cli.COMMANDS, *VERDICTS, *lint["rows"][0], *plan["rows"][0]}
    assert fields and set(fields) - known - words == set()


# ---- the library ----

EXAMPLE = ROOT / "docs/examples/library.py"


@pytest.mark.thorough
def test_the_example_of_the_library_runs(tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLE), str(tmp_path / "own")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert re.fullmatch(r"single\+\S+: fits, [\d.]+ GiB", first) and last.startswith("single ok")


def test_the_door_plans_and_loads_without_torch(clean: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from harness.api import BadInput, load_results, plan
rows = plan("DiT-XL/2", "24GiB", recipes=["ddp+bf16", "zero3+bf16"], gpus=8)
print([(row.recipe, row.need_low_bytes < row.need_bytes < row.need_high_bytes) for row in rows])
print([row.answer for row in rows], len(load_results({str(RESULTS)!r})) > 8)
try:
    plan("DiT-S/4", "L40S")
except BadInput as error:
    print(error, "torch" in sys.modules)
"""
    done = started(clean, tmp_path, ["python", "-c", code])
    assert done.returncode == 0, done.stderr
    rows, answers, unrecorded = done.stdout.splitlines()
    assert rows == "[('zero3+bf16', True), ('ddp+bf16', True)]"
    assert answers == "[True, False] True"
    assert INSTALL in unrecorded and unrecorded.endswith(" False")
