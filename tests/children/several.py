"""The real worker for several runs in one start: ``--several CASES.json``.

Started by accelerate instead of ``harness.train``, so that its processes are real ones. Each case
is a fork of its own, for process groups and patches are global to a process; what one imports is
there for the next. Cases may have other launch files than the start: what accelerate
makes of a command, accelerate's own launcher says, run up to where it would start processes.

CASES: a list of ``line``, the words of a case's command from ``launch`` on, and ``env``, what the
harness adds to the shell's variables; the ``module`` that runs, with its ``words``; folders to
``copy`` first (from, to); and the file by which its ranks ``meet``.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported

from accelerate.commands import launch
from torch.distributed import run as torchrun

from harness import train
from harness.launch.command import INHERITED_NAMES, free_port, inherited
from harness.resolve import resolve
from harness.spec import from_arguments
from harness.worker.setup import LIBRARIES
from tests.children.loading import imported, load

COMMON = ("torch._dynamo", "torch.utils.checkpoint", "torch.distributed.nn")
"""What a first optimizer or a first checkpoint would import in every fork."""


class Started(Exception):
    """Raised where accelerate would start processes: their number, and their variables."""


def libraries(words: list[str]) -> set[str]:
    """What a worker with these words would import on its way."""
    resolved = resolve(from_arguments(train.parse_options(words)))
    found = {name for need in resolved.needs for name in LIBRARIES.get(need, ())}
    return found | set(resolved.launch.engine.modules)


def launched_by(line: list[str]) -> tuple[int, dict[str, str]]:
    """How many processes ``accelerate`` starts for this command, and with which variables."""
    popen = launch.subprocess.Popen

    def start_one(words: Any, *given: Any, **more: Any) -> Any:
        if words[0] == sys.executable:
            raise Started(1, dict(more["env"]))
        return popen(words, *given, **more)

    def start(args: Any) -> None:
        raise Started(int(args.nproc_per_node), dict(os.environ))

    args = launch.launch_command_parser().parse_args(line[1:])
    with (
        mock.patch.object(torchrun, "run", start),
        mock.patch.object(launch.subprocess, "Popen", start_one),
    ):
        try:
            launch.launch_command(args)
        except Started as started:
            return started.args
    raise AssertionError(f"accelerate starts nothing for {line}")


def become(case: dict[str, Any]) -> None:
    """Take the variables that a process of this case would be started with."""
    own = {name: os.environ[name] for name in INHERITED_NAMES if name in os.environ}
    own |= {name: v for name, v in os.environ.items() if name.startswith("TORCHELASTIC_")}
    own.pop("DS_ACCELERATOR", None)
    shell = inherited()
    os.environ.clear()
    os.environ.update(shell | case["env"])
    processes, variables = launched_by(case["line"])
    assert processes == int(own.get("WORLD_SIZE", 1)), case["line"]
    # The launcher's own store remembers the ranks of the case before.
    own |= {
        "MASTER_PORT": meeting(Path(case["meet"]), own),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    os.environ.update(variables | own)


def meeting(file: Path, own: dict[str, str]) -> str:
    """A port for the ranks of one case: rank 0 chooses it, the others read it in the file."""
    if own.get("RANK", "0") == "0":
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
    become(case)
    for source, target in case["copy"]:
        copied(Path(source), Path(target))
    sys.argv[1:] = case["words"]
    runpy.run_module(case["module"], run_name="__main__", alter_sys=True)


def main(cases: list[dict[str, Any]]) -> None:
    load(sorted({*COMMON, *set().union(*(libraries(case["words"]) for case in cases))}))
    for case in cases:
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(heard)
            in_fork(case, told)
        os.close(told)
        with os.fdopen(heard) as pipe:
            load(pipe.read().split())
        os.waitpid(child, 0)


def in_fork(case: dict[str, Any], told: int) -> None:
    """Run a case, write to ``told`` what it imported, and end."""
    before = set(sys.modules)
    try:
        run(case)
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with os.fdopen(told, "w") as pipe:
            pipe.write("\n".join(imported(before)))
        os._exit(0)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[sys.argv.index("--several") + 1]).read_text()))
