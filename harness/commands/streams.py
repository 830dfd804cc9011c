"""Robust standard streams, which may be closed, full or ASCII, and signals that end a command."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any


class Lasting:
    """A stream that discards text after its first failed write: a run needs no reader.

    ``lost`` is the error; ``warns`` prints it on stderr.
    """

    def __init__(self, stream: Any, *, warns: bool = False) -> None:
        self.stream, self.warns = stream, warns
        self.lost: Exception | None = None

    def write(self, text: str) -> int:
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    @property
    def failed(self) -> str:
        """Return why text was lost; empty if none was, or if the reader closed the pipe."""
        closed = self.lost is None or getattr(self.lost, "errno", None) == errno.EPIPE
        return "" if closed else getattr(self.lost, "strerror", None) or str(self.lost)

    def _attempt(self, act: Callable[..., Any], *given: str) -> None:
        try:
            if self.lost is None:
                act(*given)
        except (OSError, ValueError) as error:
            self.lost = error
            with contextlib.suppress(OSError, ValueError, AttributeError):
                # Discard the buffer, which would raise again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if self.warns:
                why = getattr(error, "strerror", None) or str(error)
                said = f"standard output was closed ({why}): the run continues, its results are "
                print(f"{said}kept", file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def lasting_streams(*, warns: bool) -> Iterator[Lasting]:
    """Replace stdout and stderr by lasting streams that escape what their encoding lacks."""
    # Closed streams (>&-) get the null device, or the next opened file would take their number.
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(number), mode))
    before: tuple[Any, Any] = (sys.stdout, sys.stderr)
    for stream in before:
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Lasting(before[0], warns=warns), Lasting(before[1])
    try:
        yield sys.stdout
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


class Ending:
    """Context manager: SIGTERM and SIGHUP end a command once, as Ctrl-C does.

    A closed terminal or a scheduler sends several; the second must not cut short the report of the
    first. A signal that is ignored at the start stays ignored, as nohup requires.
    """

    def __init__(self) -> None:
        self.begun = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # not Windows
            if number not in self.before and signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # only the main thread may set handlers
                    self.before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _came(self, number: int, frame: Any) -> None:
        if not self.begun:
            self.begun = True
            raise KeyboardInterrupt(signal.Signals(number).name)
