"""Reading the output of a launched run: what is noise, and which line tells. Pure functions."""

from __future__ import annotations

import re

__all__ = ["decisive", "first_match", "informative", "tail"]

# Python's tracebacks of the launcher itself bury the worker's; only their last line may tell.
LAUNCHER = re.compile(
    r"^Traceback \(most recent call last\):\n"
    r"  File \"[^\"\n]*(?:bin/accelerate|accelerate/commands/|<frozen runpy>)[^\"\n]*\""
    r".*?accelerate/commands/.*?(?=^\S)",
    re.MULTILINE | re.DOTALL,
)
NOISE = re.compile(
    r"\*{20,}|Setting OMP_NUM_THREADS environment variable|Setting accelerator to CPU"
    r"|FutureWarning|DeprecationWarning|UserWarning|^\s*warnings\.warn|^\s*return func\("
    r"|were not passed to `accelerate launch`|`--num_cpu_threads_per_process`"
    r"|To avoid this warning pass in values|built successfully|^\s*\d+%\|.*\||\|.*it/s"
    r"|Using .* as PyTorch extensions root|ninja: no work to do|Loading extension module"
    r"|Time to load \w+ op|\[INFO\]|^W\d{4} [\d:.]+ \d+ \S+\]\s*$|^-{20,}$|^={20,}$|^\^+$"
)
# Lines that mention a fault that was dealt with.
HARMLESS = re.compile(r"ignoring|retrying|autotun|falling back|will be skipped", re.IGNORECASE)
ERROR = re.compile(
    r"^(?:\[rank\d+\]:?\s*)?(?:[\w.]+(?:Error|Exception|Interrupt|Exit)\b|[\w.]+: error:)"
)
WRAPPER = re.compile(
    r"ChildFailedError|CalledProcessError|SignalException|RendezvousConnectionError"
)


def informative(text: str) -> list[str]:
    """The lines without progress bars, banners, warnings and the launcher's own traceback."""
    text = LAUNCHER.sub("", text.replace("\r\n", "\n"))
    lines = (line.rpartition("\r")[2].rstrip() for line in text.splitlines())
    kept: list[str] = []
    for line in lines:
        if line.strip() and not NOISE.search(line) and (not kept or kept[-1] != line):
            kept.append(line)
    return kept


def tail(text: str, lines: int = 40) -> str:
    """The last informative ``lines``."""
    return "\n".join(informative(text)[-lines:])


def first_match(pattern: re.Pattern[str], text: str) -> str:
    """The first line in which ``pattern`` is found, harmless mentions left out; else empty."""
    for line in text.splitlines():
        if pattern.search(line) and not HARMLESS.search(line):
            return re.sub(r"^\[rank\d+\]:?\s*", "", line.strip())
    return ""


def decisive(text: str) -> str:
    """The last line that names an error, launchers' wrappers last; else the last line."""
    lines = informative(text)
    errors = [line for line in lines if ERROR.search(line)]
    causes = [line for line in errors if not WRAPPER.search(line)]
    chosen = (causes or errors or lines or [""])[-1]
    return re.sub(r"^\[rank\d+\]:?\s*", "", chosen.strip())
