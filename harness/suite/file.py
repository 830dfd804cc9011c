"""Suite files: YAML, read and checked key by key. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.spec import DEVICES, Spec, SpecError, check_sizes, located
from strategies import parse
from strategies.base import BadInput
from strategies.files import LARGEST_CONFIG, parse_yaml, read_foreign
from strategies.recipe import ENDED
from strategies.workloads import TRAIN

FOLDER = Path(__file__).resolve().parent / "catalog"
TIMEOUT_SECONDS = 1800.0
NOISE_FLOOR = 3
"""Number of measurements of the reference: two runs say almost nothing about the spread."""
ALL = "all"

FIELDS = {f.name: type(f.default) for f in dataclasses.fields(Spec) if f.name != "recipe"}
SETTINGS = {k: v for k, v in FIELDS.items() if k not in ("device", "repeat", "nodes")}
FIT = "fit"
BLOCK = {**SETTINGS, "per_process_batch": int, "repeat": int}
TOP = {
    "name": str,
    "title": str,
    "reference": str,
    "timeout_seconds": float,
    "noise_floor": int,
    "cpu": dict,
    "gpu": dict,
    "recipes": list,
    "cpu_recipes": list,
    "gpu_recipes": list,
}
WORDS = {"processes": ALL, "per_process_batch": FIT}
"""Values that ``specs`` replaces by numbers once the machine is known."""
KIND = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping of settings",
    list: "a list of recipes",
}
BLOCK_OF = {"cpu": "cpu", "cuda": "gpu"}


class SuiteError(BadInput):
    """A suite cannot be used; one line with the file, the key, the value and a remedy."""


@dataclass(frozen=True, kw_only=True)
class SuiteRow:
    """One recipe in its canonical text, and its settings that differ from the suite's."""

    recipe: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Rows to compare on one device.

    ``settings`` may hold ``processes: all`` and ``per_process_batch`` (a number or ``fit``), which
    ``specs`` replaces by numbers. ``noise_floor`` is the number of measurements of the reference
    row; with 1 the noise is unknown. ``repeat`` is the number of rounds in which every row is
    measured once. ``path`` is the suite's file.
    """

    path: Path
    name: str
    title: str
    reference: str
    timeout_seconds: float
    device: str
    settings: Mapping[str, Any]
    rows: tuple[SuiteRow, ...]
    noise_floor: int = NOISE_FLOOR
    repeat: int = 1


def known_suites() -> dict[str, Path]:
    """Return name -> file of the suites that come with the harness."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def load_suite(name: str, device: str) -> Suite:
    """Read the suite of that name, or of that file, for ``device`` (cpu or cuda).

    Raises:
        SuiteError: one line that names file, key, value and a remedy.
    """
    frame, data = framed(name, device)
    path, settings = frame.path, frame.settings
    rows = _rows(path, data, settings, BLOCK_OF[device])
    reference = _canonical(path, "reference", data.get("reference", rows[0].recipe), settings)
    if reference not in {row.recipe for row in rows}:
        raise SuiteError(
            f"{path}: reference {reference!r} is not among the recipes; add it or name another"
        )
    return dataclasses.replace(frame, reference=reference, rows=rows)


def framed(name: str, device: str) -> tuple[Suite, dict[str, Any]]:
    """Return a suite without its rows and its reference, and the data of its file."""
    path = known_suites().get(name, Path(name))
    if name not in known_suites() and not path.is_file():
        if name in ENDED:
            raise SuiteError(f"suite {name} is not here: {ENDED[name]}")
        close = difflib.get_close_matches(name, known_suites(), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? " if close else ""
        known = f"{hint}known: {', '.join(known_suites())}"
        raise SuiteError(f"no suite {name!r}: neither a known one nor a file; {known}")
    try:
        data = parse_yaml(read_foreign(path, LARGEST_CONFIG))
    except OSError as error:
        raise SuiteError(f"{path}: unreadable suite file ({error.strerror or error})") from None
    except ValueError as error:  # not text, or not plain data
        raise SuiteError(f"{path}: {error}; a suite is YAML, mind colons and indents") from None
    if not isinstance(data, dict):
        raise SuiteError(f"{path}: a suite is a mapping with the keys {', '.join(TOP)}")
    _check(path, "", data, TOP)
    block = BLOCK_OF[device]
    if block not in data:
        raise SuiteError(f"{path}: no block {block!r} for device {device}; add one")
    often = data.get("noise_floor", NOISE_FLOOR)
    if often < 1:
        raise SuiteError(f"{path}: noise_floor is {often}; write at least 1 (1: no floor)")
    limit = float(data.get("timeout_seconds", TIMEOUT_SECONDS))
    if not limit > 0:
        raise SuiteError(f"{path}: timeout_seconds is {limit:g}; write a number above 0")
    settings = _settings(path, block, data[block], BLOCK)
    try:
        check_sizes({**data, **settings})
    except SpecError as error:
        raise SuiteError(f"{path}: {error}") from None
    frame = Suite(
        path=path,
        name=data.get("name", path.stem),
        title=data.get("title", ""),
        reference="",
        timeout_seconds=limit,
        device=device,
        repeat=settings.pop("repeat", 1),
        settings=settings,
        rows=(),
        noise_floor=often,
    )
    return frame, data


# ---- reading and checking a file ----


def _check(path: Path, where: str, data: Mapping[Any, Any], known: Mapping[str, type]) -> None:
    """Check that all keys are known and each value has its type."""
    for key, value in data.items():
        at = f"{where}.{key}" if where else str(key)
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise SuiteError(f"{path}: unknown key {at!r}; {hint}")
        if key in WORDS and value == WORDS[key]:
            continue
        fits, kind = isinstance(value, known[key]), known[key]
        if kind is float and isinstance(value, (int, str)):
            # YAML 1.1 reads 1e-4 as text and needs 1.0e-4.
            with contextlib.suppress(ValueError, OverflowError):
                fits = float(value) == float(value)
        if not fits or isinstance(value, bool) is not (kind is bool):
            raise SuiteError(f"{path}: {at} is {value!r:.60}, not {KIND[kind]}")


def _settings(path: Path, where: str, data: Any, known: Mapping[str, type]) -> dict[str, Any]:
    _check(path, where, data, known)
    share = data.get("per_process_batch")
    if share is not None and "global_batch" in data:
        text = f"{path}: {where} has global_batch and per_process_batch"
        raise SuiteError(f"{text}; keep one of them")
    return located({k: float(v) if known[k] is float else v for k, v in data.items()})


def _rows(path: Path, data: Any, settings: Mapping[str, Any], block: str) -> tuple[SuiteRow, ...]:
    rows: list[SuiteRow] = []
    items = [
        (f"{key}[{index}]", {"recipe": item} if isinstance(item, str) else item)
        for key in ("recipes", f"{block}_recipes")
        for index, item in enumerate(data.get(key, []))
    ]
    for where, item in items:
        if not isinstance(item, dict) or not isinstance(item.get("recipe"), str):
            hint = "write a recipe, or {recipe: ddp, steps: 4}"
            raise SuiteError(f"{path}: {where} is {item!r:.60}; {hint}")
        own = _settings(path, where, {k: v for k, v in item.items() if k != "recipe"}, SETTINGS)
        text = _canonical(path, where, item["recipe"], {**settings, **own})  # a row's own win
        row = SuiteRow(recipe=text, settings=own)
        if row in rows:
            raise SuiteError(f"{path}: {where} {row.recipe!r} is there already; drop it")
        rows.append(row)
    if not rows:
        raise SuiteError(f"{path}: recipes is empty; list at least one, as in '- ddp'")
    return tuple(rows)


def _canonical(path: Path, where: str, text: str, settings: Mapping[str, Any]) -> str:
    """Return the canonical text of a recipe, the same for every order of its parts."""
    try:
        workload = settings.get("workload", TRAIN)
        return parse(text, ema=settings.get("ema", 1.0) > 0, workload=workload).text
    except BadInput as error:
        raise SuiteError(f"{path}: {where}: {error}") from None


assert set(BLOCK_OF) == set(DEVICES)
