"""What the tests of real training share: runs by accelerate, and training in this process."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import ROOT
from harness.data.feed import check_data
from harness.launch import command, launch
from harness.report.figures import parity
from harness.resolve import resolve
from harness.result import Result, Status, load
from harness.spec import Spec
from harness.subjects import subject_of
from harness.system import process
from strategies import parse
from strategies.strategy import Strategy
from tests.made.untouched import pytest_sessionfinish, pytest_sessionstart

__all__ = ["pytest_sessionfinish", "pytest_sessionstart"]

# oneDNN has kernels for CPUs with AMX with scratch of their own (up to 1 % of a bfloat16 step),
# which no prediction for "a CPU" can know: tests take the same kernels everywhere.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Tests run beside one another: threads that wait for each other's would crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is compiled is compiled here: a pool of inductor's own would import torch once more.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# nohup and a shell's background jobs ignore these, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Children that compile DeepSpeed's ops take one ninja: two compile what the other did again.
process.own_tools_first()

TINY = Spec(recipe="single", model="DiT-T/8", global_batch=4, warmup=1, steps=2)
DRAWN = dataclasses.replace(
    TINY, workload="sample", objective="flow", global_batch=2, sampler_steps=2
)
STRIP = dataclasses.replace(TINY, model=f"{ROOT}/tests/made/strip.py:Strip", objective="flow")
"""A subject that is no DiT."""
SUBJECT = subject_of(TINY.model, check_data(TINY.data))


ALONE = {"OMP_NUM_THREADS": "1"}
"""Of each process that is launched, whatever the harness would give it here."""
LONGEST = (
    "strategies/test_launched", "strategies/test_publics_launched", "worker/test_runs",
    "predict/test_predict_truth", "strategies/test_parallel", "worker/test_world",
    "worker/test_resume", "predict/test_extend", "strategies/test_stubs",
    "predict/test_closed_form", "predict/test_inverses", "strategies/test_catalog",
)  # fmt: skip
"""Files whose tests take longest: they begin first, so that none is left to run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {Path(__file__).parent / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


def launched(
    spec: Spec,
    folder: Path,
    *extra: str,
    module: str = "harness.train",
    file: Path | None = None,
    timeout: float = 300,
) -> Result:
    """``spec`` run by accelerate as the harness does, with another module or launch file if given,
    and further words for the worker."""
    case = Case(spec, extra, module=module, file=file)
    return launch.run(
        resolve(spec),
        folder,
        timeout=timeout,
        argv=lambda port: case.line(folder, port),
        added=ALONE,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: further words for its worker, folders to copy (from, to) first, another module or
    launch file than the harness would take, and whether its resident marks are looked at."""

    spec: Spec
    words: tuple[str, ...] = ()
    copy: tuple[tuple[Path, Path], ...] = ()
    module: str = "harness.train"
    file: Path | None = None
    resident: bool = False

    def line(self, folder: Path, port: int = 0) -> list[str]:
        """The command that starts it."""
        line = command.command(resolve(self.spec), folder, port=port)
        line[line.index("harness.train")] = self.module
        if self.file is not None:
            line[line.index("--config_file") + 1] = str(self.file)
        return [*line, *self.words]

    def asked(self, folder: Path) -> dict[str, object]:
        """The same for ``tests.children.several``."""
        line = self.line(folder)
        return {
            "line": line[line.index("launch") :],
            "env": {**command.environment(resolve(self.spec)), **ALONE},
            "module": self.module,
            "words": line[line.index(self.module) + 1 :],
            "resident": self.resident,
            "copy": [[str(source), str(target)] for source, target in self.copy],
        }


def launched_together(cases: dict[str, Case], folder: Path) -> dict[str, Result]:
    """Results of several runs, each in the folder of its name: they follow one another in one start
    by accelerate, as ``tests.children.several`` says."""
    own = folder / "start"
    own.mkdir()
    for name in cases:
        (folder / name).mkdir(parents=True)
    asked = [case.asked(folder / name) for name, case in cases.items()]
    (own / "cases.json").write_text(json.dumps(asked))
    limit, module = 300.0 * len(cases), "tests.children.several"
    start = launched(TINY, own, "--several", str(own / "cases.json"), module=module, timeout=limit)
    for name, case in cases.items():
        if not (folder / name / "result.json").exists():
            failure, reason = folder / name / "ranks" / "rank0.failure.json", "it says nothing"
            if failure.exists():
                reason = json.loads(failure.read_text())["message"]
            lost = {"status": Status.FAILED, "reason": reason, "log_tail": start.log_tail}
            Result(spec=case.spec, **lost).write(folder / name / "result.json")
    return {name: load(folder / name / "result.json") for name in cases}


@pytest.fixture
def row(request, runs) -> Result:
    """The run of that name among a module's ``runs`` (by name; their folder), which went well."""
    found = runs[0][request.param]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    return found


def verdict(row: Result, runs) -> parity.Verdict:
    """Of ``row`` against the run of ``ddp`` among them."""
    reference = runs[0]["ddp"]
    return parity.against_the_reference(row, reference, parity.limits([reference]))


def predictions(cases: list[dict], folder: Path) -> list[dict]:
    """Predictions, each in a process of its own: process groups and patches are global to one."""
    asked, out = folder / "cases.json", folder / "out.json"
    asked.write_text(json.dumps(cases))
    words = [sys.executable, "-m", "tests.children.predictions", str(asked), str(out)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(out.read_text())


def part_named(text: str, name: str) -> Strategy:
    """The part of that name in the recipe ``text``."""
    return next(part for part in parse(text).strategies if part.name == name)


def observe_here(run, log, text: str) -> None:
    """One more step of a run of ``train_here``, watched for evidence as a measured run's is."""
    from harness.worker.loop import optimizer_step
    from strategies.evidence.watching import observe_step

    def step() -> None:
        optimizer_step(run, run.trained.optimizer_steps, log)

    observe_step(run.trained, parse(text).strategies, step, run.feed.dataset)


def living() -> list:
    """The plain tensors that live in this process: a trace counts what other tests have left."""
    import torch

    gc.collect()
    return [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]


@functools.cache
def settle() -> None:
    """Before a process trains for the first time: a trace collects garbage, and need not go through
    all that libraries and pytest keep."""
    importlib.import_module("torch._dynamo")  # as the first optimizer does
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of the machine that tests run on changes no prediction of theirs."""
    monkeypatch.setattr("harness.calibration.store.OWN", Path("no calibrations"))


@pytest.fixture
def draw_here() -> Iterator[Callable]:
    """Prepare a spec in this process and draw two batches, the second watched:
    ``draw_here(spec) -> Drawing``."""
    import torch

    from harness.worker import setup
    from harness.worker.drawing.prepare import prepare
    from strategies.evidence.watching import observe_step

    def go(spec: Spec):
        settle()
        forget()
        torch.set_num_threads(1)
        resolved = resolve(spec)
        accelerator = setup.make_accelerator(resolved)
        drawing, _ = prepare(resolved, accelerator, lambda phase: None)
        drawing.step()
        observe_step(drawing.trained, resolved.recipe.strategies, drawing.watched_step)
        return drawing

    yield go
    forget()


def forget() -> None:
    """Let accelerate begin anew in this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def trained_here(spec: Spec, steps: int, scratch: Path = Path("unused")):
    """Prepare a spec in this process and take steps: (run, log)."""
    import torch

    from harness.worker import setup
    from harness.worker.loop import Log, optimizer_step

    settle()
    forget()
    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    resolved, log = resolve(spec), Log()
    accelerator = setup.make_accelerator(resolved)
    feed = setup.build_feed(resolved, accelerator)
    run = setup.prepare(resolved, feed, accelerator, scratch, lambda phase: None)
    for step in range(steps):
        optimizer_step(run, step, log)
    return run, log


@pytest.fixture
def train_here() -> Iterator[Callable]:
    """``trained_here``, after which accelerate begins anew."""
    yield trained_here
    forget()
