"""Void runs: the only place that decides that a finished run does not count, and why.

The worker decides by ``settle``; reports and commands read ``shown_status``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.result import Check, Result, Status
from strategies.base import Reason

SHOWN = "shown"
"""Expected value of a check of evidence; the found value is the fault."""
FIX = "not ranked: fix the cause named here, or the recipe"


def settle(result: Result) -> Result:
    """Make ``result`` void if it is ok and must not count; return it."""
    why, kinds = _audited(result.audit), sorted({rank.device for rank in result.ranks})
    if result.spec.nodes > 1 and len(kinds) > 1:
        text = f"mixed nodes ({', '.join(kinds)}): no comparable times"
        why = why or Reason(text, "give it nodes of one kind")
    if why and result.status is Status.OK:
        result.status = Status.VOID
        result.reason, result.way_out = why.text, why.hint
    return result


def shown_status(result: Result) -> tuple[Status, str | None]:
    """Return the status to show and its reason: an ok result without proof of its work is void."""
    why = _audited(result.audit)
    if not result.ranks or not all(rank.step_seconds for rank in result.ranks):
        why = why or Reason("the result holds no timed step of all ranks", FIX)
    if why and result.status is Status.OK:
        return Status.VOID, why.text
    return result.status, result.reason


def _audited(checks: Sequence[Check]) -> Reason | None:
    """Return the first failed check of the audit (``harness.worker.audit``)."""
    failed = next((check for check in checks if not check.ok), None)
    if failed is None:
        return None
    proof = failed.asked == SHOWN
    words = failed.found if proof else f"expected {failed.asked}, found {failed.found}"
    return Reason(f"{failed.name}: {words}", FIX)
