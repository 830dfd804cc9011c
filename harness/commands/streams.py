"""Standard output that may close, fill up or know ASCII alone, and signals that end a command."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any


class Lasting:
    """A stream that takes what is written for as long as it can, and then nothing: what runs must
    not end because nobody reads of it. ``lost`` is why it ended; ``warns`` says it on stderr."""

    def __init__(self, stream: Any, *, warns: bool = False) -> None:
        self.stream, self.warns = stream, warns
        self.lost: Exception | None = None

    def write(self, text: str) -> int:
        """As a text stream's."""
        if self.lost is None:
            try:
                self.stream.write(text)
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """As a stream's."""
        if self.lost is None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    @property
    def failed(self) -> str:
        """Why not all was written; empty where it was, or where its reader had seen enough."""
        if self.lost is None or getattr(self.lost, "errno", None) == errno.EPIPE:
            return ""
        return getattr(self.lost, "strerror", None) or str(self.lost)

    def _lose(self, error: Exception) -> None:
        self.lost = error
        with contextlib.suppress(OSError, ValueError, AttributeError):
            # What is still in its buffer goes nowhere, instead of failing at the exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        if self.warns:
            why = getattr(error, "strerror", None) or str(error)
            said = f"standard output ended ({why}): what runs goes on, and its results are kept"
            print(said, file=sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def lasting_streams(*, warns: bool) -> Iterator[Lasting]:
    """stdout and stderr as such streams; characters that their encoding lacks are written as
    escapes. Yields stdout's."""
    before = sys.stdout, sys.stderr
    for stream in before:
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout, sys.stderr = Lasting(before[0], warns=warns), Lasting(before[1])
    try:
        yield sys.stdout
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


def open_descriptors() -> None:
    """Give a process that was started with closed standard streams (``>&-``) empty ones: else the
    next file to be opened would take their place, and what is printed would go into it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(number), mode))


class Ending:
    """Makes SIGTERM and SIGHUP end a command as Ctrl-C does, once: a closed terminal and a
    scheduler send several, and the second must not cut the report short that the first asked for.

    One that is ignored stays so: nohup means it.
    """

    NUMBERS = (signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.begun = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Ending:
        for number in self.NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError):  # only a main thread may
                    self.before[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _came(self, number: int, frame: Any) -> None:
        if not self.begun:
            self.begun = True
            raise KeyboardInterrupt(signal.Signals(number).name)
