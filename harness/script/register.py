"""Command ``script``: measure a user's own training script."""

from harness.extensions import Command

COMMANDS = {
    "script": Command(
        help="measure your own accelerate training script under several launch files",
        example="./run.sh script --launch ddp zero2 fsdp2 --with checkpoint --processes 2 "
        "-- train.py --resolution 512",
        page="docs/tutorial/your-own-script.md",
        arguments="harness.script.command:add_arguments",
        act="harness.script.command:act",
    )
}
