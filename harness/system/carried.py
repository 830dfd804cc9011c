"""Packages that were carried to a machine without network access, for a Python that lacks them.

    python -m harness.system.carried FOLDER

unpacks, once, those wheels in FOLDER whose packages this Python does not have, and prints the
folder to put on PYTHONPATH (with a ``bin`` for PATH); nothing where it has all. Nothing is
installed, and a package that the Python has is hidden only where it is too old for another of the
wheels. Standard library only:
``run.sh`` asks before anything else is there. ``harness.system.packing`` makes such folders.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

__all__ = ["fits", "lacking", "main", "name_of", "needs", "unpack"]

NEED = re.compile(r"Requires-Dist: ([\w.-]+)[^;]*>=\s*([\w.]+)")
SCRIPT = b"#!python"
"""What the first line of a script in a wheel begins with, in the place of an interpreter."""


def name_of(wheel: Path) -> str:
    """The package that a wheel is of."""
    return wheel.name.partition("-")[0]


def fits(wheel: Path, version: tuple[int, int]) -> bool:
    """Whether a wheel is for that Python, by the tags in its name (packaging.python.org, Platform
    compatibility tags)."""
    pythons, abis, _ = wheel.stem.rsplit("-", 3)[1:]
    major, minor = version
    for tag in pythons.split("."):
        kind, digits = tag[:2], tag[2:]
        if kind == "py" and digits[:1] == str(major):
            return True
        since = int(digits[1:] or 0) if digits[1:].isdigit() or not digits[1:] else -1
        stable = "abi3" in abis.split(".") and since <= minor
        if kind == "cp" and digits[:1] == str(major) and (since == minor or stable):
            return True
    return False


def lacking(folder: Path) -> list[Path]:
    """The wheels of packages that this Python does not have, or has older than another of them
    asks for."""
    wheels = sorted(folder.glob("*.whl"))
    least: dict[str, tuple[int, ...]] = {}
    for name, version in (need for wheel in wheels for need in needs(wheel)):
        least[name] = max(version, least.get(name, ()))
    found = {wheel: _installed(name_of(wheel)) for wheel in wheels}
    return [w for w, v in found.items() if v is None or v < least.get(_plain(name_of(w)), ())]


def needs(wheel: Path) -> list[tuple[str, tuple[int, ...]]]:
    """What a wheel asks for: package, and the version from which on."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode("utf-8", errors="replace").splitlines()
    asked = (NEED.match(line) for line in lines if "extra ==" not in line)
    return [(_plain(need[1]), _version(need[2])) for need in asked if need]


def _installed(name: str) -> tuple[int, ...] | None:
    try:
        return _version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _version(text: str) -> tuple[int, ...]:
    """Its numbers, as far as they go: 2.1 of 2.1rc1."""
    numbers = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def unpack(wheels: Sequence[Path], target: Path) -> None:
    """All of ``wheels`` into the new folder ``target``: packages, and scripts in its ``bin``."""
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}."))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith("/"):
                    _place(archive.read(name), part, Path(name))
    try:
        part.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(part)


def _place(content: bytes, root: Path, name: Path) -> None:
    """A wheel's file where an installer would put it: NAME.data has a folder for each kind."""
    path, script = root / name, False
    if name.parts[0].endswith(".data"):
        kind, rest = name.parts[1], Path(*name.parts[2:])
        script = kind == "scripts"
        path = root / "bin" / rest if script else root / rest
    path.parent.mkdir(parents=True, exist_ok=True)
    if script and content.startswith(SCRIPT):
        content = b"#!" + sys.executable.encode() + content[len(SCRIPT) :]
    path.write_bytes(content)
    if script:
        path.chmod(0o755)


def main(argv: Sequence[str]) -> int:
    """Print the folder; 2 with a line on stderr where the wheels are of no use here."""
    folder = Path(argv[0]).absolute()
    here = ".".join(map(str, sys.version_info[:2]))
    if not any(folder.glob("*.whl")):
        return _bad(f"{folder} has no wheels; ./run.sh pack makes such a folder")
    wheels = lacking(folder)
    other = [wheel.name for wheel in wheels if not fits(wheel, sys.version_info[:2])]
    if other:
        told = f"{folder} is for another Python than {here} ({other[0]})"
        return _bad(f"{told}; pack it with --python {here}")
    if wheels:
        print(_unpacked(folder, wheels))
    return 0


def _unpacked(folder: Path, wheels: Sequence[Path]) -> Path:
    """Where they lie unpacked; beside them, or below the folder for temporary files."""
    facts = [
        sys.executable,
        *(f"{w.name} {w.stat().st_size} {w.stat().st_mtime_ns}" for w in wheels),
    ]
    mark = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]
    root = folder if os.access(folder, os.W_OK) else Path(tempfile.gettempdir())
    target = root / f"unpacked-{mark}"
    if not target.exists():
        unpack(wheels, target)
    return target


def _bad(told: str) -> int:
    print(f"headroom: {told}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
