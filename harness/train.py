"""The worker: one rank of one run.

Started by accelerate, by the harness or by hand from the repository's root:

    accelerate launch --config_file launch_configs/zero3.yaml --num_processes 2 \\
        -m harness.train --recipe zero3+bf16 --processes 2 --device cuda \\
        --out results/manual/runs/zero3

With ``--checkpoint`` it is a plain training program that saves, resumes and draws samples.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from harness import opened
from harness.data.feed import check_data
from harness.launch import command, nodes
from harness.resolve import resolve
from harness.result import Result
from harness.sampling import measure as sampling
from harness.spec import Spec, add_arguments, from_arguments
from harness.subjects.own_module import is_file
from harness.system import process
from harness.system.probe import demand_gpu
from harness.worker import loop, measure, training
from harness.worker.status import Reporter
from strategies.base import BadInput, Conflict
from strategies.launch_file import absolute_files


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.train", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="run folder")
    parser.add_argument("--anatomy", action="store_true", help="leave anatomy.json in --out")
    text = "only see whether it trains in so much a process (0: in all there is), tracing nothing"
    parser.add_argument("--memory-limit", type=int, metavar="BYTES", help=text)
    training.add_arguments(parser)
    return parser.parse_args(argv)


def _check_words(spec: Spec, options: argparse.Namespace) -> None:
    words = ["checkpoint", "samples", "trained", "anatomy", "memory_limit"]
    asked = [word for word in words if getattr(options, word)] if spec.sampling else []
    if asked:
        raise Conflict(
            f"{asked[0]} is of a training, and the workload is {spec.workload}; leave "
            f"--{asked[0].replace('_', '-')} out"
        )


def _in_one_line(result: Result, folder: Path) -> str:
    """Return a result as the last line of a launch: its recipe, median step and peak."""
    steps = [max(step) for step in zip(*(r.step_seconds for r in result.ranks), strict=False)]
    peaks = [one.allocated for rank in result.ranks for one in rank.phases.values()]
    told = [f"{1e3 * statistics.median(steps):.0f} ms a step"] if steps else []
    told += [f"peak {max(peaks) / 2**30:.2f} GiB"] if peaks else []
    failed = [check.name for check in result.audit if not check.ok]
    told += [f"audit failed: {', '.join(failed)}"] if failed else []
    return f"{result.spec.recipe}: {', '.join([*told, f'result in {folder}'])}"


def main(argv: Sequence[str] | None = None) -> int:
    process.die_with_parent()
    process.own_tools_first()
    process.plain_architectures()
    absolute_files()
    options = parse_options(sys.argv[1:] if argv is None else argv)
    reporter = Reporter(options.out, int(os.environ.get("RANK", 0)))
    if options.model and is_file(options.model):  # None: the default, a DiT
        opened.record(options.out, reporter.rank, [Path(options.model.partition(":")[0]).parent])
    try:
        # The launching process has read all headers of the data already, so a rank need not.
        spec = from_arguments(options)
        resolved = resolve(spec, check_data(spec.data, thorough=False))
        if resolved.refusal:
            raise Conflict(str(resolved.refusal))
        _check_words(spec, options)
        demand_gpu(spec.device)
    except BadInput as error:
        reporter.failed(error)
        if reporter.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with contextlib.ExitStack() as stack:
            if spec.snapshot:
                stack.enter_context(loop.allocator_history(options.out, reporter.rank))
            if spec.sampling:
                result = sampling.measure(resolved, options.out, reporter)
            else:
                more = (training.from_options(options), options.memory_limit, options.anatomy)
                result = measure.measure(resolved, options.out, reporter, *more)
        result = nodes.share(result)
    except BaseException as error:
        nodes.exchange_failures(options.out, reporter.rank, reporter.failed(error))
        raise
    if result is not None:
        result.recordings = command.left_in(options.out)
        result.command = os.environ.get("HEADROOM_COMMAND", "")
        result.write(options.out / "result.json")
        print(_in_one_line(result, options.out), flush=True)
        shutil.rmtree(options.out / "nvme", ignore_errors=True)
    reporter.enter("done")
    if torch.distributed.is_initialized():
        # At the interpreter's exit a finished run sometimes aborts.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
