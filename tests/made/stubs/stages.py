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
    "runs are mixed up": (
        "pp:schedule=zbv", "runs_of_blocks_in_another_order", "differs from the whole model's",
    ),
    "replicas train alone": (
        REPEATED, "gradients_of_replicas_not_averaged", "0 bytes of gradients were averaged",
    ),
}  # fmt: skip
UNLIKE = {
    "gradients are a sum": ("pp", "gradients_not_divided_by_micro_batches"),
    "a micro batch is dropped": ("pp", "last_micro_batch_of_the_schedule_lost"),
    "conditions are mixed up": ("pp", "conditions_of_another_micro_batch"),
    "a norm is a stage's": ("pp", "norm_of_one_stage"),
    "gradients of weights are lost": (
        "pp:schedule=zero_bubble", "weights_of_the_last_micro_batch_lost",
    ),
}  # fmt: skip
SHARES_LOST = {
    "gradients are reduced by micro batch": (
        "pp_fsdp2", "gradients_reduced_for_each_micro_batch", "once each, after the last",
    ),
    "blocks are let go of": (
        "pp_fsdp2", "blocks_gathered_for_each_micro_batch", "an FSDP group was gathered",
    ),
}  # fmt: skip
"""The same of stages that ranks share."""
SHARES_UNLIKE = {
    "a mean of means": ("pp_fsdp2", "gradients_of_sharers_divided_twice"),
    "one micro batch alone is reduced": ("pp_fsdp2", "gradients_of_the_last_micro_batch_alone"),
}
