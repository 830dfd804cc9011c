"""Prediction of a deep model from traces of shallow ones.
Blocks of a group are alike, so the memory of each part of a step, and the work, grow linearly with
their number. Tests compare the result with a full trace (``tests/predict/test_extend.py``)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.memory.record import CATEGORIES, PASSING, Held, Instant, beyond_kinds
from harness.planner.adapters import adapter_of
from harness.planner.overhead import NoTrace
from harness.planner.tracing.extrapolate import Deeper, NotAlike, extrapolate_blocks
from harness.planner.tracing.simulate import pooled, summary, trace_bordered
from harness.planner.tracing.streams import parts, stream_from_data, stream_to_data
from harness.prediction import Prediction, Work
from harness.resolve import Resolved
from harness.system import capability
from harness.worker.setup import LIBRARIES

FEW = 2
"""Blocks per group in the shallow model, and the number added to one group in a deeper one."""
WORTH = 10
"""Fewest blocks of a model that is extended; a shallower one is traced whole."""
FIELDS = ("phase", "kind", "dtype", "group", "stride", "flops", "bytes")
KIND = FIELDS.index("flops")
"""``FIELDS`` identify equal ops; the first ``KIND`` of them are the same for any number of
blocks."""
SAME = 0.01
"""Relative difference allowed between the peaks of ordered allocations and of the extrapolation."""
SHORT = "its reserve is estimated from shallow models, and often too low"
POOL = ("reserved", "reserved_expandable", "least")
Places = Mapping[str, Mapping[str, Any]]
"""Part name -> the fields of its ``streams.Part``."""


def shallow(resolved: Resolved) -> list[tuple[dict[str, int], float]]:
    """Return the depths of each model to trace, and how often its added blocks must be repeated.
    The first is the base, with two blocks per group and 0. Each other one has four in one group.
    Empty if the whole model must be traced, because it is shallow or its blocks are treated
    differently (``by_block``)."""
    depths = resolved.subject.depths
    if sum(depths.values()) < WORTH:
        return []
    base = {key: min(count, FEW) for key, count in depths.items()}
    longer = [key for key, count in depths.items() if count > FEW]
    found = [(base, 0), *(({**base, key: 2 * FEW}, depths[key] / FEW - 1) for key in longer)]
    # The engine and each strategy must treat all blocks of all models alike.
    counts = [resolved.subject.deep(one).depth for one in (depths, *(few for few, _ in found))]
    parts = (adapter_of(resolved.launch.engine), *resolved.recipe.strategies)
    alike = all(len({how for n in counts for how in part.by_block(n)}) == 1 for part in parts)
    return found if alike else []


def pieces(resolved: Resolved, kind: str) -> list[Callable[[], dict[str, Any]]]:
    """Return functions that trace the shallow models; ``joined`` takes their results.
    Each runs in a fork, because process groups and patches are global to a process. Empty if the
    whole model must be traced."""
    return [functools.partial(_traced, resolved, depths, kind) for depths, _ in shallow(resolved)]


def joined(resolved: Resolved, found: Sequence[Mapping[str, Any]]) -> Prediction:
    """Return the prediction of ``resolved`` from the results of its ``pieces``.

    Raises:
        NoTrace: a shallow model could not be traced.
    """
    for traced in found:
        if "why" in traced:
            raise NoTrace(traced["why"])
    asked, plain = shallow(resolved), [traced["prediction"] for traced in found]
    more = [count for _, count in asked[1:]]

    def line(values: Iterable[float]) -> int:
        return max(0, round(_end(list(values), more)))

    places = [traced["parts"] for traced in found]
    peak, steady = (_fullest(places, line, begin) for begin in ("", "2/"))
    base = dict(plain[0])
    held = _held([p["peak"] for p in plain], line)
    base |= {"peak": replace(peak, held=held), "steady": replace(steady, held=held)}
    for name, begin in (("host", ""), ("host_steady", "2/")):
        host_peaks = [p[name] for p in plain]
        fullest = _fullest([traced["host"] for traced in found], line, begin)
        base[name] = replace(fullest, held=_held(host_peaks, line)) if all(host_peaks) else None
    base["phases"] = {name: _peak_of(name, places, plain, line) for name in base["phases"]}
    beyond: dict[str, int] = {}  # phase of a later step -> the most bytes beyond the state
    for name in set(places[0]).intersection(*places[1:]):
        step, phase, _ = name.split("/", 2)
        if step == "2":
            beyond[phase] = max(beyond.get(phase, 0), line(p[name]["beyond"] for p in places))
    base |= {"beyond": beyond}
    base |= {name: line(p[name] for p in plain) for name in ("nvme", "between")}
    if base["denoising"] is not None:
        base["denoising"] = line(p["denoising"] for p in plain)
    base["work"] = _work([p["work"] for p in plain], more)
    passing = [traced["passing"] for traced in found]
    more_passing = line(passing) - passing[0]
    base |= _pool(found, asked, base["peak"].bytes, more_passing)
    return Prediction(**base)


def load(rows: Sequence[Resolved]) -> None:
    """Load the libraries and model surveys that several forks share.
    A fork surveys a model that no other fork needs by itself. Errors are ignored here; they recur
    in the fork, which reports them."""
    needs = [name for row in rows for name in row.needs]
    libraries = [name for need in needs for name in LIBRARIES.get(need, ())]
    for name in dict.fromkeys([m for row in rows for m in row.launch.engine.modules] + libraries):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    asked = Counter(row.subject.deep(depths) if depths else row.subject for row in rows
                    for depths in [few for few, _ in shallow(row)] or [None])  # fmt: skip
    # The first subject is always surveyed, because that loads its library.
    for place, (subject, times) in enumerate(asked.items()):
        if times > 1 or place == 0:
            with contextlib.suppress(Exception):
                subject.survey.idle  # noqa: B018 (its module caches the survey)
    capability.keep()


def _traced(resolved: Resolved, depths: Mapping[str, int], kind: str) -> dict[str, Any]:
    subject = resolved.subject.deep(depths)
    launch = replace(resolved.launch, subject=subject)
    row = replace(resolved, subject=subject, launch=launch)
    tracer, counter, steady_from, borders = trace_bordered(row, kind)
    prediction = summary(row, tracer.record, counter, steady_from, denoising=tracer.denoising)
    beyond = beyond_kinds(prediction.buckets)
    device, host = ({name: vars(part) for name, part in
                     parts(tracer, borders, pool, steady_from, beyond).items()}
                    for pool in ("device", "host"))  # fmt: skip
    stream = stream_to_data(tracer.record, borders) if resolved.spec.device == "cuda" else None
    return {
        "prediction": dataclasses.asdict(prediction),
        "parts": device,
        "passing": sum(s.size for s in tracer.record.storages if s.pool == PASSING),
        "host": host,
        "stream": stream,
    }


def _peak_of(
    phase: str,
    places: Sequence[Places],
    plain: Sequence[Mapping[str, Any]],
    line: Callable[..., int],
) -> int:
    """Return the bytes of a phase's peak.
    If the models share no part of the phase, their own peaks of the phase are extended. This occurs
    if each model marks other events in its optimizer step."""
    begins = f"1/{phase}/", f"2/{phase}/"
    if any(name.startswith(begins) for name in set(places[0]).intersection(*places[1:])):
        return _fullest(places, line, *begins).bytes
    return line(p["phases"][phase] for p in plain)


def _fullest(places: Sequence[Places], line: Callable[..., int], *begins: str) -> Instant:
    """Return the instant of the fullest part in the deep model, among parts of all models.
    It is empty if there are no parts, as in the host memory of a CPU."""
    shared = set(places[0]).intersection(*places[1:])
    names = sorted(name for name in shared if name.startswith(begins))
    if not names:
        return Instant(bytes=0, phase="", op="", site="", categories={}, held=[])
    sizes = {name: line(p[name]["bytes"] for p in places) for name in names}
    best = max(names, key=lambda name: sizes[name])
    kinds = {kind: line(p[best]["kinds"].get(kind, 0) for p in places) for kind in CATEGORIES}
    first, phase = places[0][best], best.split("/")[1]
    return Instant(bytes=sizes[best], phase=phase, op=first["op"], site=first["site"],
                   categories=kinds, held=[])  # fmt: skip


def _held(peaks: Sequence[Mapping[str, Any]], line: Callable[..., int]) -> list[Held]:
    """Return the live allocations whose makers all models' peaks have, the largest first."""

    def keyed(peak: Mapping[str, Any]) -> dict[tuple[str, ...], Mapping[str, Any]]:
        return {(h["category"], h["op"], h["site"], h["phase"]): h for h in peak["held"]}

    known = [keyed(peak) for peak in peaks]
    shared = [key for key in known[0] if all(key in other for other in known)]
    found = [
        Held(
            category=key[0], op=key[1], site=key[2], phase=key[3],
            count=line(k[key]["count"] for k in known),
            bytes=line(k[key]["bytes"] for k in known),
        )
        for key in shared
    ]  # fmt: skip
    return sorted(found, key=lambda alike: -alike.bytes)


def _pool(
    found: Sequence[Mapping[str, Any]],
    asked: Sequence[tuple[Mapping[str, int], float]],
    peak: int,
    passing: int,
) -> dict[str, Any]:
    """Return the allocator's peaks for the deep model.
    Rounding and fragmentation depend on the order, so the allocations of all blocks are replayed.
    If the order cannot be derived, the largest losses of the shallow models are used, with a note.
    ``passing``: how many more bytes of the passing pool this model has than the shallow one. The
    peak may be elsewhere, so only the replay shows how many of them count."""
    plain = [traced["prediction"] for traced in found]
    if plain[0]["allocated"] is None:
        return {}
    (few, _), *rest = asked
    deeper, stream = [], stream_from_data(found[0]["stream"])
    for traced, (depths, more) in zip(found[1:], rest, strict=True):
        keys = list(few)
        own = next(key for key in keys if depths[key] != few[key])
        before = sum(few[key] for key in keys[: keys.index(own)])
        count = round((more + 1) * FEW)
        deeper.append(Deeper(stream_from_data(traced["stream"]), count, before))
    allocated = peak + max(p["allocated"] - p["peak"]["bytes"] for p in plain) + passing
    least = peak if passing else allocated
    try:
        peaks = pooled(extrapolate_blocks(stream, deeper))
        if not (1 - SAME) * least <= peaks["allocated"] <= (1 + SAME) * allocated:
            raise NotAlike("they do not add up to the peak of a straight line")
        allocated = peaks["allocated"] if passing else allocated
    except NotAlike:
        most = {n: max(p[n] - p["allocated"] for p in plain) for n in POOL}
        notes = [*plain[0]["notes"], SHORT]
        return {n: allocated + most[n] for n in POOL} | {"allocated": allocated, "notes": notes}
    return {n: max(allocated, peaks[n]) for n in POOL} | {"allocated": allocated}


def _work(lists: Sequence[Sequence[Mapping[str, Any]]], more: Sequence[float]) -> list[Work]:
    """Return the work of all blocks.
    Ops with equal sizes in all models are counted. Ops whose size grows, such as an optimizer over
    all weights, are summed by kind."""
    take = operator.itemgetter(*FIELDS)
    counts = [Counter({take(work): work["count"] for work in works}) for works in lists]
    shared = dict.fromkeys(key for key in counts[0] if all(key in other for other in counts))
    ends = ((key, round(_end([c[key] for c in counts], more))) for key in shared)
    found = [(key, count) for key, count in ends if count > 0]
    for kind in sorted({key[:KIND] for c in counts for key in c if key not in shared}):
        sums = []
        for each in counts:
            rest = [(k, n) for k, n in each.items() if k[:KIND] == kind and k not in shared]
            flops, size = (sum(n * key[at] for key, n in rest) for at in (KIND, KIND + 1))
            sums.append((sum(n for _, n in rest), flops, size))
        count, flops, size = (max(0.0, _end(list(v), more)) for v in zip(*sums, strict=True))
        number = max(1, round(count))
        found.append(((*kind, round(flops / number), round(size / number)), number))
    return [Work(**dict(zip(FIELDS, key, strict=True)), count=count) for key, count in found]


def _end(values: Sequence[float], more: Sequence[float]) -> float:
    """Return the end of a straight line: from the value of the shallow model, ``more`` times the
    difference that each deeper one adds."""
    first, *others = values
    return first + sum(times * (value - first) for value, times in zip(others, more, strict=True))
