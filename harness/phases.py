"""The phases of a run and of its peaks: the one list of each, which all others derive from.

A run goes through ``RUN_PHASES``: a rank writes which one it is in (``harness.worker.status``), and
a result says in which one it ended. A meter keeps a peak for each of ``PEAK_PHASES``, which cut the
steps more finely. The phases of one optimizer step are ``strategies.engine.STEP_PHASES``.
"""

from __future__ import annotations

from strategies.engine import STEP_PHASES

__all__ = ["PEAK_PHASES", "RUN_PHASES", "SETUP_PEAKS", "SETUP_PHASES"]

RUN_PHASES = {
    "start": "starting",
    "load": "building the model",
    "prepare": "preparing",
    "warmup": "warm-up",
    "memory": "reading memory",
    "settle": "settling",
    "measure": "measuring",
    "profile": "profile",
    "anatomy": "tracing memory",
    "evidence": "evidence",
    "save": "save",
    "done": "ending",
}
"""Phase, in the order in which a run goes through them -> what progress calls it. Memory is read in
steps of its own and time in others: between them a process on CPUs gets another heap, and the
steps of ``settle`` fill it (``harness.worker.measuring.passes``)."""
SETUP_PHASES = tuple(RUN_PHASES)[: list(RUN_PHASES).index("warmup")]
"""Before the first step."""
SETUP_PEAKS = ("load", "prepare")
"""Those of ``PEAK_PHASES`` before the first step."""
PEAK_PHASES = (*SETUP_PEAKS, "first_step", "warmup", *STEP_PHASES, "steady")
"""Phases with a peak of their own. The warm-up after its first step and ``steady`` (the step after
it, which is like the timed ones) are whole steps; those of ``STEP_PHASES`` are of one more step.
None of them is timed."""
