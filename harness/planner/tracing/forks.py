"""Functions run in parallel forks of this process.
Each fork has its own process groups and patches, which are global to a process. It starts with the
imports and cached operations of this process, which include those of earlier forks."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from harness.planner.tracing.op_cache import known, learn, learned
from harness.system.capability import imported, load
from harness.system.process import die_with_parent

Function = Callable[[], dict[str, Any]]
KILLED = "the system may do so when host memory is full: predict fewer recipes at once"
CHUNK = 2**20


class Ended(NamedTuple):
    """Result of a function: its ``index`` and the returned JSON data."""

    index: int
    made: dict[str, Any]


@dataclass
class _Fork:
    index: int
    pid: int
    began: float
    text: bytes = b""

    def end(self, limit: float) -> Ended:
        """Wait for the fork and return its result; kill it if it is over the limit."""
        late = time.monotonic() - self.began >= limit
        if late:
            os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if late:
            return Ended(self.index, {"why": f"not done after {limit:g} s"})
        if not self.text.endswith(b"\n"):
            why = f"exit code {code}" if code >= 0 else f"{signal.Signals(-code).name}; {KILLED}"
            return Ended(self.index, {"why": f"a trace of the model ended early ({why})"})
        made, modules, answers = json.loads(self.text)
        learn(answers)
        load(modules)
        return Ended(self.index, made)


def in_forks(functions: Sequence[Function], jobs: int, limit: float) -> Iterator[Ended]:
    """Yield the result of each function when it ends; ``jobs`` run at a time.
    The result of a fork that died, or took longer than ``limit`` seconds, has the reason in
    ``why``. A function must return its errors as data, because an exception ends its fork without a
    result."""
    waiting, ended = list(enumerate(functions)), []
    with selectors.DefaultSelector() as running:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < jobs:
                index, function = waiting.pop(0)
                pipe, fork = _start(index, function)
                running.register(pipe, selectors.EVENT_READ, fork)
            yield from ended  # the caller processes these while other forks run
            ended, heard = [], {key.fd for key, _ in running.select(timeout=1)}
            for key in list(running.get_map().values()):
                fork, chunk = key.data, os.read(key.fd, CHUNK) if key.fd in heard else None
                fork.text += chunk or b""
                if chunk == b"" or time.monotonic() - fork.began >= limit:
                    running.unregister(key.fd)
                    os.close(key.fd)
                    ended.append(fork.end(limit))
    yield from ended


def _start(index: int, function: Function) -> tuple[int, _Fork]:
    """Start a fork that writes the result of ``function`` as one line into a pipe."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return out, _Fork(index, pid, time.monotonic())
    code = 1
    try:
        die_with_parent()
        # A fork makes a new torch thread pool at the first use. If autograd's threads use it at
        # the same time, one of them finds none ("Invalid thread pool!",
        # caffe2/utils/threadpool/pthreadpool-cpp.cc). So this thread uses it first.
        torch.set_num_threads(torch.get_num_threads())
        os.close(out)
        before, answers = set(sys.modules), known()
        with os.fdopen(into, "w") as pipe:
            pipe.write(json.dumps([function(), imported(before), learned(answers)]) + "\n")
        code = 0
    finally:
        os._exit(code)
