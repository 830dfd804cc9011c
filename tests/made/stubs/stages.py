"""Stages that are not one training: what a run does instead -> its recipe, the sabotage
(``tests.sabotage.ranks``), and what gives it away: a word of its evidence's complaint, or
parity with ddp, where the objects are as they should be and the numbers are not."""

from __future__ import annotations

REPEATED = "pp:schedule=interleaved+checkpoint"
LOST = {
    "another schedule runs": (
        "pp", "all_forward_before_any_backward",
        "the schedule is ScheduleGPipe, expected Schedule1F1B",
    ),
    "another schedule of several runs": (
        "pp:schedule=interleaved", "all_forward_before_any_backward",
        "the schedule is ScheduleLoopedBFS, expected ScheduleInterleaved1F1B",
    ),
    "every rank holds everything": (
        "pp", "every_stage_keeps_the_whole_model", "parameters are on several stages",
    ),
    "one rank alone steps too few": (
        "pp", "one_parameter_of_the_last_stage_not_stepped",
        "rank 1: 1 parameters are only in the stage or only in its optimizer",
    ),
    "replicas train alone": (
        REPEATED, "gradients_of_replicas_not_averaged", "weights of the replicas differ",
    ),
}  # fmt: skip
UNLIKE = {
    "gradients are a sum": ("pp", "gradients_not_divided_by_micro_batches"),
    "a micro batch is dropped": ("pp", "last_micro_batch_of_the_schedule_lost"),
    "conditions are mixed up": ("pp", "conditions_of_another_micro_batch"),
    "a norm is a stage's": ("pp", "norm_of_one_stage"),
    "runs are mixed up": ("pp:schedule=interleaved", "runs_of_blocks_in_another_order"),
}
