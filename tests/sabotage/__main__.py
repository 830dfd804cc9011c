"""Single-line faults that the tests must see: ``python -m tests.sabotage [WORD ...]``.

``lines.yaml`` has one fault an entry: a file, its line, what the line becomes, and the tests that
should fail then. Each fault is applied to a copy of the repository, whose tests run. The command
prints the faults that survive, and exits with 1 if there is one. With words, only faults whose file
or line has one of them are tried. Faults of a run's training are in ``tests.sabotage`` itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("lines.yaml")
LONGEST = 600.0
"""Seconds after which tests under a fault count as failed: a fault may be an endless loop."""


@dataclass(frozen=True)
class Fault:
    """One line of ``file``, what it ``becomes``, and the ``tests`` (paths) that should fail."""

    file: str
    line: str
    becomes: str
    tests: str


def faults(words: Sequence[str] = ()) -> list[Fault]:
    """Return the listed faults whose file or line has one of the words; all without words.

    Raises:
        ValueError: a line is not in its file just once.
    """
    found = [Fault(**one) for one in yaml.safe_load(LIST.read_text())]
    for one in found:
        count = (ROOT / one.file).read_text().count(one.line)
        if count != 1 or one.line == one.becomes:
            raise ValueError(f"{LIST.name}: {one.file} has {one.line!r} {count} times, not once")
    return [one for one in found if not words or any(w in one.file + one.line for w in words)]


def survives(fault: Fault, copy: Path) -> bool:
    """Return True if the fault's tests pass in a copy of the repository that has it."""
    changed = copy / fault.file
    whole = changed.read_text()
    changed.write_text(whole.replace(fault.line, fault.becomes))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *fault.tests.split()],
            cwd=copy, capture_output=True, text=True, timeout=LONGEST,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    finally:
        changed.write_text(whole)
    # 1: a test failed. 2 and 4: nothing could be collected, which says nothing about the fault.
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{fault.tests}: pytest exits with {done.returncode}\n{done.stdout}")
    return done.returncode == 0


def copied(folder: Path) -> Path:
    """Return a copy of the repository's tracked files as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main(words: Sequence[str]) -> int:
    """Try the faults; return 1 if one survives."""
    chosen, alive = faults(words), []
    with tempfile.TemporaryDirectory(prefix="sabotage-") as made:
        copy = copied(Path(made))
        for number, fault in enumerate(chosen, 1):
            lives = survives(fault, copy)
            alive += [fault] if lives else []
            word = "SURVIVES" if lives else "seen"
            print(f"[{number}/{len(chosen)}] {word}: {fault.file}: {fault.becomes}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} faults are seen")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
