"""The command line: bad input is one line and exit code 2, before any process starts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import cli
from harness.commands import console, doctor, run
from harness.launch import launch
from harness.planner import pool
from harness.prediction import Prediction
from harness.result import Result, Status
from harness.system import gpus
from harness.system import machine as machines
from strategies import CATALOG
from tests.made.machines import machine
from tests.made.results import ok


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Any process, and any probe, is recorded; runs are faked where a test asks for them."""
    begun: list[str] = []

    def probe(folder: Path, ops: object = (), **more: object) -> machines.Machine:
        begun.append("probe")
        return machine(folder)

    monkeypatch.setattr(console, "recall", machines.look)
    monkeypatch.setattr(console, "examine", probe)
    monkeypatch.setattr(gpus, "visible", lambda: ())
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: begun.append("process"))
    return begun


ON = "--recipes ddp"
PLAN = "plan --gpu-memory 24GiB --recipes ddp"
SAVED = "train --recipe ddp --checkpoint {p}/saved"
BAD = {
    "--recipes zeor3": "did you mean 'zero3'",
    f"{ON} --nodes 2 --node-rank 1": "give --rdzv-endpoint HOST:PORT",
    f"{ON} --nodes 2 --rdzv-endpoint 127.0.0.1": "give --rdzv-endpoint HOST:PORT",
    f"{ON} --nodes 2 --rdzv-endpoint 127.0.0.1:99999": "give --rdzv-endpoint HOST:PORT",
    f"{ON} --nodes 2 --rdzv-endpoint no.such.host.invalid:29500": "give node 0's address",
    f"{ON} --nodes 2 --rdzv-endpoint 127.0.0.1:29500 --node-rank 2": "give --node-rank 0 to 1",
    f"{ON} --processes 3 --nodes 2 --dry-run": "give --processes 2 or 4",
    "run --nodes 2 --on slurm --dry-run": "take the srun line",
    f"{ON} --global-batch 7": "use 6 or 8",
    f"{ON} --seed {2**64}": f"give --seed at most {2**63 - 1}",
    f"{ON} --out ''": "--out: the folder's name is empty",
    "train --recipe ddp --out ' '": "--out: the folder's name is empty",
    "train --recipe single+checkpoint:every=999 --model DiT-T/4 --out {p}/r":
        "every=999, and the model has 4 blocks; give at most 4",
    f"{PLAN} --model DiT-T/8:tokens=1": "tokens is",
    f"{ON} --data synthetic --model DiT-T/8:tokens=512 --objective flow": "give --objective masked",
    f"{ON} ddp": "'ddp' is given twice",
    f"{ON} --data digts": "did you mean digits",
    f"run {ON} --data latents:{{p}}/lat": "0.npy",
    f"{ON} --device cuda": "use --device cpu",
    f"run {ON} --out {{p}}/taken/results": "choose another --out",
    "--recipe ddp --stps 3": "see ./run.sh",
    "rnu": "invalid choice: 'rnu'",
    "report {p}/none": "no such folder",
    "report {p}/empty": "no results in it",
    f"{SAVED} --steps 9": "already holds a training (step-00000007); give --resume",
    f"{SAVED} --steps 5 --resume": "has already taken 7 steps; give a larger --steps",
    "train --recipe single --processes 2":
        "error: single: trains one process, not 2; use --processes 1",
    "train --recipe single --out {p}/r --samples {p}":
        "it is a folder; give another --samples FILE",
    "max-batch --recipe single --first 0 --out {p}/r": "give --first from 1",
    "max-batch --recipe single+bf16_master --out {p}/r": "only DeepSpeed",
    f"{PLAN} --precision bfloat16": "a recipe has the precision, as in single+bf16",
    f"{PLAN} --json {{p}}": "it is a folder; give another --json FILE",
    f"{PLAN} --calibration {{p}}/c.json": "not a calibration file",
    "plan --gpu H100-80GB --model DiT-S/4:depth=100000000": "depth is ",
    "plan --gpu H100-80GB --model flux-dev --set num_layers=100000000": "num_layers is ",
    "atlas --models flux-def --out {p}/results": "not a public model; did you mean",
    "atlas --models flux-dev --cards H100 --out {p}/results": "is several cards",
    "atlas --models flux-dev --gpus 0 --out {p}/results": "give --gpus at least 1",
    "script --out {p}/r -- accelerate launch train.py": "train.py",
    "script --out {p}/r --": "train.py",
    "lint {p}/none.json": "No such file or directory; name a DeepSpeed JSON file",
    "calibrate --device cuda --out {p}/results":
        "device is cuda, but torch sees no GPU here; use --device cpu",
}  # fmt: skip
"""Words -> a part of their one line."""


def files_of_bad_words(p: Path) -> None:
    """A checkpoint, an empty folder, corrupt latents, and files in the place of others."""
    for name in ("saved/step-00000007", "empty", "lat/imagenet256_features"):
        (p / name).mkdir(parents=True)
    (p / "lat/imagenet256_labels").mkdir()
    np.save(p / "lat/imagenet256_labels/0.npy", np.zeros(1))
    for name, text in {"saved/step-00000007/headroom.json": "{}", "taken": "", "c.json": "{}",
                       "lat/imagenet256_features/0.npy": "not numpy"}.items():  # fmt: skip
        (p / name).write_text(text)


def call(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line: str, tmp_path: Path, capsys, monkeypatch, nothing_starts) -> None:
    # A torch for GPUs that sees none is asked why (``test_requirements``); one for CPUs is not.
    versions = machines.look(tmp_path).versions | {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(machines.Machine, "versions", versions)
    files_of_bad_words(tmp_path)
    words = shlex.split(line.format(p=tmp_path))
    if words[0].startswith(("run", "--")) and "--out" not in words:
        words += ["--out", str(tmp_path / "results")]
    assert call(words) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said.startswith("error: ") and BAD[line] in said
    assert nothing_starts == [] and not (tmp_path / "results").exists()


SEEN = ["run --recipes single --noise-floor 1", "train --recipe single", "anatomy single",
        "max-batch --recipe single"]  # fmt: skip


@pytest.mark.parametrize("line", SEEN)
@pytest.mark.parametrize("there", [True, False])
def test_torch_is_asked_before_a_gpu_is_denied(
    line, there, tmp_path, capsys, monkeypatch, nothing_starts
) -> None:
    """Under WSL2, in a container, or where nvidia-smi is slow, nothing else sees the GPU."""
    card = gpus.Gpu(index=0, name="H200", total_bytes=2**37)

    def probe(folder: Path, ops: object = (), **more: object) -> machines.Machine:
        nothing_starts.append("probe")
        found = machine(folder, gpus=(card,) if there else ())
        found.probe["no_cuda"] = "" if there else "the driver is asleep"
        return found

    def started(*given: object, **more: object) -> None:
        raise KeyboardInterrupt  # the row was on its way

    monkeypatch.setattr(console, "examine", probe)
    monkeypatch.setattr(machines, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(run.launch.process, "run_child", started)
    words = f"{line} --device cuda --data synthetic --out {tmp_path / 'o'}".split()
    code = None
    with contextlib.suppress(KeyboardInterrupt):
        code = call(words)
    said = capsys.readouterr().err
    assert "probe" in nothing_starts
    assert (code in (None, 130)) if there else code == 2
    assert there or any(word in said for word in ("no GPU", "0 GPUs", "there is none"))
    assert there or not line.startswith("run") or "the driver is asleep" in said


def test_a_torch_for_cpus_is_not_asked(tmp_path, capsys, monkeypatch, nothing_starts) -> None:
    monkeypatch.setattr(machines, "version", lambda name: "2.13.0+cpu")
    words = [*SEEN[0].split(), "--device", "cuda", "--out", str(tmp_path)]
    assert call(words) == 2 and nothing_starts == []
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_dry_run_prints_commands_and_starts_nothing(tmp_path, capsys, nothing_starts) -> None:
    out = str(tmp_path / "r")
    assert call(["--dry-run", "--out", out, "--recipes", "ddp", "ddp+tf32"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if "accelerate" in x]
    assert "--config_file launch_configs/ddp.cpu.yaml" in lines[0]
    assert [x.startswith("# ") for x in lines] == [False, False, True, False], "ddp again, twice"
    assert nothing_starts == [] and not (tmp_path / "r").exists()


ENDS = {
    Status.OK: 0, Status.VOID: 1, Status.FAILED: 1, Status.TIMEOUT: 1, Status.GPU_OOM: 1,
    Status.HOST_OOM: 1, Status.UNSUPPORTED: 0, Status.REFUSED: 0,
}  # fmt: skip


@pytest.mark.parametrize("status", ENDS)
def test_exit_codes(status: Status) -> None:
    good, other = ok("ddp"), ok("zero2")
    other.status = status
    assert console.exit_code([good, other]) == ENDS[status]
    nothing_measured = status is not Status.OK
    assert console.exit_code([other]) == int(nothing_measured)


def fake(monkeypatch: pytest.MonkeyPatch, end: Callable[[Result], None] = lambda row: None) -> None:
    """Runs that end at once with a result as ``end`` leaves it; each peak is predicted: a GiB."""

    def start(resolved, folder, **more) -> Result:
        row = ok(resolved.spec.recipe)
        row.spec, row.losses, row.grad_norms = resolved.spec, [1.0, 0.9], [0.1, 0.1]
        end(row)
        row.write(folder / "result.json")
        return row

    def foretold(rows, folder: Path, *, done, **more) -> None:
        for index, row in enumerate(rows):
            given = {"device": "cpu", "method": "trace", "allocated": 2**30}
            done(index, Prediction(recipe=row.spec.recipe, **given))

    monkeypatch.setattr(launch, "run", start)
    monkeypatch.setattr(pool, "predict_all", foretold)


def test_run_report_and_compare(tmp_path: Path, capsys, monkeypatch) -> None:
    fake(monkeypatch)
    words = ["run", "--recipes", "ddp", "zero2", "--data", "synthetic", "--out", str(tmp_path)]
    assert call(words) == 0
    text = capsys.readouterr().out
    assert "suite recipes: 4 runs, 4 to do" in text
    for name in ("report.md", "report.csv", "report.json", "report.html"):
        assert (tmp_path / name).exists() and name in text
    assert json.loads((tmp_path / "suite.json").read_text())["reference"] == "ddp"
    assert len(list(tmp_path.glob("runs/*/prediction.json"))) == 2
    assert "### Predicted and measured" in (tmp_path / "report.md").read_text()
    assert call(words) == 0 and "4 runs, 0 to do" in capsys.readouterr().out
    assert call(["report", str(tmp_path)]) == 0 and "zero2" in capsys.readouterr().out
    assert call(["compare", str(tmp_path), str(tmp_path)]) == 0


def test_train_hands_its_options_on(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake(monkeypatch)
    words = ["train", "--recipe", "single", "--checkpoint", "state", "--samples", "a.png"]
    words += ["--guidance", "3", "--steps", "7", "--out", str(tmp_path / "run")]
    assert call([*words, "--dry-run"]) == 0
    line = capsys.readouterr().out
    assert f"--checkpoint {tmp_path}/state --samples {tmp_path}/a.png" in line
    assert "--guidance 3.0" in line
    assert "--steps 5" in line, "seven steps in all, the two of the warm-up among them"
    assert call(words) == 0
    assert "loss 1.0000 -> 0.9000 over 2 steps" in capsys.readouterr().out


def test_a_fault_of_ours_is_not_called_bad_input(monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("too many values to unpack")

    monkeypatch.setattr("harness.commands.run.run", broken)
    with pytest.raises(ValueError, match="too many values"):
        call(["run"])


@pytest.mark.parametrize("words", [[], ["--ema", "0"], ["--resume"]])
def test_train_keeps_its_state_and_samples_in_its_folder(words, tmp_path, capsys) -> None:
    call(["train", "--recipe", "single", "--out", str(tmp_path), "--dry-run", *words])
    line = capsys.readouterr().out
    assert f"--checkpoint {tmp_path}/checkpoint" in line
    assert (f"--samples {tmp_path}/samples.png" in line) is ("--ema" not in words)
    assert ("--resume" in line) is ("--resume" in words)


@pytest.mark.parametrize(("name", "words"), [
    ("", tuple(CATALOG)), ("zero3-nvme", ("async_io", "arXiv")), ("checkpoint", ("every=1",)),
    ("suites", ("default",)), ("model", ("flux-dev", "black-forest-labs/FLUX.1-dev")),
    ("gpus", ("RTX-4070",)), ("anima", ("model anima is not here: ", "cannot be planned; ")),
])  # fmt: skip
def test_list_describes_what_is_named_in_any_spelling(name, words, capsys) -> None:
    assert call(["list", *name.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [word for word in words if word not in text] == []


def test_list_of_an_unknown_name_suggests_the_nearest(capsys) -> None:
    assert call(["list", "chekpoint"]) == 2
    assert "did you mean 'checkpoint'?" in capsys.readouterr().err


def test_the_doctor_needs_no_library_s_data(tmp_path: Path, capsys, monkeypatch) -> None:
    """Carried packages have no scikit-learn, and doctor is what one starts with there."""
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "sklearn" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    assert call(["run", "--recipes", "single", "--dry-run"]) == 2
    assert "digits needs scikit-learn" in capsys.readouterr().err
    assert call(["doctor", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "zero3_nvme" in said and ("shared GPU" in said) is doctor.WINDOWS.exists()
