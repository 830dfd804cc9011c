"""Cells of words and numbers, and what they are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.recount import drawn, same
from tests.recount import measures as m
from tests.recount import predicted as p
from tests.recount import versus as v
from tests.recount.cells import MIB, Number, distance, gib
from tests.recount.raw import Row, Run

__all__ = [
    "ahead",
    "behind_forward",
    "bucket",
    "compiled",
    "disturbed",
    "ended",
    "host",
    "loss",
    "named",
    "notes",
    "on_several",
    "psnr",
]
__all__ += ["p10_to_p90", "phase", "predicted_need", "predicted_to_fit", "so_far", "title", "why"]
__all__ += ["gathered", "gathering", "zero_block"]

Take = Callable[[Any], Any]


def p10_to_p90(row: Row) -> tuple[Any, ...]:
    low, high = (Number(1e3 * m.tenth(m.steps(row), place)) for place in (1, 9))
    return (low, " to ", high)


def loss(row: Row) -> Any:
    """The verdict, with the distance wherever it is not equality; of a training."""
    if drawn.draws(row.group):
        return None
    word, far = v.parity(row), v.loss_distance(row)
    if word in ("by design", "beyond design", "DIFFERS") and far is not None:
        return f"{word} {distance(far)}"
    return word


def psnr(row: Row) -> Number | str | None:
    """In decibels; "same" where not a bit differs."""
    found = drawn.DRAWN["samples_psnr_db"](row)
    return "same" if found == math.inf else found and Number(found, 2)


def disturbed(row: Row) -> str | None:
    marked = m.disturbed_steps(row)
    return None if marked is None else f"{marked} of {len(m.steps(row))}"


def notes(row: Row) -> str | None:
    holds = {
        "front": v.front(row),
        "noisy": m.noisy(row),
        f"{disturbed(row)} steps disturbed": m.disturbed_steps(row),
        v.parity(row): v.wrong(row),
        same.computation(row): True,
        "not traced: see Resident": not row.group.gpu and m.peak_bytes(row) is None,
        "places unknown": (m.placed_by(row) or "").startswith("unknown")
        and m.peak_bytes(row) is not None,
    }
    lost = [f"a repetition ended as {status}" for status in row.lost]
    stands = row.is_reference and row.group.stands_in is not None
    lost += [f"in place of {row.group.wanted}"] * stands
    return ", ".join([*(word for word, it_does in holds.items() if it_does and word), *lost])


def phase(row: Row) -> str | None:
    name = m.peak_phase(row)
    return name and name.replace("_", " ")


def on_several(row: Row) -> bool:
    """Whether rows of its group differ in their number of processes."""
    return len({other.spec["processes"] for other in row.group.rows}) > 1


def compiled(fact: str) -> Take:
    return lambda row: row.evidence.get("compile", {}).get(fact)


def zero_block(row: Row) -> dict[str, Any]:
    config = row.first["configs"].get("deepspeed")
    return config.get("zero_optimization", {}) if isinstance(config, dict) else {}


def overlap(row: Row) -> str | None:
    told = zero_block(row).get("overlap_comm")
    return ("yes" if told else "no") if isinstance(told, bool) else None


def second_share(row: Row) -> str | None:
    size = zero_block(row).get("zero_hpz_partition_size")
    return None if size in (None, 1) else str(size)


def offloaded(row: Row) -> float | None:
    block = zero_block(row).get("offload_optimizer") or {}
    return block["ratio"] if block.get("ratio", 1) != 1 else None


def bucket(name: str) -> Take:
    def cell(row: Row) -> Any:
        elements = zero_block(row).get(name)
        if not isinstance(elements, int | float) or isinstance(elements, bool):
            return None if elements is None else str(elements)
        bytes_each = 2 if m.precision(row) in ("bfloat16", "float16") else 4
        return (Number(int(elements)), " (", Number(elements * bytes_each / MIB, 2), " MiB)")

    return cell


def gathering(row: Row) -> dict[str, Any]:
    found = [facts for facts in row.evidence.values() if "most_groups_ahead" in facts]
    return found[0] if found else {}


def behind_forward(row: Row) -> str:
    told = gathering(row)["reshard_after_forward"]
    if isinstance(told, bool):
        return "freed" if told else "kept"
    return f"cut among {told}"


def ahead(phase: str) -> Take:
    return lambda row: Number(gathering(row)["most_groups_ahead"][phase])


def gathered(phase: str) -> Take:
    def cell(row: Row) -> Number | None:
        sent = gathering(row).get("gathered_bytes")
        return Number(sent[phase] / MIB) if sent else None

    return cell


def host(name: str) -> Take:
    """Of the rank that kept most in host memory."""

    def cell(row: Row) -> Number:
        kept = [parts for parts in map(m.kept_on_host, row.ranks) if parts]
        return gib(max(kept, key=m.traced_total)[name])

    return cell


def title(name: str) -> str:
    return "EMA" if name == "ema" else name.replace("_", " ").capitalize()


# ---- of what did not finish ----


def named(run: Run) -> str:
    """With what tells it from another of its recipe."""
    world, again = (run.spec.get(name) for name in ("world", "repeat"))
    text = run.recipe + (f" (rank 0 of {world})" if world else "")
    return text + (f" (repeat {again})" if again else "")


def so_far(run: Run) -> int | None:
    """What its meter had counted when it ended."""
    return run.data["peak_so_far_bytes"] or max(m.sizes(run.ranks, "allocated"), default=None)


def predicted_need(run: Run) -> int | None:
    """Of one that ran out of memory."""
    out = run.status in ("gpu_oom", "host_oom")
    need = p.least(run, run.prediction) if out else None
    return need if p.host_memory(run) else None


def predicted_to_fit(run: Run) -> str | None:
    need = predicted_need(run)
    return need and ("yes" if need <= p.host_memory(run) else "no")


def ended(run: Run) -> str | None:
    name, step = run.data["phase"], run.data["step"]
    return name if name is None or step is None else f"{name}, step {step}"


def why(run: Run) -> str | None:
    """The reason; for a run that was not what was asked, the first check that does not hold."""
    failed = next((check for check in run.data["audit"] if not check["ok"]), None)
    if run.data["status"] == "ok" and failed:
        return f"{failed['name']}: asked {failed['asked']}, found {failed['found']}"
    return run.data["reason"]
