"""The phases of a run and of its peaks: the one list of each, which all others derive from.

A run goes through ``RUN_PHASES``: a rank writes which one it is in (``harness.worker.status``), and
a result says in which one it ended. A meter keeps a peak for each of ``PEAK_PHASES``, which cut the
steps more finely. The phases of one optimizer step are ``strategies.engine.STEP_PHASES``. A plan
counts the step, and those of ``PLANNED`` that it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strategies.base import BadInput
from strategies.engine import STEP_PHASES
from strategies.recipe import nearest

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
steps of ``settle`` fill it (``harness.worker.passes``)."""
SETUP_PHASES = tuple(RUN_PHASES)[: list(RUN_PHASES).index("warmup")]
"""Before the first step."""
SETUP_PEAKS = ("load", "prepare")
"""Those of ``PEAK_PHASES`` before the first step."""
PEAK_PHASES = (*SETUP_PEAKS, "first_step", "warmup", *STEP_PHASES, "steady")
"""Phases with a peak of their own. The warm-up after its first step and ``steady`` (the step after
it, which is like the timed ones) are whole steps; those of ``STEP_PHASES`` are of one more step.
None of them is timed."""

PLANNED: Mapping[str, tuple[str, ...]] = {
    "load": ("bf16", "fp16", "fp32", "rank0", "card"),
    "encode": ("alone", "loaded", "step", "tiled", "fp32"),
    "step": (),
    "validate": ("encoders", "tiled", "fp32"),
}
"""Phases that a plan counts -> the ways in which trainers do each (``plan --phases``)."""
EITHER = (("bf16", "fp16", "fp32"), ("alone", "loaded", "step"))
"""Ways of one phase that exclude each other."""


def planned(words: str | Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Phase -> its ways, in the order of ``PLANNED``, from ``load:fp32,validate:tiled+encoders``;
    empty if only the step is named.

    Raises:
        BadInput: an unknown phase or way, or two that exclude each other.
    """
    told = words if isinstance(words, str) else ",".join(words)
    found: dict[str, tuple[str, ...]] = {}
    for word in filter(None, told.replace(" ", "").split(",")):
        phase, _, ways = word.partition(":")
        if phase not in PLANNED:
            raise BadInput(f"phases is {phase!r}; {_hint(phase, PLANNED)}")
        if phase in found:
            raise BadInput(f"phases names {phase} twice; give all its ways at once, as A:B+C")
        found[phase] = _ways(phase, list(filter(None, ways.split("+"))))
    return {phase: found[phase] for phase in PLANNED if phase in found and phase != "step"}


def planned_text(found: Mapping[str, tuple[str, ...]]) -> str:
    """The text from which ``planned`` reads ``found``."""
    return ",".join(f"{phase}:{'+'.join(ways)}".strip(":") for phase, ways in found.items())


def _ways(phase: str, asked: list[str]) -> tuple[str, ...]:
    for way in asked:
        if way not in PLANNED[phase]:
            raise BadInput(f"phases is {phase}:{way}; {_hint(way, PLANNED[phase])}")
    for either in EITHER:
        both = [way for way in asked if way in either]
        if len(set(both)) > 1:
            raise BadInput(f"phases is {phase}:{'+'.join(both)}; give one of {', '.join(both)}")
    return tuple(way for way in PLANNED[phase] if way in asked)


def _hint(word: str, known: Iterable[str]) -> str:
    return nearest(word, known) if known else "it has no ways; give step alone"
