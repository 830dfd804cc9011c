"""Functions in forks of this process, so many at a time: process groups and patches are global to
a process, and what was imported or learned of operations before, here or by an earlier fork, is
there at once."""

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
EARLY = {"why": "a trace of the model ended early"}
CHUNK = 2**20


class Ended(NamedTuple):
    """The ``index`` of a function, what it returned as JSON has it, and seconds."""

    index: int
    made: dict[str, Any]
    seconds: float


@dataclass
class _Fork:
    index: int
    pid: int
    began: float
    text: bytes = b""

    def end(self, limit: float) -> Ended:
        """What came of it; of one that is past its time, that it was ended."""
        seconds = time.monotonic() - self.began
        late = seconds >= limit
        if late:
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        lost = {"why": f"not done after {limit:g} s"} if late else EARLY
        if late or not self.text.endswith(b"\n"):
            return Ended(self.index, lost, seconds)
        made, modules, answers = json.loads(self.text)
        learn(answers)
        load(modules)
        return Ended(self.index, made, seconds)


def in_forks(functions: Sequence[Function], jobs: int, limit: float) -> Iterator[Ended]:
    """What each function returns, as they end, ``jobs`` at a time; ``why`` says what was lost: of a
    fork that died, or that took longer than ``limit`` seconds.

    A function that raises ends its fork: what it is to say of that, it returns.
    """
    waiting, ended = list(enumerate(functions)), []
    with selectors.DefaultSelector() as running:
        while waiting or running.get_map():
            while waiting and len(running.get_map()) < jobs:
                index, function = waiting.pop(0)
                pipe, fork = _start(index, function)
                running.register(pipe, selectors.EVENT_READ, fork)
            yield from ended  # whoever makes something of it does so beside those that run
            ended = [*_ended(running, limit)]
    yield from ended


def _ended(running: selectors.BaseSelector, limit: float) -> Iterator[Ended]:
    """Those that ended, or are past their time, when something was heard or a second has gone."""
    heard = {key.fd for key, _ in running.select(timeout=1)}
    for key in list(running.get_map().values()):
        fork, chunk = key.data, os.read(key.fd, CHUNK) if key.fd in heard else None
        fork.text += chunk or b""
        if chunk == b"" or time.monotonic() - fork.began >= limit:
            running.unregister(key.fd)
            os.close(key.fd)
            yield fork.end(limit)


def _start(index: int, function: Function) -> tuple[int, _Fork]:
    """A fork that writes what ``function`` returns into a pipe, as a line."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return out, _Fork(index, pid, time.monotonic())
    code = 1
    try:
        die_with_parent()
        # A fork makes torch's pool of threads anew at the first call that asks for it. Autograd's
        # threads ask all at once, and one of them then finds no pool ("Invalid thread pool!",
        # caffe2/utils/threadpool/pthreadpool-cpp.cc). So this thread asks first.
        torch.set_num_threads(torch.get_num_threads())
        os.close(out)
        before, answers = set(sys.modules), known()
        with os.fdopen(into, "w") as pipe:
            pipe.write(json.dumps([function(), imported(before), learned(answers)]) + "\n")
        code = 0
    finally:
        os._exit(code)
