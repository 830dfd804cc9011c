"""Which build of torch a driver and its cards can run: made-up machines, and run.sh's own words."""

from __future__ import annotations

import subprocess

import pytest

from harness import ROOT
from harness.system import gpus, wheels

PINNED = "torch==2.13.0"
ALL = ["2.13.0+cu132", "2.13.0+cu126", "2.13.0", "2.12.1+cu126", "2.11.0+cu128", "2.11.0+cu126"]
AMPERE, VOLTA, BLACKWELL = (8, 0), (7, 0), (12, 0)


@pytest.mark.parametrize(
    ("driver", "cards", "found", "wanted", "said"),
    [
        ("", [], [], PINNED, ""),
        ("580.65.06", [AMPERE], ALL, PINNED, ""),
        ("590.1", [BLACKWELL], ALL, PINNED, ""),
        ("550.54.15", [AMPERE], ALL, "torch==2.13.0+cu126", "driver is 550.54.15"),
        ("525.60.13", [], ALL[3:], "torch==2.12.1+cu126", "below 580"),
        ("550.54.15", [BLACKWELL], ["2.11.0+cu128"], "torch==2.11.0+cu128", "which does"),
        ("590.1", [VOLTA], ALL, "torch==2.13.0+cu126", "compute capability 7.0 is too old"),
        ("590.1", [VOLTA, BLACKWELL], ["2.11.0+cu128"], PINNED, "finds no build that does"),
        ("550.54.15", [AMPERE], ["2.13.0"], PINNED, "PIP_EXTRA_INDEX_URL"),
        ("470.82", [AMPERE], ALL, PINNED, "update the driver"),
    ],
)
def test_a_build_is_chosen_that_runs_here(driver, cards, found, wanted, said) -> None:
    choice = wheels.choose(PINNED, driver, cards, found)
    assert choice.requirement == wanted
    assert (said in choice.why) if said else choice.why == ""
    assert choice.requirement == PINNED or wanted.removeprefix("torch==") in choice.why


def test_blackwell_has_no_machine_code_in_builds_for_cuda_12_6() -> None:
    choice = wheels.choose(PINNED, "550.54.15", [BLACKWELL], ALL)
    assert choice.requirement == "torch==2.11.0+cu128"


def test_pip_is_asked_only_where_the_pinned_build_does_not_run(monkeypatch, capsys) -> None:
    asked = []
    monkeypatch.setattr(wheels, "available", lambda: asked.append("pip") or ALL)
    for driver, wanted in (("590.1", PINNED), ("535.1", "torch==2.13.0+cu126")):
        monkeypatch.setattr(wheels, "here", lambda driver=driver: (driver, [AMPERE]))
        assert wheels.main([PINNED]) == 0
        told = capsys.readouterr()
        assert told.out.strip() == wanted and (wanted == PINNED) is (told.err == "")
    assert asked == ["pip"]


def test_the_driver_is_what_nvidia_smi_says_or_else_its_kernel_module(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "has_driver", lambda: True)
    monkeypatch.setattr(gpus, "smi", lambda query: "550.54.15, 8.0\n550.54.15, 12.0\n")
    assert wheels.here() == ("550.54.15", [AMPERE, BLACKWELL])
    module = tmp_path / "version"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build"
    module.write_text(line + "\nGCC version: 12\n")
    monkeypatch.setattr(gpus, "smi", lambda query: "")
    monkeypatch.setattr(wheels, "KERNEL_MODULE", module)
    assert wheels.here() == ("570.86.10", [])
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    assert wheels.here() == ("", [])


def test_run_sh_installs_what_was_chosen_and_nothing_else_of_torch(tmp_path) -> None:
    """Its own ``install``, with a Python that notes what it is called with."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        '#!/bin/bash\ncase "$*" in\n'
        "  *harness.system.wheels*) echo torch==2.12.1+cu126 ;;\n"
        '  -\\ */pyproject.toml\\ "") printf "torch==2.13.0\\nnumpy==2.4.6\\n" ;;\n'
        '  -\\ *) echo "pytest==9.2.0" ;;\n'
        f'  *) echo "$*" >> {tmp_path}/called ;;\nesac\n'
    )
    python.chmod(0o755)
    text = (ROOT / "run.sh").read_text()
    functions = text[: text.index('if [ -n "${HEADROOM_PYTHON:-}" ]; then')]
    script = functions.replace(
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', f'here="{ROOT}"'
    )
    words = ["bash", "-c", f"{script}\nvenv={tmp_path}\ninstall"]
    subprocess.run(words, check=True, capture_output=True, text=True)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[0].endswith(" torch==2.12.1+cu126")
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [
        *("torch==2.12.1+cu126", "numpy==2.4.6", "pytest==9.2.0", "pytest==9.2.0")
    ]
