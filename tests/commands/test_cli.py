"""The command line: bad input is one line and exit code 2, before any process starts."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import ROOT, cli
from harness.commands import console, doctor, run, single_run, train
from harness.launch import launch
from harness.planner import pool
from harness.planner.calibrate import command as calibrate
from harness.prediction import Prediction
from harness.result import Result, Status
from harness.system import gpus
from harness.system import machine as machines
from harness.worker.training import Training
from strategies import CATALOG
from tests.made.machines import machine
from tests.made.results import ok

POPEN = subprocess.Popen


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Any process, and any probe, is recorded; runs are faked where a test asks for them."""
    begun: list[str] = []

    def probe(folder: Path, ops: object = (), **more: object) -> machines.Machine:
        begun.append("probe")
        return machine(folder)

    for module in (run, single_run):
        monkeypatch.setattr(module, "recall", machines.look)
    monkeypatch.setattr(console, "examine", probe)
    monkeypatch.setattr(gpus, "visible", lambda: ())
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: begun.append("process"))
    return begun


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def corrupt_latents(tmp_path: Path) -> list[str]:
    for kind in ("features", "labels"):
        folder = tmp_path / "lat" / f"imagenet256_{kind}"
        folder.mkdir(parents=True)
        np.save(folder / "0.npy", np.zeros((1, 4, 32, 32) if kind == "features" else (1,)))
    (tmp_path / "lat" / "imagenet256_features" / "0.npy").write_bytes(b"not numpy")
    return ["run", "--recipes", "ddp", "--data", f"latents:{tmp_path}/lat"]


def file_for_folder(tmp_path: Path) -> list[str]:
    return ["run", "--recipes", "ddp", "--out", write(tmp_path / "taken", "") + "/results"]


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown strategy": (lambda p: ["--recipes", "zeor3"], "did you mean 'zero3'"),
    "no address of node 0": (
        lambda p: ["--recipes", "ddp", "--nodes", "2", "--node-rank", "1"],
        "give --rdzv-endpoint HOST:PORT",
    ),
    "processes that nodes cannot share": (
        lambda p: ["--recipes", "ddp", "--processes", "3", "--nodes", "2", "--dry-run"],
        "give --processes 2 or 4",
    ),
    "a scheduler that is not submitted to": (
        lambda p: ["run", "--nodes", "2", "--on", "slurm", "--dry-run"],
        "take the srun line",
    ),
    "steps out of range": (lambda p: ["--recipes", "ddp", "--steps", "0"], "--steps at least 1"),
    "ema out of range": (lambda p: ["--recipes", "ddp", "--ema", "1"], "give a decay in"),
    "batch": (lambda p: ["--recipes", "ddp", "--global-batch", "7"], "use 6 or 8"),
    "recipe twice": (lambda p: ["--recipes", "ddp", "ddp"], "'ddp' is given twice"),
    "model": (lambda p: ["--recipes", "ddp", "--model", "DiT-XXL/2"], "did you mean 'DiT-XL/2'"),
    "data": (lambda p: ["--recipes", "ddp", "--data", "digts"], "did you mean digits"),
    "latents missing": (lambda p: ["--recipes", "ddp", "--data", f"latents:{p}/none"], "/none"),
    "latents corrupt": (corrupt_latents, "0.npy"),
    "suite unknown": (lambda p: ["--suite", "defalt"], "did you mean 'default'"),
    "no GPU": (lambda p: ["--recipes", "ddp", "--device", "cuda"], "use --device cpu"),
    "out is under a file": (file_for_folder, "choose another --out"),
    "unknown option": (lambda p: ["--recipe", "ddp", "--stps", "3"], "see ./run.sh"),
    "unknown command": (lambda p: ["rnu"], "invalid choice: 'rnu'"),
    "timeout": (lambda p: ["--recipes", "ddp", "--timeout", "-1"], "above 0"),
    "noise floor": (
        lambda p: ["--recipes", "ddp", "--noise-floor", "0"],
        "noise_floor is 0; give --noise-floor at least 1",
    ),
    "report of nothing": (lambda p: ["report", str(p / "none")], "no such folder"),
    "report of an empty folder": (lambda p: ["report", str(p)], "no results in it"),
    "compare with nothing": (lambda p: ["compare", str(p), str(p)], "no results in it"),
    "train over another": (
        lambda p: [*saved(p, 7), "--steps", "9"],
        "already holds a training (step-00000007); give --resume",
    ),
    "train no further": (
        lambda p: [*saved(p, 7), "--steps", "5", "--resume"],
        "has already taken 7 steps; give a larger --steps",
    ),
    "anatomy of one process on two": (
        lambda p: ["anatomy", "single", "--processes", "2"],
        "processes is 2, but single trains on one process; leave --processes out",
    ),
    "train one process on two": (
        lambda p: ["train", "--recipe", "single", "--processes", "2"],
        "error: single: trains one process, not 2; use --processes 1",
    ),
    "max-batch without memory": (
        lambda p: ["max-batch", "--recipe", "single", "--memory-limit", "0"],
        "memory-limit is 0; give --memory-limit in GiB, above 0",
    ),
    "train's samples in a folder": (
        lambda p: ["train", "--recipe", "single", "--out", str(p / "r"), "--samples", str(p)],
        "it is a folder; give another --samples FILE",
    ),
    "train replicas of one": (
        lambda p: ["train", "--recipe", "ddp", "--processes", "1"],
        "one process has no replica to average with; use single, or more processes",
    ),
    "train guidance": (
        lambda p: ["train", "--recipe", "ddp", "--guidance", "nan"],
        "guidance is nan; give --guidance above 0",
    ),
    "plan in a precision": (
        lambda p: [*plan(), "--precision", "bfloat16"],
        "a recipe has the precision, as in single+bf16",
    ),
    "plan of a recipe in several words": (
        lambda p: plan("+"),
        "recipes '+' have an empty part; write each as one word",
    ),
    "plan of a recipe that refuses": (
        lambda p: [*plan("ddp+bf16_master"), "--gpus", "2"],
        "only DeepSpeed keeps a float32 master",
    ),
    "plan into a folder": (
        lambda p: [*plan(), "--json", str(p)],
        "it is a folder; give another --json FILE",
    ),
    "lint of nothing": (
        lambda p: ["lint", str(p / "none.json")],
        "No such file or directory; name a DeepSpeed JSON file",
    ),
    "calibrate a GPU that is not there": (
        lambda p: ["calibrate", "--device", "cuda", "--out", str(p / "results")],
        "device is cuda, but torch sees no GPU here; use --device cpu",
    ),
    "plan with a calibration that is none": (
        lambda p: [*plan(), "--calibration", write(p / "c.json", "{}")],
        "not a calibration file",
    ),
    "a negative size": (
        lambda p: ["plan", "--gpu-memory", "-5GiB"],
        "gpu-memory is '-5GiB'; write a size as in 24GiB",
    ),
    "a negative size of the host": (
        lambda p: [*plan(), "--host-memory", "-.5GiB"],
        "host-memory is '-.5GiB'; write a size as in 24GiB",
    ),
    "a negative text": (
        lambda p: ["plan", "--gpu", "L4", "--model", "flux-dev", "--text", "-5"],
        "text is -5; give --text at least 0",
    ),
    "train saves too often": (
        lambda p: ["train", "--recipe", "ddp", "--save-every", "0"],
        "--save-every above 0",
    ),
}


def plan(recipe: str = "ddp") -> list[str]:
    return ["plan", "--gpu-memory", "24GiB", "--recipes", recipe]


def saved(folder: Path, step: int) -> list[str]:
    """A checkpoint in ``folder``, and the words that train there."""
    path = folder / f"step-{step:08d}"
    path.mkdir()
    (path / "headroom.json").write_text("{}")
    return ["train", "--recipe", "ddp", "--checkpoint", str(folder)]


def call(words: list[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.mark.parametrize("case", BAD)
def test_bad_input(
    case: str, tmp_path: Path, capsys, monkeypatch, nothing_starts: list[str]
) -> None:
    # A torch for GPUs that sees none is asked why (``test_requirements``); one for CPUs is not.
    versions = machines.look(tmp_path).versions | {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(machines.Machine, "versions", versions)
    make, said = BAD[case]
    words = make(tmp_path)
    runs = words[0] == "run" or words[0].startswith("--")
    if runs and "--out" not in words:
        words += ["--out", str(tmp_path / "results")]
    assert call(words) == 2
    text = capsys.readouterr()
    lines = text.err.strip().splitlines()
    assert len(lines) == 1, text.err
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert nothing_starts == []
    assert not (tmp_path / "results").exists()


def test_too_few_gpus(tmp_path: Path, capsys, monkeypatch, nothing_starts) -> None:
    card = gpus.Gpu(index=0, name="H200", total_bytes=2**37)
    monkeypatch.setattr(run, "recall", lambda out: machine(out, gpus=(card,), probe=None))
    words = ["--recipes", "ddp", "--device", "cuda", "--processes", "4", "--out", str(tmp_path)]
    assert call(words) == 2
    assert "use --processes 1" in capsys.readouterr().err
    assert nothing_starts == []


SEEN = {
    "run": ["--recipes", "single", "--noise-floor", "1"],
    "train": ["train", "--recipe", "single"],
    "max-batch": ["max-batch", "--recipe", "single"],
    "anatomy": ["anatomy", "single"],
}


@pytest.mark.parametrize("command", SEEN)
@pytest.mark.parametrize("there", [True, False])
def test_torch_is_asked_before_a_gpu_is_denied(
    command, there, tmp_path, capsys, monkeypatch, nothing_starts
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
    words = ["--device", "cuda", "--data", "synthetic", "--out", str(tmp_path / "o")]
    try:
        code = call([*SEEN[command], *words])
    except KeyboardInterrupt:
        code = 130
    text = capsys.readouterr().err
    assert "probe" in nothing_starts
    assert (code == 130) is there, text
    if not there:
        assert code == 2 and any(w in text for w in ("no GPU", "0 GPUs", "there is none"))
    if not there and command == "run":
        assert "the driver is asleep" in text


def test_a_torch_for_cpus_is_not_asked(tmp_path, capsys, monkeypatch, nothing_starts) -> None:
    monkeypatch.setattr(machines, "version", lambda name: "2.13.0+cpu")
    words = [*SEEN["run"], "--device", "cuda", "--out", str(tmp_path)]
    assert call(words) == 2 and nothing_starts == []
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_a_full_disk(tmp_path: Path, capsys, monkeypatch, nothing_starts) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert call(["--recipes", "ddp", "--out", str(tmp_path)]) == 2
    assert "free disk space" in capsys.readouterr().err
    assert nothing_starts == []


def test_dry_run_prints_commands_and_starts_nothing(
    tmp_path: Path, capsys, nothing_starts: list[str]
) -> None:
    out = str(tmp_path / "r")
    assert call(["--dry-run", "--out", out, "--recipes", "ddp", "ddp+tf32"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if "accelerate" in x]
    assert "--config_file launch_configs/ddp.cpu.yaml" in lines[0]
    assert not lines[0].startswith("#")
    assert [x.startswith("# ") for x in lines] == [False, False, True, False], "ddp again, twice"
    assert nothing_starts == []
    assert not (tmp_path / "r").exists()


ENDS = {
    Status.OK: 0,
    Status.VOID: 1,
    Status.FAILED: 1,
    Status.TIMEOUT: 1,
    Status.GPU_OOM: 1,
    Status.HOST_OOM: 1,
    Status.UNSUPPORTED: 0,
    Status.REFUSED: 0,
}


@pytest.mark.parametrize("status", ENDS)
def test_exit_codes(status: Status) -> None:
    good, other = ok("ddp"), ok("zero2")
    other.status = status
    assert console.exit_code([good, other]) == ENDS[status]
    nothing_measured = status is not Status.OK
    assert console.exit_code([other]) == int(nothing_measured)


def fake(monkeypatch: pytest.MonkeyPatch, end: Callable[[Result], None]) -> None:
    """Runs that end at once with a result as ``end`` leaves it."""

    def start(resolved, folder, **more) -> Result:
        row = ok(resolved.spec.recipe)
        row.spec, row.losses, row.grad_norms = resolved.spec, [1.0, 0.9], [0.1, 0.1]
        end(row)
        row.write(folder / "result.json")
        return row

    monkeypatch.setattr(launch, "run", start)
    monkeypatch.setattr(pool, "predict_all", foretold)


def foretold(rows, folder: Path, *, done, **more) -> None:
    """Every row's peak is predicted to be one GiB."""
    for index, row in enumerate(rows):
        done(
            index, Prediction(recipe=row.spec.recipe, device="cpu", method="trace", allocated=2**30)
        )


def test_run_report_and_compare(tmp_path: Path, capsys, monkeypatch) -> None:
    fake(monkeypatch, lambda row: None)
    words = ["run", "--recipes", "ddp", "zero2", "--data", "synthetic", "--out", str(tmp_path)]
    assert call(words) == 0
    text = capsys.readouterr().out
    assert "suite recipes: 4 runs, 4 to do" in text
    for name in ("report.md", "report.csv", "report.json", "report.html"):
        assert (tmp_path / name).exists()
        assert name in text
    head = json.loads((tmp_path / "suite.json").read_text())
    assert head["reference"] == "ddp"
    assert len(list(tmp_path.glob("runs/*/prediction.json"))) == 2
    assert "### Predicted and measured" in (tmp_path / "report.md").read_text()
    assert call(words) == 0
    assert "4 runs, 0 to do" in capsys.readouterr().out
    assert call(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "zero2" in text
    assert call(["compare", str(tmp_path), str(tmp_path)]) == 0


def test_an_interruption_still_reports(tmp_path: Path, capsys, monkeypatch) -> None:
    def end(row: Result) -> None:
        if row.spec.recipe == "zero2":
            raise KeyboardInterrupt

    fake(monkeypatch, end)
    recipes = ["--recipes", "ddp", "zero2", "zero3"]
    assert call([*recipes, "--data", "synthetic", "--out", str(tmp_path)]) == 130
    assert "interrupted after 1 of 5 runs" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists()


def test_train_hands_its_options_on(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake(monkeypatch, lambda row: None)
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


@pytest.mark.parametrize(
    ("words", "samples"), [([], True), (["--ema", "0"], False), (["--resume"], True)]
)
def test_train_keeps_its_state_and_samples_in_its_folder(
    words: list[str], samples: bool, tmp_path: Path, capsys, monkeypatch
) -> None:
    fake(monkeypatch, lambda row: None)
    call(["train", "--recipe", "single", "--out", str(tmp_path), "--dry-run", *words])
    line = capsys.readouterr().out
    assert f"--checkpoint {tmp_path}/checkpoint" in line
    assert (f"--samples {tmp_path}/samples.png" in line) is samples
    assert ("--resume" in line) is ("--resume" in words)


COMMANDS = ["run", "plan", "report", "compare", "list", "doctor", "lint", "anatomy", "train",
            "max-batch", "calibrate", "export", "oom", "atlas", "test"]  # fmt: skip


def test_list(capsys) -> None:
    assert call(["list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in CATALOG)
    assert len(text.splitlines()) < len(CATALOG) + 40


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero3-nvme", ("async_io", "arXiv")),
        ("checkpoint", ("every=1",)),
        ("suites", ("default",)),
        ("model", ("flux-dev", "black-forest-labs/FLUX.1-dev")),
        ("gpus", ("RTX-4070",)),
    ],
)
def test_list_describes_one_strategy_in_any_spelling(name, words, capsys) -> None:
    assert call(["list", name]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in words)


@pytest.mark.parametrize("name", ["circlestone-labs/Anima", "anima"])
def test_list_of_a_model_that_cannot_be_planned_says_why(name, capsys) -> None:
    assert call(["list", name]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"model {name} is not here: ") and "cannot be planned; " in said


def test_list_of_an_unknown_name_suggests_the_nearest(capsys) -> None:
    assert call(["list", "chekpoint"]) == 2
    assert "did you mean 'checkpoint'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_fits_a_terminal_of_80_columns(name, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert call([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "example" in text and f"./run.sh {name}" in text
    assert [line for line in text.splitlines() if len(line) > 80] == []


def test_help_says_the_defaults_that_count(capsys) -> None:
    assert call(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.partition("options:")[2].split())
    counted = {
        n: Training.__dataclass_fields__[n] for n in ("save_every", "sample_steps", "guidance")
    }
    usual = {**train.DEFAULTS, **{name: field.default for name, field in counted.items()}}
    del usual["warmup"]  # train has no such option
    for name, value in usual.items():
        option = f"--{name.replace('_', '-')} "
        assert re.search(rf"{option}.*?default: ([^)]+)\)", text)[1] == str(value), name


def test_answers_come_without_torch(monkeypatch) -> None:
    code = "import sys; from harness.cli import main; main(['list']); print('torch' in sys.modules)"
    monkeypatch.setattr(subprocess, "Popen", POPEN)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


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


def test_a_gpu_that_torch_alone_sees_names_the_session_s_folder(
    capsys, monkeypatch, nothing_starts: list[str]
) -> None:
    """As in WSL2: else the second call, which knows it, would begin anew in another folder."""
    card = gpus.Gpu(index=0, name="NVIDIA H200", total_bytes=139 << 30)

    def recall(folder: Path) -> machines.Machine:
        return machine(folder, gpus=(card,)) if nothing_starts else machines.look(folder)

    def stop(folder: Path, *names: object, **more: object) -> None:
        raise run.OutputError(f"{folder.name} is full")

    monkeypatch.setattr(calibrate, "has_driver", lambda: True)
    monkeypatch.setattr(calibrate, "recall", recall)
    monkeypatch.setattr(calibrate, "check_out", stop)
    assert call(["calibrate"]) != 0
    assert "nvidia_h200 is full" in capsys.readouterr().err and nothing_starts == ["probe"]
