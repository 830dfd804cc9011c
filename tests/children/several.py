"""The real worker for many runs in one start: ``--several ANSWERS``.

Started by accelerate instead of ``harness.train``, it is asked by lines on stdin, of JSON, and
answers each by a line in ANSWERS, a named pipe; it ends with its stdin. Each rank of each case is a
fork of its own, for process groups and patches are global to a process; what one case imports is
there for the next. Cases have launch files and numbers of processes of their own: what accelerate
makes of a command, its own launcher says, run up to where it would start processes.

A case has a ``line``, the words of its command from ``launch`` on, and ``env``, what the harness
adds to the shell's variables; the ``module`` that runs, with its ``words`` (``foreign`` where they
are no worker's, with the ``modules`` that its ranks import); folders to ``copy`` first (from, to);
and whether ``resident`` marks are to follow live tensors, for which each step faults all its pages
in again. A case without them takes fewer steps: nothing is done for its marks and its clock. The
answer comes when all its ranks have ended.

Other programs run in forks as well, where ``program`` names a module: its ``words``, the whole
``env``, and files to ``open`` (``log``, where what it prints goes; any other stands in the words,
and is given by the number of its descriptor). The answer is its process, for whose exit code
``wait`` asks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import runpy
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported

import torch
from accelerate.commands import launch
from torch.distributed import run as torchrun

from harness import train
from harness.data import datasets
from harness.launch.command import free_port, inherited
from harness.resolve import Resolved, resolve
from harness.spec import from_arguments
from harness.system.capability import imported, load
from harness.worker import environment, passes, samples, setup

COMMON = ("torch._dynamo", "torch.utils.checkpoint", "torch.distributed.nn")
"""What a first optimizer or a first checkpoint would import in every fork."""

FAULT = -1000

GRACE_SECONDS = 20.0
"""For the other ranks, once one has failed."""


class Started(Exception):
    """Raised where accelerate would start processes: their number, and their variables."""


def resolved(words: list[str]) -> Resolved:
    """What a worker with these words is asked for."""
    own = words[: words.index("--several")] if "--several" in words else words
    return resolve(from_arguments(train.parse_options(own)))


def prepare(asked: Resolved) -> None:
    """What every rank would find out by itself: libraries on its way, and what a survey of its
    model tells."""
    names = [name for need in asked.needs for name in setup.LIBRARIES.get(need, ())]
    import_for([*names, *asked.launch.engine.modules])
    with contextlib.suppress(Exception):  # said by the case itself
        asked.subject.idle  # noqa: B018 (a survey, which its module keeps)
        asked.flops_per_step  # noqa: B018 (the same)


def import_for(modules: Iterable[str]) -> None:
    """Import what ranks would, and build what DeepSpeed's would."""
    load([*COMMON, *modules])
    if "deepspeed" in sys.modules:
        build_for_deepspeed()


@functools.cache
def build_for_deepspeed() -> None:
    """What DeepSpeed asks a compiler for as it starts in a process on CPUs, some fifty times, the
    ranks waiting for one another; a fork has the answers."""
    from deepspeed.comm.torch import build_shm_op

    with contextlib.suppress(Exception):  # said by the case itself
        build_shm_op()


def launched_by(line: list[str], env: dict[str, str]) -> tuple[int, dict[str, str]]:
    """How many processes ``accelerate`` starts for this command, 0 for one without ranks, and with
    which variables."""
    popen = launch.subprocess.Popen

    def start_one(words: Any, *given: Any, **more: Any) -> Any:
        if words[0] == sys.executable:
            raise Started(0, dict(more["env"]))
        return popen(words, *given, **more)

    def start(args: Any) -> None:
        raise Started(int(args.nproc_per_node), dict(os.environ))

    args = launch.launch_command_parser().parse_args(line[1:])
    with (
        mock.patch.dict(os.environ, inherited() | env, clear=True),
        mock.patch.object(torchrun, "run", start),
        mock.patch.object(launch.subprocess, "Popen", start_one),
    ):
        try:
            launch.launch_command(args)
        except Started as started:
            return started.args
    raise AssertionError(f"accelerate starts nothing for {line}")


def variables(case: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Those of each rank, as torchrun gives them."""
    ranks, common = launched_by(case["line"], case["env"])
    if not ranks:
        yield common
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"}
    for rank in range(ranks):
        own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        yield common | own | dict.fromkeys(names, str(ranks)) | group | meeting


def run(case: dict[str, Any], env: dict[str, str]) -> None:
    """One rank of a case, in the process that is to end with it."""
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if not case["resident"]:
        samples.keep_freed()
        setup.rehearse = lambda *given: None  # before the mark that nobody looks at
        passes.SETTLING = 1  # before the clock that nobody looks at
    sys.argv[1:] = case["words"]
    runpy.run_module(case["module"], run_name="__main__", alter_sys=True)


def in_fork(begin: Callable[[], None], told: IO[str] | None) -> None:
    """Begin, write what it imported to ``told``, and end."""
    before, code = set(sys.modules), 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        begin()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if told is not None:
            told.write("\n".join(imported(before)))
            told.flush()
        os._exit(code)


def whole(case: dict[str, Any]) -> list[str]:
    """All ranks of a case, to their end; what the first of them imported."""
    for source, target in case["copy"]:
        shutil.copytree(source, target)
    children: list[int] = []
    with tempfile.TemporaryFile("w+") as told:
        for env in variables(case):
            child = os.fork()
            if not child:
                in_fork(lambda env=env: run(case, env), None if children else told)
            children.append(child)
        wait_for(set(children))
        told.seek(0)
        return told.read().split()


def wait_for(children: set[int]) -> None:
    """To their end; as torchrun does, what is left some time after one has failed is killed."""
    limit = math.inf
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        children.discard(child)
        if status:
            limit = min(limit, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > limit:
            for late in children:
                os.kill(late, signal.SIGKILL)
        if not child:
            time.sleep(0.02)


def program(asked: dict[str, Any], files: dict[str, int]) -> None:
    """Another module's, in the process that is to end with it."""
    samples.keep_freed()  # by the variables of the start
    os.environ.clear()
    os.environ.update(asked["env"])
    os.dup2(files["log"], 1)
    os.dup2(files["log"], 2)
    torch.set_num_threads(1)  # as in harness.planner.tracing.forks
    sys.argv[1:] = [str(files.get(word, word)) for word in asked["words"]]
    runpy.run_module(asked["program"], run_name="__main__", alter_sys=True)


def as_it_is(path: str) -> int:
    """A descriptor of ``path``; of another process's, to read or to write, as that is."""
    fd = Path(path)
    read = fd.is_symlink() and not os.lstat(fd).st_mode & stat.S_IWUSR
    return os.open(path, os.O_RDONLY if read else os.O_WRONLY)


class Programs:
    """Those that were started and not waited for: process -> what it imported."""

    def __init__(self) -> None:
        self.told: dict[int, IO[str]] = {}

    def start(self, asked: dict[str, Any]) -> int:
        """The process of a program that begins; its files are open by then."""
        files = {name: as_it_is(path) for name, path in asked["open"].items()}
        told = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when it was waited for)
        child = os.fork()
        if not child:
            in_fork(lambda: program(asked, files), told)
        self.told[child] = told
        for file in files.values():
            os.close(file)
        return child

    def wait(self, child: int) -> int:
        """The exit code of a program, negative where a signal ended it."""
        _, status = os.waitpid(child, 0)
        with self.told.pop(child) as told:
            told.seek(0)
            load(told.read().split())
        return os.waitstatus_to_exitcode(status)


def answer(asked: dict[str, Any], programs: Programs) -> int:
    """Of one line; where it cannot be done, ``FAULT``."""
    try:
        if "program" in asked:
            return programs.start(asked)
        if "wait" in asked:
            return programs.wait(asked["wait"])
        if asked.get("foreign"):
            import_for(asked.get("modules", ()))
        else:
            prepare(resolved(asked["words"]))
        load(whole(asked))
        return 0
    except Exception:
        traceback.print_exc()
        return FAULT


def main(answers: Path) -> None:
    programs = Programs()
    datasets._digits = functools.cache(datasets._digits)
    datasets._digits()  # forks have them
    here = environment.describe(torch.device("cpu"))
    environment.describe = lambda _: here
    with answers.open("w", buffering=1) as out:
        for line in sys.stdin:
            print(answer(json.loads(line), programs), file=out)


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("--several") + 1]))
