"""Which build of torch this machine's driver and cards can run: asked once, before torch is there.

    python -m harness.system.wheels torch==2.13.0

prints the requirement to install, and says on stderr why it is another than the one given. Standard
library only. No address of an index is known here: what pip finds with its own settings is chosen
from (PIP_EXTRA_INDEX_URL adds one).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.system import gpus

DRIVERS = {13: 580, 12: 525, 11: 450}
"""CUDA's major version -> the driver that it begins with; within a major version all minor ones
run (NVIDIA, CUDA Compatibility, "Minor Version Compatibility")."""
DEFAULT_CUDA = 13
"""Of the builds of torch 2.11 to 2.13 that carry no label, as PyPI has them (CUDA 13.0)."""
SERVES = {"cu126": ((5, 0), (9, 0)), "cu128": ((7, 5), (12, 1)), "": ((7, 5), (12, 1))}
"""Build -> the least and the greatest compute capability that it has machine code for (PyTorch,
RELEASE.md, "CUDA support matrix")."""
BUILDS = ("2.13.0+cu126", "2.12.1+cu126", "2.12.0+cu126", "2.11.0+cu128", "2.11.0+cu126")
"""Builds for CUDA 12 of the versions that are supported, the best first."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
QUERY = "--query-gpu=driver_version,compute_cap"


class Choice(NamedTuple):
    """``requirement`` as pip takes it, and in words ``why`` it is not the one that was asked for,
    or what stands against it; empty where there is nothing to say."""

    requirement: str
    why: str = ""


def choose(
    pinned: str,
    driver: str,
    capabilities: Sequence[tuple[int, int]] = (),
    found: Sequence[str] = (),
) -> Choice:
    """The build of torch to install.

    Args:
        pinned: as ``torch==2.13.0``.
        driver: the NVIDIA driver's version; empty where there is none.
        capabilities: of the cards, as far as they are told.
        found: versions of torch that pip finds; asked for only where they matter (``need``).
    """
    if not need(driver, capabilities):
        return Choice(pinned)
    why = _against(driver, capabilities)
    if _major(driver) < DRIVERS[12]:
        return Choice(pinned, f"{why}, nor do builds for CUDA 12 (from {DRIVERS[12]} on): update "
                      "the driver; until then nothing runs on the GPU")  # fmt: skip
    able = [build for build in BUILDS if _serves(build.partition("+")[2], capabilities)]
    there = next((build for build in able if build in found), None)
    if there:
        return Choice(f"torch=={there}", f"{why}; taking torch {there}, which does")
    return Choice(pinned, f"{why}, and pip finds none that does ({', '.join(able)}): update the "
                  "driver; or name PyTorch's index of CUDA 12.6 builds (pytorch.org, Get Started) "
                  "in PIP_EXTRA_INDEX_URL, remove the environment, and run this again; or use a "
                  "PyTorch of your own (HEADROOM_PYTHON)")  # fmt: skip


def need(driver: str, capabilities: Sequence[tuple[int, int]]) -> bool:
    """Whether the build without a label does not run here."""
    old = bool(driver) and _major(driver) < DRIVERS[DEFAULT_CUDA]
    return old or any(capability < SERVES[""][0] for capability in capabilities)


def _against(driver: str, capabilities: Sequence[tuple[int, int]]) -> str:
    least = DRIVERS[DEFAULT_CUDA]
    if _major(driver) < least:
        return (
            f"the NVIDIA driver is {driver}; PyPI's torch is built for CUDA {DEFAULT_CUDA} and "
            f"does not run below {least}"
        )
    oldest = ".".join(map(str, min(capabilities)))
    return f"a GPU of compute capability {oldest} is too old for PyPI's torch, which does not run"


def _serves(build: str, capabilities: Sequence[tuple[int, int]]) -> bool:
    least, most = SERVES[build]
    return all(least <= capability <= most for capability in capabilities)


def _major(driver: str) -> int:
    digits = driver.partition(".")[0]
    return int(digits) if digits.isdigit() else DRIVERS[DEFAULT_CUDA]


def here() -> tuple[str, list[tuple[int, int]]]:
    """The driver's version and the capabilities of the cards: by nvidia-smi, else what the kernel
    module says of itself; empty without a driver."""
    if not gpus.has_driver():
        return "", []
    told = gpus.rows(gpus.smi(QUERY), 2)
    if told:
        return told[0][0], [_capability(cell) for _, cell in told if "." in cell]
    try:
        text = KERNEL_MODULE.read_text(encoding="utf-8")
    except OSError:
        return "", []
    version = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", text)
    return (version[1] if version else ""), []


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return gpus.number(major), gpus.number(minor)


def available() -> list[str]:
    """Versions of torch that pip finds in its indexes; empty where it cannot say."""
    words = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return []
    line = next((x for x in done.stdout.splitlines() if x.startswith("Available versions:")), "")
    return [word.strip() for word in line.partition(":")[2].split(",") if word.strip()]


def main(argv: Sequence[str]) -> int:
    """Print the requirement; pip is asked only where PyPI's own build does not run."""
    driver, capabilities = here()
    found = available() if need(driver, capabilities) else ()
    choice = choose(argv[0], driver, capabilities, found)
    if choice.why:
        print(f"headroom: {choice.why}", file=sys.stderr)
    print(choice.requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
