"""Stages that are not one training: what a run of ``pp`` does instead -> the sabotage
(``harness.worker.sabotage_stages``), and what gives it away: a word of its evidence's complaint, or
parity with ddp, where the objects are as they should be and the numbers are not."""

from __future__ import annotations

__all__ = ["LOST", "UNLIKE"]

LOST = {
    "another schedule runs": (
        "all_forward_before_any_backward", "the schedule is ScheduleGPipe, not Schedule1F1B",
    ),
    "every rank holds everything": (
        "every_stage_keeps_the_whole_model", "parameters are held by several stages",
    ),
}  # fmt: skip
UNLIKE = {
    "gradients are a sum": "gradients_not_divided_by_micro_batches",
    "a micro batch is dropped": "last_micro_batch_of_the_schedule_lost",
    "conditions are mixed up": "conditions_of_another_micro_batch",
    "a norm is a stage's": "norm_of_one_stage",
}
