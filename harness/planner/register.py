"""Commands of the planner, and its hooks in the report and in other commands."""

from harness.extensions import Command

COMMANDS = {
    "plan": Command(
        help="predict without a GPU which recipes fit, and how fast each trains",
        example="./run.sh plan --model flux-dev --gpu RTX-4090\n"
        "  ./run.sh plan --model DiT-XL/2 --gpus 8 --gpu-memory 24GiB --global-batch 256\n"
        "  ./run.sh plan --gpus 64 --gpu A100-80GB --recipes zero3+bf16 --largest model",
        page="docs/how-to/plan.md",
        arguments="harness.planner.plan.command:add_arguments",
        act="harness.planner.plan.command:plan",
    ),
    "export": Command(
        help="write a recipe's files, code and options for your own trainer",
        example="./run.sh export zero2+bf16+checkpoint --gpus 8 --gpu RTX-4090 --out take_home",
        page="docs/how-to/export.md",
        arguments="harness.planner.export.command:add_arguments",
        act="harness.planner.export.command:export",
    ),
    "oom": Command(
        help="explain an out-of-memory message, log or memory snapshot, and what would fit",
        example="./run.sh oom train.log\n"
        "  ./run.sh oom train.log --model flux-dev --recipe single+bf16_pure+lora:rank=16",
        page="docs/how-to/out-of-memory.md",
        arguments="harness.planner.oom.command:add_arguments",
        act="harness.planner.oom.command:oom",
    ),
    "atlas": Command(
        help="predict every public model on every common card, and write a page with filters",
        example="./run.sh atlas --models pixart-sigma flux-dev --cards RTX-4090 24GiB --gpus 1",
        page="docs/how-to/plan.md",
        arguments="harness.planner.atlas.command:add_arguments",
        act="harness.planner.atlas.command:atlas",
    ),
    "calibrate": Command(
        help="measure the rates of this machine that predictions assume, and store them",
        example="./run.sh calibrate --minutes 20\n"
        "  ./run.sh calibrate --part check --part memory --part story --dry-run",
        page="docs/how-to/first-gpu.md",
        arguments="harness.planner.calibrate.command:add_arguments",
        act="harness.planner.calibrate.command:calibrate",
    ),
}
HOOKS = {
    "run_arguments": "harness.planner.hooks:add_run_arguments",
    "after_run": "harness.planner.hooks:after_run",
    "calibration_words": "harness.planner.hooks:calibration_words",
    "under_ceilings": "harness.planner.hooks:under_ceilings",
    "read_calibration": "harness.planner.comparison:read_calibration",
    "compare_with_predictions": "harness.planner.comparison:compare_with_predictions",
}
