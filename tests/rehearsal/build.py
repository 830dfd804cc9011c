"""The rehearsed cards: which Python has a CUDA build of torch, what is compiled, and the variables
under which a command takes host memory for cards.

    python -m tests.rehearsal.build make FOLDER                    make an environment (5.5 GB)
    python -m tests.rehearsal.build run [--cards N] -- COMMAND...  run a command with N cards

``HEADROOM_REHEARSAL_PYTHON`` names the Python of that environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["H100", "Card", "absent", "compiled", "environment", "python"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PYTHON = "HEADROOM_REHEARSAL_PYTHON"
CUDA_HEADERS = ("nvidia-cuda-crt", "nvidia-cuda-cccl")
"""Wheels with headers that torch's own do not need, of the version of its CUDA."""
ASK = """
import json, os, sys, torch
import nvidia
print(json.dumps([torch.version.cuda, os.path.dirname(torch.__file__), list(nvidia.__path__)[0]]))
"""


@dataclasses.dataclass(frozen=True)
class Card:
    """A card as CUDA describes it; ``bytes`` is its memory."""

    name: str
    bytes: int
    capability: str
    processors: int

    def __str__(self) -> str:
        return "|".join(map(str, dataclasses.astuple(self)))


H100 = Card("NVIDIA H100 80GB HBM3", 85_017_493_504, "9.0", 132)


def python() -> Path | None:
    """The Python whose torch is rehearsed; None where none is named."""
    named = os.environ.get(PYTHON)
    return Path(named) if named else None


def absent() -> str:
    """Why nothing can be rehearsed here; empty where it can."""
    make = (
        f"make it: python -m tests.rehearsal.build make FOLDER; export {PYTHON}=FOLDER/bin/python"
    )
    named = python()
    if named is None:
        return f"{PYTHON} is not set; {make}"
    if not named.exists():
        return f"{PYTHON}={named} does not exist; {make}"
    if shutil.which("g++") is None:
        return "g++ is missing: it compiles the rehearsed cards"
    return "" if _told(named)[0] else f"{named} has a torch without CUDA; {make}"


@functools.cache
def _told(named: Path) -> list[str]:
    """The CUDA version of a Python's torch, torch's folder and that of NVIDIA's wheels."""
    import json

    done = subprocess.run([named, "-c", ASK], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else ["", "", ""]


def compiled() -> Path:
    """The folder of the compiled libraries, in the environment; compiles what changed."""
    named = python()
    folder = named.parent.parent / "rehearsal"
    folder.mkdir(exist_ok=True)
    _, torch, nvidia = _told(named)
    include = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
    cuda = [f"-I{path}" for path in (*Path(nvidia).glob("cu*/include"), f"{nvidia}/nccl/include",
                                     *Path(nvidia).glob("cu*/include/cccl"))]  # fmt: skip
    _compile(folder / "libdevice.so", ["device.cpp", "nccl.cpp"], [*include, *cuda, "-ldl"])
    links = [f"-L{torch}/lib", "-ltorch_cpu", "-lc10", *include]
    _compile(folder / "libkernels.so", ["kernels.cpp"], links)
    # Ops that DeepSpeed compiles are linked with -lcuda.
    for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1"):
        if not (folder / name).exists():
            (folder / name).symlink_to("libdevice.so")
    return folder


def _compile(out: Path, sources: Sequence[str], flags: Sequence[str]) -> None:
    files = [HERE / name for name in sources]
    if out.exists() and out.stat().st_mtime > max(file.stat().st_mtime for file in files):
        return
    new = out.with_suffix(f".{os.getpid()}")
    line = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", *map(str, files), "-o", str(new)]
    subprocess.run([*line, *flags], check=True)
    new.rename(out)


def environment(cards: Sequence[Card], folder: Path) -> dict[str, str]:
    """Variables under which this process's children have ``cards``; ``folder`` keeps what they
    share while they run."""
    built = compiled()
    paths = [str(HERE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "REHEARSAL_CARDS": ";".join(map(str, cards)),
        "REHEARSAL_FOLDER": str(folder),
        "REHEARSAL_KERNELS": str(built / "libkernels.so"),
        "LD_PRELOAD": str(built / "libdevice.so"),
        "LD_LIBRARY_PATH": f"{built}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        # Ops of DeepSpeed for this torch would else replace those of the caller's.
        "TORCH_EXTENSIONS_DIR": str(built / "torch_extensions"),
        "LIBRARY_PATH": f"{built}:{os.environ.get('LIBRARY_PATH', '')}".rstrip(":"),
        "PYTHONPATH": ":".join(filter(None, paths)),
        "PATH": f"{HERE / 'bin'}:{os.environ['PATH']}",
        "HEADROOM_PYTHON": str(python()),
    }


def make(folder: Path) -> None:
    """An environment with the pinned torch as PyPI has it for Linux, with CUDA, and all else."""
    import tomllib

    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        pins += extra
    # Of one version pip prefers a local build (2.13.0+cpu); three signs take it by its very name.
    torch = next(pin for pin in pins if pin.startswith("torch==")).replace("==", "===")
    subprocess.run([*pip, torch], check=True)
    needed_to_build = ("wheel", "packaging", "ninja", "numpy", "psutil", "py-cpuinfo")
    subprocess.run([*pip, *needed_to_build], check=True)
    version = _told(folder / "bin" / "python")[0]
    headers = [f"{name}~={version}.0" for name in CUDA_HEADERS]
    rest = [pin for pin in pins if not pin.startswith("torch==")]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    subprocess.run([*pip, "--no-build-isolation", *headers, *rest], check=True, env=env)
    print(f"export {PYTHON}={folder.resolve() / 'bin' / 'python'}")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument("folder", type=Path)
    run = commands.add_parser("run")
    run.add_argument("--cards", type=int, default=1)
    run.add_argument("--gib", type=float, help="memory of each card")
    run.add_argument("line", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words)
    if asked.command == "make":
        make(asked.folder)
        return 0
    if reason := absent():
        parser.error(reason)
    card = dataclasses.replace(H100, bytes=int(asked.gib * 2**30)) if asked.gib else H100
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        line = asked.line[1:] if asked.line[:1] == ["--"] else asked.line
        env = {**os.environ, **environment([card] * asked.cards, Path(folder))}
        return subprocess.run(line, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
