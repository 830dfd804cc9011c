"""The real worker for several runs in one start: ``--several CASES.json``.

Started by accelerate instead of ``harness.train``, so that its launch file and its variables are
the real ones. Each case is a fork of its own, for process groups and patches are global to a
process; the libraries are imported once for all of them. CASES: a list of ``words`` for the
worker, folders to ``copy`` first (from, to), and the file by which its ranks ``meet``.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from harness import train
from harness.launch.command import free_port
from harness.resolve import resolve
from harness.spec import from_arguments
from harness.worker.setup import LIBRARIES


def libraries(words: list[str]) -> set[str]:
    """What a worker with these words would import on its way."""
    resolved = resolve(from_arguments(train.parse_options(words)))
    found = {name for need in resolved.needs for name in LIBRARIES.get(need, ())}
    return found | set(resolved.launch.engine.modules)


def meeting(file: Path) -> str:
    """A port for the ranks of one case: rank 0 chooses it, the others read it in the file."""
    if os.environ.get("RANK", "0") == "0":
        part = file.with_suffix(".part")
        part.write_text(str(free_port()))
        part.rename(file)
    while not file.exists():
        time.sleep(0.02)
    return file.read_text()


def copied(source: Path, target: Path) -> None:
    """Rank 0 copies a folder, the others wait until all of it is there."""
    if os.environ.get("RANK", "0") == "0":
        part = target.with_name(f"{target.name}.part")
        shutil.copytree(source, part)
        part.rename(target)
    while not target.exists():
        time.sleep(0.02)


def run(case: dict[str, Any]) -> None:
    """One case, in the process that is to end with it."""
    for source, target in case["copy"]:
        copied(Path(source), Path(target))
    # The launcher's own store remembers the ranks of the case before.
    own = {"MASTER_PORT": meeting(Path(case["meet"])), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ.update(own)
    sys.argv[1:] = case["words"]
    runpy.run_module("harness.train", run_name="__main__", alter_sys=True)


def main(cases: list[dict[str, Any]]) -> None:
    for name in sorted(set().union(*(libraries(case["words"]) for case in cases))):
        importlib.import_module(name)
    for case in cases:
        child = os.fork()
        if child == 0:
            try:
                run(case)
            except SystemExit:
                pass
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[sys.argv.index("--several") + 1]).read_text()))
