"""Cells of words and numbers, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.recount import measures as m
from tests.recount import versus as v
from tests.recount.cells import MIB, Number, gib
from tests.recount.raw import Row, Run

__all__ = ["bucket", "compiled", "ended", "host", "loss", "notes", "p10_to_p90", "phase", "title"]
__all__ += ["why", "zero_block"]

Take = Callable[[Any], Any]


def p10_to_p90(row: Row) -> tuple[Any, ...]:
    low, high = (Number(1e3 * m.tenth(m.steps(row), place)) for place in (1, 9))
    return (low, " to ", high)


def loss(row: Row) -> Any:
    """The verdict, with the distance wherever it is not equality."""
    word = v.parity(row)
    if word in ("by design", "DIFFERS"):
        return (f"{word} ", Number(v.loss_distance(row)))
    return word


def notes(row: Row) -> str | None:
    holds = {"front": v.front(row), "noisy": m.noisy(row), "DIFFERS": v.parity(row) == "DIFFERS"}
    return ", ".join(word for word, it_does in holds.items() if it_does) or None


def phase(row: Row) -> str | None:
    name = m.peak_phase(row)
    return name and name.replace("_", " ")


def compiled(fact: str) -> Take:
    return lambda row: row.evidence.get("compile", {}).get(fact)


def zero_block(row: Row) -> dict[str, Any]:
    config = row.first["configs"].get("deepspeed")
    return config.get("zero_optimization", {}) if isinstance(config, dict) else {}


def bucket(name: str) -> Take:
    def cell(row: Row) -> Any:
        elements = zero_block(row).get(name)
        if not isinstance(elements, int | float) or isinstance(elements, bool):
            return None if elements is None else str(elements)
        bytes_each = 2 if m.precision(row) in ("bfloat16", "float16") else 4
        return (Number(int(elements)), " (", Number(elements * bytes_each / MIB, 2), " MiB)")

    return cell


def host(name: str) -> Take:
    """Of the rank whose host memory was fullest at its traced peak."""

    def cell(row: Row) -> Number:
        traced = [r["host_categories"] for r in row.ranks if r.get("host_categories")]
        return gib(max(traced, key=lambda c: sum(c[n] for n in m.CATEGORIES))[name])

    return cell


def title(name: str) -> str:
    return "EMA" if name == "ema" else name.replace("_", " ").capitalize()


# ---- of what did not finish ----


def ended(run: Run) -> str | None:
    name, step = run.data["phase"], run.data["step"]
    return name if name is None or step is None else f"{name}, step {step}"


def why(run: Run) -> str | None:
    """The reason; for a run that was not what was asked, the first check that does not hold."""
    failed = next((check for check in run.data["audit"] if not check["ok"]), None)
    if run.data["status"] == "ok" and failed:
        return f"{failed['name']}: asked {failed['asked']}, found {failed['found']}"
    return run.data["reason"]
