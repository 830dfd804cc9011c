"""Commands in one process that lacks what other systems lack: python light.py < COMMANDS > ENDS.

A command is a line of words; its end is [exit code, stdout, stderr]. Blocked are modules and
functions of Unix alone, and files of Linux, for all but psutil, which has a part for each system.
"""

from __future__ import annotations

import asyncio  # noqa: F401 (of the standard library, which has a part for each system)
import contextlib
import io
import json
import os
import shlex
import signal
import sys

import psutil

UNIX = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty")
FUNCTIONS = (
    *("fork", "forkpty", "getuid", "geteuid", "sched_getaffinity", "killpg", "getpgid", "setsid"),
    *("sysconf", "getloadavg", "statvfs", "O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY"),
)
SIGNALS = ("SIGKILL", "SIGHUP", "SIGCHLD", "SIGALRM")
FREE = type("Usage", (), {"total": 2**40, "used": 0, "free": 2**40})


def block() -> None:
    import shutil

    for name in UNIX:
        sys.modules[name] = None  # an import of it fails
    for name in FUNCTIONS:
        delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    shutil.disk_usage = lambda path: FREE  # of statvfs here, of another call on Windows
    sys.addaudithook(refuse)


def refuse(event: str, given: tuple[object, ...]) -> None:
    path = given[0] if event == "open" else ""
    if not isinstance(path, str) or not path.startswith(("/proc", "/sys/")):
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(os.path.dirname(psutil.__file__)):
            return
        frame = frame.f_back
    raise FileNotFoundError(path)


def ended(line: str) -> list[object]:
    from harness.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(line))
        except SystemExit as stop:
            code = stop.code
    return [code or 0, out.getvalue(), err.getvalue()]


if __name__ == "__main__":
    lines = sys.stdin.read().splitlines()
    block()
    ends = {line: ended(line) for line in lines}
    heavy = [name for name in ("torch", "numpy", "accelerate") if name in sys.modules]
    json.dump({"ends": ends, "heavy": heavy}, sys.stdout)
