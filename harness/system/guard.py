"""Guard of a run: starts its command, adopts its orphans, and ends and cleans what is left.

Linux gives a guard every orphan among its descendants (PR_SET_CHILD_SUBREAPER), so no process
leaves the tree, not even a daemon that forked twice with an empty environment. When the harness
closes the pipe, or is killed, the guard ends the tree and removes its files.

Messages are JSON, one per line. The guard reads a request with ``argv``, ``cwd``, ``env`` and
``scratch`` (folders to remove), and then ``files`` that the tree holds. It answers ``code``, the
command's exit code, or ``error``: why the command cannot start.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.system.tree import Tree

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = tuple(  # Windows has no SIGHUP
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
GRACE_SECONDS = 2.0


def _start(request: dict[str, Any], log: int) -> subprocess.Popen[bytes]:
    """Start the command with its output in ``log``; it gets SIGTERM if this guard dies."""
    guard = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: no library may load after it

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)

    return subprocess.Popen(
        request["argv"],
        cwd=request["cwd"],
        env=request["env"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=bind,
    )


def _answer(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _watch(child: int, woken: int, files: set[str]) -> None:
    """Reap processes and read names of ``files`` until the harness closes the pipe or is gone."""
    text = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 512)
            with contextlib.suppress(ChildProcessError):
                # All ended processes, orphans among them.
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == child:
                        _answer(code=os.waitstatus_to_exitcode(ended[1]))
        if 0 in ready:
            part = os.read(0, 1 << 16)
            if not part:
                return
            *lines, text = (text + part).split(b"\n")
            for line in lines:
                files.update(json.loads(line)["files"])


def main(log: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *SIGNALS):
        # A handler that does nothing: the harness decides. Unlike SIG_IGN no child inherits it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # Unbuffered: what follows the request is read from the descriptor.
    with open(0, "rb", buffering=0, closefd=False) as requests:
        request = json.loads(requests.readline())
    # A folder that was there before is not this run's.
    scratch = [Path(name) for name in request["scratch"] if not os.path.lexists(name)]
    tree = Tree(os.getpid())
    try:
        child = _start(request, log)
    except OSError as error:
        name = os.fspath(error.filename or request["argv"][0])
        return _answer(error=[error.errno, error.strerror, name])
    _watch(child.pid, woken, tree.files)
    tree.stop(GRACE_SECONDS)
    tree.remove_files(scratch)


if __name__ == "__main__":
    main(int(sys.argv[1]))
