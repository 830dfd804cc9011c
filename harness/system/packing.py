"""A folder of wheels for a machine without network access that has its own torch.

What Headroom needs beside torch, in the versions that are pinned and, for what these need in turn,
in those of the environment that packs. Large packages are trimmed to what is used: models of
transformers and pipelines of diffusers that nothing here loads, libraries for other CUDA versions.
``harness.system.carried`` unpacks it there.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.system.process import scratch_folder
from strategies.base import BadInput

__all__ = ["Target", "closure", "download", "loaded", "pack", "roots", "trim", "unused"]

PINS, EXTRAS = "dependencies", ("", "recipes", "test")
LEFT_OUT = frozenset({"torch", "ruff", "hf-xet", "scikit-learn"})
"""Not carried: torch is there; ruff is for developers; hf-xet only downloads faster; scikit-learn
and scipy are 40 MiB for the digits alone (``--data synthetic`` needs neither)."""
SOURCE_ONLY = ("deepspeed",)
"""Published as source: built here, without its ops, which compile on their first use there."""
MIB = 2**20
SYSTEMS = (*(f"manylinux_2_{minor}" for minor in range(28, 4, -1)), "manylinux2014", "linux")
"""glibc from 2.28 down, which torch itself is built against; pip takes each tag by its name."""
IMPORTS = (
    "accelerate.utils.deepspeed", "deepspeed", "transformers.integrations.deepspeed",
    "transformers.modeling_utils", "peft", "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.transformers", "torchao.optim", "torchao.float8", "bitsandbytes.optim",
)  # fmt: skip
"""What a run imports: the parts of large packages that these load are kept."""
PARTS = ("transformers.models", "diffusers.pipelines", "diffusers.modular_pipelines")
"""Packages whose sub-packages are kept only if they are loaded."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The machine to pack for. ``torch`` is its version, as ``torch.__version__`` says it: its
    label names the CUDA that it is built for, and without one it is that of PyPI's builds, 13.0."""

    python: str
    torch: str
    machine: str = "x86_64"

    def check(self) -> None:
        """Raises BadInput for what Headroom does not run with."""
        if not re.fullmatch(r"3\.1[0-3]", self.python):
            raise BadInput(f"python is {self.python}; give --python 3.10 to 3.13")
        if not re.fullmatch(r"2\.1[1-3](\.\d+)?(\+\w+)?", self.torch):
            raise BadInput(
                f"torch is {self.torch}; give --torch 2.11.0 to 2.13.0, as torch.__version__ "
                "says it there"
            )

    @property
    def cuda(self) -> str:
        """As libraries spell it in their names: cuda130; cpu where torch is built without."""
        label = self.torch.partition("+")[2] or "cu130"
        return label.replace("cu", "cuda") if re.fullmatch(r"cu\d+", label) else "cpu"

    @property
    def markers(self) -> dict[str, str]:
        """What markers of requirements are judged by."""
        return {"python_version": self.python, "python_full_version": f"{self.python}.0",
                "sys_platform": "linux", "platform_machine": self.machine, "extra": ""}  # fmt: skip


def plain(name: str) -> str:
    """A package's name as indexes normalise it."""
    return re.sub(r"[-_.]+", "-", name).lower()


# ---- what is needed ----


def roots(target: Target) -> dict[str, str]:
    """Package -> version, as ``pyproject.toml`` pins them for that Python, torch's left out."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import pip._vendor.tomli as tomllib
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    more = project["optional-dependencies"]
    lines = [line for extra in EXTRAS for line in (more[extra] if extra else project[PINS])]
    every = map(Requirement, lines)
    asked = [r for r in every if not r.marker or r.marker.evaluate(target.markers)]
    pins = {plain(r.name): next(iter(r.specifier)).version for r in asked}
    return {name: version for name, version in pins.items() if name not in LEFT_OUT}


def closure(
    names: Iterable[str],
    target: Target,
    requires: Callable[[str], Sequence[str] | None],
    without: Iterable[str] = (),
) -> set[str]:
    """``names`` and all that they need there, but for ``without`` and what only that needs.

    ``requires``: package -> its requirements as text; None where the packing environment lacks it.
    """
    from packaging.requirements import Requirement

    found: set[str] = set()
    waiting = [name for name in map(plain, names) if name not in without]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for need in map(Requirement, requires(name) or ()):
            wanted = not need.marker or need.marker.evaluate(target.markers)
            if wanted and plain(need.name) not in without:
                waiting.append(plain(need.name))
    return found


def required(name: str) -> Sequence[str] | None:
    """What the installed package asks for."""
    try:
        return metadata.requires(name)
    except metadata.PackageNotFoundError:
        return None


# ---- fetching and trimming ----


def download(wanted: dict[str, str], target: Target, folder: Path) -> None:
    """Wheels of these packages for ``target`` into ``folder``, by pip and its own settings.

    Raises:
        BadInput: pip could not; its last line.
    """
    tag = "cp" + target.python.replace(".", "")
    words = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    words += ["--python-version", target.python, "--implementation", "cp"]
    words += [word for abi in (tag, "abi3", "none") for word in ("--abi", abi)]
    words += [w for s in SYSTEMS for w in ("--platform", f"{s}_{target.machine}")]
    pins = {n: f"{n}=={v}" if v else n for n, v in wanted.items()}
    _pip([*words, *(pin for name, pin in pins.items() if name not in SOURCE_ONLY)])
    built = [pin for name, pin in pins.items() if name in SOURCE_ONLY]
    for pin in built:
        _pip(["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), pin])


def _pip(words: Sequence[str]) -> None:
    env = {**os.environ, "DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    line = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    if done.returncode:
        last = ([x for x in done.stderr.splitlines() if "ERROR" in x] or ["no reason given"])[-1]
        raise BadInput(f"pip {words[0]} failed: {last[:300]}; see to its index, or leave packages "
                       "out that are there already (--has NAME)")  # fmt: skip


def loaded() -> frozenset[str]:
    """Modules of ``PARTS`` that are in use once everything is imported that a run may import."""
    lines = "\n".join(f"try: import {name}\nexcept Exception: pass" for name in IMPORTS)
    code = f"import sys\n{lines}\nprint(*sys.modules, sep=chr(10))"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    return frozenset(name for name in done.stdout.split() if name.startswith(PARTS))


def unused(file: str, target: Target, keep: frozenset[str]) -> bool:
    """Whether nothing of ours uses that file of a wheel; ``keep``: modules that are loaded."""
    library = re.fullmatch(r"bitsandbytes/libbitsandbytes_(\w+)\.so", file)
    if library:
        return library[1] not in ("cpu", target.cuda)
    module = file.rpartition(".")[0].replace("/", ".")
    for part in PARTS:
        inner = module.removeprefix(f"{part}.")
        package = f"{part}.{inner.partition('.')[0]}"
        if inner != module and "." in inner:
            return package not in keep
    return "/tests/" in file and file.startswith(("numpy/", "joblib/", "networkx/"))


def trim(wheel: Path, drop: Callable[[str], bool]) -> int:
    """Rewrite ``wheel`` without the files that ``drop`` names, its RECORD too; bytes it has now."""
    part = wheel.with_suffix(".part")
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for item in old.infolist():
            if drop(item.filename):
                continue
            content = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                content = _record(content, drop)
            new.writestr(item.filename, content)
    part.replace(wheel)
    return wheel.stat().st_size


def _record(content: bytes, drop: Callable[[str], bool]) -> bytes:
    out = io.StringIO()
    lines = csv.reader(io.StringIO(content.decode()))
    csv.writer(out, lineterminator="\n").writerows(x for x in lines if x and not drop(x[0]))
    return out.getvalue().encode()


# ---- the whole ----


def pack(target: Target, folder: Path, limit: int, has: Sequence[str] = ()) -> dict[str, int]:
    """Fill the new ``folder``: wheel -> bytes, the largest first.

    Args:
        limit: bytes that all of it may have.
        has: packages that are on the machine besides torch and what torch brings.

    Raises:
        BadInput: no such target, a folder that is there, a package that pip does not find, or more
            than ``limit``.
    """
    target.check()
    if folder.exists():
        raise BadInput(f"{folder} is there already; remove it, or give another --out")
    with scratch_folder() as scratch:
        download(wanted(target, has), target, scratch)
        keep = loaded()
        sizes = {w.name: trim(w, lambda f: unused(f, target, keep)) for w in _wheels(scratch)}
        largest = sorted(sizes.items(), key=lambda one: -one[1])
        _check_size(largest, limit)
        shutil.copytree(scratch, folder)
    return dict(largest)


def _check_size(largest: Sequence[tuple[str, int]], limit: int) -> None:
    whole = sum(size for _, size in largest)
    if whole > limit:
        told = ", ".join(f"{name.partition('-')[0]} {size / MIB:.1f}" for name, size in largest[:4])
        raise BadInput(
            f"{whole / MIB:.1f} MiB, more than --limit {limit / MIB:g} (largest: {told}); leave "
            "out what the machine has (--has NAME)"
        )


def wanted(target: Target, has: Sequence[str] = ()) -> dict[str, str]:
    """Package -> version of all that is carried; empty for what pip is to choose."""
    there = closure(["torch"], target, required) | LEFT_OUT | {plain(name) for name in has}
    pins = roots(target)
    names = closure(pins, target, required, without=there)
    return {name: pins.get(name) or _version(name) for name in sorted(names)}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _wheels(folder: Any) -> Iterator[Path]:
    yield from sorted(Path(folder).glob("*.whl"))
