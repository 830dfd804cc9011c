"""Choose the build of torch for this machine's driver and GPUs, before torch is installed.

    python -m harness.system.wheels torch==2.13.0

prints the requirement to install. If it differs from the given one, stderr says why. This module
uses only the standard library and has no index address: it chooses among the versions that pip
finds with its own settings (PIP_EXTRA_INDEX_URL adds an index).
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
"""CUDA's major version -> the first driver that supports it, for all its minor versions (NVIDIA,
CUDA Compatibility, "Minor Version Compatibility")."""
DEFAULT_CUDA = 13
"""CUDA version of the unlabeled builds of torch 2.11 to 2.13 on PyPI (CUDA 13.0)."""
SERVES = {"cu126": ((5, 0), (9, 0)), "cu128": ((7, 5), (12, 1)), "": ((7, 5), (12, 1))}
"""Build -> least and greatest compute capability that it has machine code for (PyTorch, RELEASE.md,
"CUDA support matrix")."""
BUILDS = ("2.13.0+cu126", "2.12.1+cu126", "2.12.0+cu126", "2.11.0+cu128", "2.11.0+cu126")
"""CUDA 12 builds of the supported versions, the best first."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
QUERY = "--query-gpu=driver_version,compute_cap"


class Choice(NamedTuple):
    """``requirement`` in pip's syntax; ``why`` explains a change or a problem, else empty."""

    requirement: str
    why: str = ""


def choose(
    pinned: str,
    driver: str,
    capabilities: Sequence[tuple[int, int]] = (),
    found: Sequence[str] = (),
) -> Choice:
    """Return the build of torch to install.

    Args:
        pinned: such as ``torch==2.13.0``.
        driver: the NVIDIA driver's version; empty if there is none.
        capabilities: of the GPUs, if known.
        found: versions of torch that pip finds; needed only if ``need`` is true.
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
    text = (
        f"{why}, and pip finds no build that does ({', '.join(able)}). Update the driver. Or name "
        "PyTorch's index of CUDA 12.6 builds (pytorch.org, Get Started) in PIP_EXTRA_INDEX_URL, "
        "remove the environment, and run this again. Or use a PyTorch of your own (HEADROOM_PYTHON)"
    )
    return Choice(pinned, text)


def need(driver: str, capabilities: Sequence[tuple[int, int]]) -> bool:
    """Return whether the unlabeled build does not run here."""
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
    """Return the driver's version and the GPUs' compute capabilities; empty without a driver."""
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
    """Return the versions of torch that pip finds in its indexes; empty if it cannot list them."""
    words = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return []
    line = next((x for x in done.stdout.splitlines() if x.startswith("Available versions:")), "")
    return [word.strip() for word in line.partition(":")[2].split(",") if word.strip()]


def main(argv: Sequence[str]) -> int:
    """Print the requirement; query pip only if PyPI's own build does not run."""
    driver, capabilities = here()
    found = available() if need(driver, capabilities) else ()
    choice = choose(argv[0], driver, capabilities, found)
    if choice.why:
        print(f"headroom: {choice.why}", file=sys.stderr)
    print(choice.requirement)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
