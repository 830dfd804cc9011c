"""One rank of a script's run: patch, run the script, and write a typed result.

Started by accelerate, by the harness or by hand from the repository's root:

    accelerate launch --config_file launch_configs/zero2.yaml --num_processes 2 \\
        -m harness.script.run --recipe zero2 --processes 2 --device cuda \\
        --out results/manual/runs/zero2 -- train.py --resolution 512
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.utils import set_seed

from harness import ROOT, files, opened, void
from harness.launch import launch
from harness.launch.on_loopback import listen_on_loopback
from harness.result import Result, Status, load
from harness.script.model import wrapper_of
from harness.script.row import Script, ScriptRow, row_of
from harness.script.settle import Finished, Refused, Void
from harness.script.steps import steps_needed
from harness.script.watch import Watch, trains
from harness.spec import DEVICES
from harness.system import process
from harness.system.probe import demand_gpu
from harness.worker.status import Reporter
from strategies import CATALOG
from strategies.base import BadInput, Reason
from strategies.launch_file import absolute_files, names


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the worker's command line: the row, the output folder, and the script."""
    parser = argparse.ArgumentParser(prog="python -m harness.script.run", description=__doc__)
    add = parser.add_argument
    add("--recipe", required=True, help="launch file and added strategies, as zero2+checkpoint")
    add("--processes", type=int, default=1, help="processes (default: 1)")
    add("--device", choices=DEVICES, default="cpu", help="cpu or cuda (default: cpu)")
    add("--warmup", type=int, default=2, help="first optimizer steps (default: 2)")
    add("--steps", type=int, default=8, help="timed optimizer steps (default: 8)")
    add("--seed", type=int, default=0, help="seed that is set before the script (default: 0)")
    add("--repeat", type=int, default=0, help="index of this repetition (default: 0)")
    add("--clip", type=float, help="limit of the gradient norm that the script applies")
    add("--check", action="store_true", help="take two steps, and record what was recognised")
    add("--out", type=Path, required=True, metavar="FOLDER", help="run folder")
    add("--folder", type=Path, default=ROOT, help="the script's working directory")
    add("script", nargs=argparse.REMAINDER, help="-- train.py ARGUMENTS")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m harness.script.run``; return the exit code."""
    process.die_with_parent()
    options = parse_options(sys.argv[1:] if argv is None else argv)
    folder = options.out.absolute()
    reporter = Reporter(folder, int(os.environ.get("RANK", 0)))
    reporter.enter("load")
    try:
        row = _row(options)
        demand_gpu(options.device)
    except BadInput as error:
        reporter.failed(error)
        if reporter.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    watch = Watch(row, folder, reporter, check=options.check)
    absolute_files()
    os.environ.setdefault("WANDB_MODE", "disabled")  # a measured run reports to no service
    listen_on_loopback()
    script = row.script
    _enter(script)
    # The files that decide this row; the script's folder is the current one.
    opened.record(folder, reporter.rank, [script.path.parent, script.folder], script.arguments)
    code = _watched(row, watch, options.seed)
    if code == 0 and torch.distributed.is_initialized():
        # After a failure another rank may wait in a collective for this one.
        with contextlib.suppress(RuntimeError):
            torch.distributed.destroy_process_group()
    return code


def _row(options: argparse.Namespace) -> ScriptRow:
    words = options.script[1:] if options.script[:1] == ["--"] else options.script
    full = [str(ROOT / word) for word in words[:1]]  # a worker starts at the root
    script = Script.of([*full, *words[1:]], options.folder.absolute())
    names = ("clip", "processes", "device", "warmup", "steps", "seed", "repeat")
    row = row_of(script, options.recipe, **{name: getattr(options, name) for name in names})
    if row.refusal:
        raise BadInput(str(row.refusal))
    return row


def _watched(row: ScriptRow, watch: Watch, seed: int) -> int:
    """Run the script to its last measured step; return the exit code."""
    reporter = watch.reporter
    # A script that starts processes by itself is refused.
    text = "the script launches its training processes by itself"
    text += "; give the script that trains, without its launcher"
    refuse = mock.Mock(side_effect=Refused(text))
    launchers = mock.patch.multiple(accelerate, notebook_launcher=refuse, debug_launcher=refuse)
    try:
        with watch.patching(), launchers:
            set_seed(seed)
            runpy.run_path(str(row.script.path), run_name="__main__")
        raise watch.ended or _too_few(row, watch)
    except BaseException as error:
        stop = None if watch.finished else _unmeasured(error, row, watch)
        if stop is not None:
            _write_unmeasured(row, watch, stop)
        elif not watch.finished:
            own = error
            if isinstance(error, SystemExit):
                own = SystemError(f"the script exited with {error.code!r}")
            trace = own.__traceback__  # the script's own begins at its first line
            while trace is not None and trace.tb_frame.f_code.co_filename != str(row.script.path):
                trace = trace.tb_next
            own = own.with_traceback(trace or own.__traceback__)
            reporter.failed(own)
            traceback.print_exception(own)
            return 1
    reporter.enter("done")
    return 0


def _unmeasured(error: BaseException, row: ScriptRow, watch: Watch) -> BaseException | None:
    """Return why a run has no result, with the remedy; None if the script failed by itself."""
    if isinstance(error, (Refused, Void)):
        return error
    if watch.ended is not None:
        return watch.ended
    if isinstance(error, SystemExit):
        return _too_few(row, watch) if error.code in (None, 0) else None
    names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if "deepcopy" in names and row.launch.traits & {"shards", "split_parameters"}:
        return Refused(
            f"the script copies its model (an EMA?) after prepare, and {row.launch.sharding} "
            "shards it there; make the copy before accelerator.prepare, or take ddp"
        )
    return None


class TooFew(Refused):
    """The script ended before the last measured step."""


def _too_few(row: ScriptRow, watch: Watch) -> Refused:
    """Return why a script that ended by itself has no result, with the remedy."""
    needed = steps_needed(row, watch.check)
    if watch.bench is None:
        text = "the script ended without a training step by accelerator.backward"
        text = "the script made no Accelerator" if watch.accelerator is None else text
        return Refused(f"{text}; give the script that trains, with its arguments")
    taken = watch.bench.run.optimizer_steps + watch.complete()
    return TooFew(
        f"the script ended after {taken} optimizer steps, and {needed} are needed; give it more "
        "steps (--max_train_steps or more epochs), or a lower --steps and --warmup"
    )


def _write_unmeasured(row: ScriptRow, watch: Watch, stop: BaseException) -> None:
    """Write the result of a run that was refused or is void; other ranks report a failure."""
    why = Reason.read(str(stop))
    print(f"headroom: {stop}", file=sys.stderr, flush=True)
    if watch.reporter.rank != 0:
        return
    status = Status.FAILED if isinstance(stop, TooFew) else Status.REFUSED
    where = {"phase": watch.reporter.phase, "step": watch.reporter.step}
    result = Result.not_run(row, status, why.text, why.hint or "see log.txt", **where)
    if isinstance(stop, Void):
        result.status, result.audit = Status.OK, [stop.check]
        void.settle(result).way_out = stop.way_out
    with contextlib.suppress(AttributeError):
        result.evidence = {"script": watch.facts()}
    result.meter_notes = list(watch.notes)
    result.write(watch.folder / "result.json")


def _enter(script: Script) -> None:
    """Enter the script's folder, with its words and its own folder for imports, as Python does."""
    sys.argv = [str(script.path), *script.arguments]
    sys.path.insert(0, str(script.path.parent))
    os.environ.pop("PYTHONSAFEPATH", None)  # of the harness; the script's own children are Python's
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    os.chdir(script.folder)


# ---- notebooks ----


@contextlib.contextmanager
def measured_loop(
    accelerator: Any, out: Path, *, warmup: int, steps: int, name: str
) -> Iterator[Watch]:
    """Measure the loop within this context; see ``harness.script.measured``."""
    files.claim(out, launch.FILES)
    script, device = Script(path=Path(name), folder=Path.cwd()), accelerator.device.type
    engines = ((one, CATALOG[one].engine(device)) for one in sorted(names(), key=len))
    fitting = (n for n, one in engines if "stages" not in one.traits and one.runs(accelerator))
    here = next(fitting, None)
    if here is None:
        kind = accelerator.distributed_type.value
        text = f"accelerate runs {kind}, which no launch file has"
        raise BadInput(f"{text}; use a file in launch_configs")
    fields = {"processes": accelerator.num_processes, "warmup": warmup, "steps": steps}
    row = row_of(script, here, device=device, **fields)
    watch = Watch(row, out.absolute(), Reporter(out.absolute(), accelerator.process_index))
    watch.reporter.enter("load")
    watch.adopt(accelerator)
    watch.models += [m for m in accelerator._models if trains(m)]
    watch.loaders += [d for d in accelerator._dataloaders if hasattr(d, "total_batch_size")]
    watch.watch_models(list(map(wrapper_of, accelerator._models)))
    with watch.patching():
        try:
            yield watch
        except Finished:
            if watch.reporter.rank == 0:
                # Imported after the run: nothing of the meter's is larger for it.
                from harness.report import build
                from harness.report.data.answers import headline
                from harness.report.rendering import sentences

                path = watch.folder / "result.json"
                found = build([load(path)], [])
                said = headline(found.groups[0]) if found.groups else sentences.summary(found)
                print(f"{path}\n{said}")
            return
        except (Refused, Void) as stop:
            _write_unmeasured(row, watch, stop)
            raise BadInput(str(stop)) from None
    raise BadInput(str(_too_few(row, watch)))


if __name__ == "__main__":
    sys.exit(main())
