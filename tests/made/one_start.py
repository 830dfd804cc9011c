"""One process for all launched runs and predictions of a session of tests: it forks for each.

A start by accelerate imports torch, DeepSpeed and the library of models, some ten seconds of a
core. What runs in the forks is the real worker, with the words, variables and launch files that it
has otherwise: what accelerate makes of a command, its own launcher says, run up to where it would
start processes. Each rank is a fork of its own, for process groups and patches are global to a
process; what one imports is there for the next. That the harness starts ranks so is for the tests
of launching to see.
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
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from harness import ROOT
from harness.launch.command import free_port, inherited
from harness.planner import pool
from harness.planner.export import settled
from harness.system.capability import imported, load

COMMON = ("torch._dynamo", "torch.utils.checkpoint", "torch.distributed.nn")
"""What a first optimizer or a first checkpoint would import in every fork."""
FAULT = -1000
GRACE_SECONDS = 20.0
"""For the other ranks, once one has failed."""
POPEN, EXECUTABLE = subprocess.Popen, sys.executable


# ---- the side of the tests ----


class Start:
    """The process that forks."""

    def __init__(self, env: dict[str, str]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words, fd = [EXECUTABLE, "-m", __name__], theirs.fileno()
            more = {"start_new_session": True}  # so that all of it can be ended
            self.process = POPEN([*words, str(fd)], cwd=ROOT, env=env, pass_fds=[fd], **more)

    def ask(
        self, asked: dict[str, Any], log: int, seconds: float, files: Iterable[int] = ()
    ) -> int:
        """The answer to one request; what it prints goes to the descriptor ``log``.

        Raises:
            RuntimeError: there is none within ``seconds``, or ever. All processes are ended.
        """
        told = b""
        with contextlib.suppress(OSError):
            self.socket.settimeout(seconds)
            socket.send_fds(self.socket, [json.dumps(asked).encode()], [log, *files])
            told = self.socket.recv(64)
        if not told:
            self.close()
            raise RuntimeError("the start gives no answer")
        return int(told)

    def case(self, asked: dict[str, Any], log: Path, seconds: float) -> None:
        """A command's ranks, to their end: its ``line``, the words from ``launch`` on; ``env``,
        what the harness adds to the shell's variables; the ``module`` that runs, with its ``words``
        (``foreign`` where they are no worker's, with the ``modules`` that its ranks import);
        folders to ``copy`` first (from, to); and whether ``resident`` marks are to follow live
        tensors, for which each step faults all its pages in again. Without them it takes fewer
        steps: nothing is done for its marks and its clock."""
        with log.open("ab") as stream:
            self.ask(asked, stream.fileno(), seconds)

    def close(self) -> None:
        """End it, and all that it forked."""
        self.socket.close()  # at which it ends by itself
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Program:
    """A program in a fork of ``start``, as ``subprocess.Popen`` is of a process; of its words those
    in ``files`` are numbers of descriptors."""

    def __init__(
        self, start: Start, words: Sequence[str], env: dict[str, str], log: int, files: Any = ()
    ) -> None:
        self.start, self.code = start, None
        asked = {"program": words[0], "words": [*words[1:]], "env": env}
        asked["files"] = [str(file) for file in files]
        self.pid = start.ask(asked, log, 120, files)
        assert self.pid > 0

    def wait(self) -> int:
        if self.code is None:
            self.code = self.start.ask({"wait": self.pid}, 2, 600)
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)


STARTED: list[Start] = []


def running(begin: Callable[[], Start]) -> Start:
    """The one of this process, which ends with ``predictions_in_forks``; begun anew where it was
    lost."""
    if not STARTED or STARTED[-1].process.poll() is not None:
        STARTED.append(begin())
    return STARTED[-1]


@contextlib.contextmanager
def predictions_in_forks(begin: Callable[[], Start]) -> Iterator[None]:
    """Predictions are made by the worker of ``harness.planner.pool``, in a fork of the start,
    and an export's sizes counted in one; by a process of its own where a test has changed what
    would be started."""

    def changed(words: Sequence[str]) -> bool:
        return words[:2] != [EXECUTABLE, "-m"] or subprocess.Popen is not POPEN

    def started(words: Sequence[str], **how: Any) -> Any:
        if changed(words):
            return subprocess.Popen(words, **how)
        log, files = how["stderr"].fileno(), how["pass_fds"]
        return Program(running(begin), words[2:], how["env"], log, files)

    def ended(words: Sequence[str], **how: Any) -> Any:
        if changed(words):
            return subprocess.run(words, **how)
        with tempfile.TemporaryFile("w+") as log:
            code = Program(running(begin), words[2:], how["env"], log.fileno()).wait()
            log.seek(0)
            said = log.read()
        # Warnings are in the same file.
        text = "".join(line for line in said.splitlines(True) if line.startswith("{"))
        return subprocess.CompletedProcess(words, code, text, said)

    beside = SimpleNamespace(**vars(subprocess) | {"Popen": started})
    at_once = SimpleNamespace(**vars(subprocess) | {"run": ended})
    try:
        with (
            mock.patch.object(pool, "subprocess", beside),
            mock.patch.object(settled, "subprocess", at_once),
        ):
            yield
    finally:
        while STARTED:
            STARTED.pop().close()


# ---- the process that forks ----


def prepare(words: list[str]) -> None:
    """What every rank of a worker with these words would find out by itself: libraries on its way,
    and what a survey of its model tells."""
    from harness import train
    from harness.resolve import resolve
    from harness.spec import from_arguments
    from harness.worker import setup

    own = words[: words.index("--several")] if "--several" in words else words
    asked = resolve(from_arguments(train.parse_options(own)))
    names = [name for need in asked.needs for name in setup.LIBRARIES.get(need, ())]
    import_for([*names, *asked.launch.engine.modules])
    with contextlib.suppress(Exception):  # said by the case itself
        asked.subject.survey.idle  # noqa: B018 (a survey, which its module keeps)
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


class Started(Exception):
    """Raised where accelerate would start processes: their number, and their variables."""


def launched_by(line: list[str], env: dict[str, str]) -> tuple[int, dict[str, str]]:
    """How many processes ``accelerate`` starts for this command, 0 for one without ranks, and with
    which variables."""
    from accelerate.commands import launch
    from torch.distributed import run as torchrun

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


def forked(
    module: str, words: list[str], env: dict[str, str], told: IO[str], first: Callable[[], object]
) -> int:
    """The process of a module that runs as the main one, behind ``first``, and writes what it
    imported to ``told``."""
    if child := os.fork():
        return child
    import torch

    before, code = set(sys.modules), 1
    try:
        first()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
        sys.argv[1:] = words
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        told.write("\n".join([*imported(before), ""]))
        told.flush()
        os._exit(code)


def quick() -> None:
    """For a case whose marks nobody looks at."""
    from harness.worker import passes, samples, setup

    samples.keep_freed()
    setup.rehearse = lambda *given: None  # before the marks
    passes.SETTLING = 1  # before the clock


def whole(case: dict[str, Any]) -> None:
    """All ranks of a case, to their end; as torchrun does, what is left some time after one has
    failed is killed."""
    if case.get("foreign"):
        import_for(case.get("modules", ()))
    else:
        prepare(case["words"])
    for source, target in case["copy"]:
        shutil.copytree(source, target)
    first = (lambda: None) if case["resident"] else quick
    limit = math.inf
    with tempfile.TemporaryFile("a+") as told:
        each = [(case["module"], case["words"], env, told, first) for env in variables(case)]
        children = {forked(*one) for one in each}
        while children:
            for child in [*children]:
                ended, status = os.waitpid(child, os.WNOHANG)
                children.discard(ended)
                if status:
                    limit = min(limit, time.monotonic() + GRACE_SECONDS)
                if not ended and time.monotonic() > limit:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.02)
        told.seek(0)
        load(told.read().split())


PROGRAMS: dict[int, IO[str]] = {}
"""Those that were started and not waited for: process -> what it imported."""


def program(asked: dict[str, Any], files: list[int]) -> int:
    """The process of a program that begins; its files are open by then."""
    from harness.worker import samples

    numbers = dict(zip(asked["files"], map(str, files), strict=True))
    words = [numbers.get(word, word) for word in asked["words"]]
    told = tempfile.TemporaryFile("a+")  # noqa: SIM115 (closed when it was waited for)
    child = forked(asked["program"], words, asked["env"], told, samples.keep_freed)
    PROGRAMS[child] = told
    return child


def code_of(child: int) -> int:
    """The exit code of a program, negative where a signal ended it."""
    _, status = os.waitpid(child, 0)
    with PROGRAMS.pop(child) as told:
        told.seek(0)
        load(told.read().split())
    return os.waitstatus_to_exitcode(status)


def answer(asked: dict[str, Any], log: int, files: list[int]) -> int:
    """Of one request; where it cannot be done, ``FAULT``."""
    try:
        if "wait" in asked:
            return code_of(asked["wait"])
        os.dup2(log, 1)
        os.dup2(log, 2)
        if "program" in asked:
            return program(asked, files)
        whole(asked)
        return 0
    except Exception:
        traceback.print_exc()
        return FAULT


def main(asked: socket.socket) -> None:
    import torch

    from harness.data import datasets
    from harness.worker import environment

    os.register_at_fork(after_in_child=asked.close)
    datasets._digits = functools.cache(datasets._digits)
    datasets._digits()  # forks have them
    here = environment.describe(torch.device("cpu"))
    environment.describe = lambda _: here
    while (request := socket.recv_fds(asked, 2**20, 8))[0]:
        text, (log, *files), *_ = request
        asked.send(str(answer(json.loads(text), log, files)).encode())
        for file in (log, *files):
            os.close(file)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
