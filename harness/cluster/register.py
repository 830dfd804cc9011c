"""Hooks of several machines in the commands ``run`` and ``doctor``."""

HOOKS = {
    "run_arguments": "harness.cluster.commands:add_run_arguments",
    "doctor_arguments": "harness.cluster.commands:add_arguments",
    "elsewhere": "harness.cluster.commands:elsewhere",
    "machines": "harness.cluster.commands:machines",
}
