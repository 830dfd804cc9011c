"""Phases of a run, of its memory peaks and of a plan.

Each rank reports its phase of ``RUN_PHASES``, and a result records the last one. A meter keeps a
peak for each of ``PEAK_PHASES``. A plan counts the step and the requested phases of ``PLANNED``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strategies.base import BadInput
from strategies.engine import STEP_PHASES
from strategies.words import nearest

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
"""Phase, in the order of a run -> its name in the progress line. In the ``settle`` steps between
memory and time a CPU process fills a heap of other settings (``harness.worker.passes``)."""
SETUP_PHASES = tuple(RUN_PHASES)[: list(RUN_PHASES).index("warmup")]
"""Phases before the first step."""
SETUP_PEAKS = ("load", "prepare")
"""Phases of ``PEAK_PHASES`` before the first step."""
PEAK_PHASES = (*SETUP_PEAKS, "first_step", "warmup", *STEP_PHASES, "steady")
"""Phases with a peak of their own, untimed. ``warmup`` (without the first step) and ``steady`` are
whole steps; ``STEP_PHASES`` are those of one further step."""

PLANNED: Mapping[str, tuple[str, ...]] = {
    "load": ("bf16", "fp16", "fp32", "rank0", "card"),
    "encode": ("alone", "loaded", "step", "encoders", "vae", "tiled", "fp32"),
    "step": (),
    "validate": ("encoders", "tiled", "fp32"),
}
"""Phases that a plan counts -> the variants of each (``plan --phases``)."""
EITHER = (("bf16", "fp16", "fp32"), ("alone", "loaded", "step"), ("encoders", "vae"))
"""Variants of one phase that exclude each other."""


def planned(words: str | Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Parse ``load:fp32,validate:tiled+encoders`` into phase -> variants, without the step."""
    text = words if isinstance(words, str) else ",".join(words)
    found: dict[str, tuple[str, ...]] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        phase, _, ways = word.partition(":")
        if phase not in PLANNED:
            raise BadInput(f"phases is {phase!r}; {_hint(phase, PLANNED)}")
        if phase in found:
            raise BadInput(f"phases has {phase} twice; give all its ways at once, as A:B+C")
        asked = list(filter(None, ways.split("+")))
        for way in asked:
            if way not in PLANNED[phase]:
                raise BadInput(f"phases is {phase}:{way}; {_hint(way, PLANNED[phase])}")
        for either in EITHER:
            both = [way for way in asked if way in either]
            if len(set(both)) > 1:
                one = f"give one of {', '.join(both)}"
                raise BadInput(f"phases is {phase}:{'+'.join(both)}; {one}")
        found[phase] = tuple(way for way in PLANNED[phase] if way in asked)
    return {phase: found[phase] for phase in PLANNED if phase in found and phase != "step"}


def planned_text(found: Mapping[str, tuple[str, ...]]) -> str:
    """Return the text that ``planned`` parses into ``found``."""
    return ",".join(f"{phase}:{'+'.join(ways)}".strip(":") for phase, ways in found.items())


def _hint(word: str, known: Iterable[str]) -> str:
    return nearest(word, known) if known else "step has no ways; give step alone"
