"""What the tests of real training share: runs by accelerate, and training in this process."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.data import datasets
from harness.data.feed import check_data
from harness.launch import command, launch
from harness.planner import uncertainty
from harness.report.figures import parity
from harness.resolve import resolve
from harness.result import Result, Status, load
from harness.spec import Spec
from harness.subjects import subject_of
from harness.system import capability, probe, process
from strategies import parse
from strategies.strategy import Strategy
from tests.made import one_start

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
# Tests that draw a sample draw another each day; processes of one run draw alike.
os.environ.setdefault("TESTS_DAY", datetime.date.today().isoformat())
# Children that compile DeepSpeed's ops take one ninja: two compile what the other did again.
process.own_tools_first()
# Read once, and not for each training.
datasets._digits = functools.cache(datasets._digits)

TINY = Spec(recipe="single", model="DiT-T/8", global_batch=4, warmup=1, steps=2)
DRAWN = dataclasses.replace(
    TINY, workload="sample", objective="flow", global_batch=2, sampler_steps=2
)
HALF, FLAT = "DiT-T/8:depth=2", "DiT-T/8:depth=1"
"""Half of ``TINY``'s blocks, and one of them."""
STRIP = dataclasses.replace(TINY, model=f"{ROOT}/tests/made/strip.py:Strip", objective="flow")
"""A subject that is no DiT."""
SUBJECT = subject_of(TINY.model, check_data(TINY.data))
BY_BLOCKS = {
    "block_swap", "checkpoint", "compile", "controlnet", "distill", "offload_activations",
}  # fmt: skip
"""Strategies that do not treat all blocks alike, or whose stubs do not."""
IN_EACH = {"attend", "fp8"}
"""Strategies of which a stub leaves out one block."""


ALONE = {"OMP_NUM_THREADS": "1"}
"""Of each process that is launched, whatever the harness would give it here."""
LONGEST = (
    "predict/test_extend", "strategies/test_launched",
    "worker/test_runs", "predict/test_predict_truth", "launch/test_launch", "worker/test_counted",
    "strategies/test_parallel", "strategies/test_pipeline", "strategies/test_tensor",
    "export/test_launched_exports", "script/test_script_families", "strategies/test_pairs",
    "sampling/test_drawing", "worker/test_resume", "test_pages", "commands/test_public_run",
    "worker/test_building", "strategies/test_catalog", "launch/test_two_nodes",
)  # fmt: skip
"""Files whose tests take longest: they begin first, so that none is left to run alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the thorough tests too")
    parser.addoption("--nightly", action="store_true", help="run the nightly tests as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    first = {here / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path, len(first)))
    left_out = {"nightly"} if config.option.all else {"thorough", "nightly"}
    left_out = set() if config.option.nightly else left_out
    asked = {Path(arg.partition("::")[0]).resolve() for arg in config.args}
    left = {
        i for i in items if i.path not in asked and left_out & {m.name for m in i.iter_markers()}
    }
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]


@functools.cache
def nvme_fault() -> str:
    """Return why swapping to files cannot run here; empty if it can. Compiles the op if need be."""
    op = probe.facts(build=["async_io"])["ops"].get("async_io", {"reason": "DeepSpeed is missing"})
    return op["reason"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("libaio") and (fault := nvme_fault()):
        pytest.skip(f"async_io cannot be loaded: {fault}")


def launchable(names: Iterable[str], often: Container[str] | None = None) -> list[Any]:
    """Return the recipes as parameters; a recipe that swaps to files has the mark ``libaio``, and
    one that is not among ``often`` the mark ``thorough``."""
    found = []
    for name in names:
        marks = [pytest.mark.libaio] * ("nvme" in name)
        marks += [pytest.mark.thorough] * (often is not None and name not in often)
        found.append(pytest.param(name, marks=marks) if marks else name)
    return found


class OnDemand(dict[str, Any]):
    """Values made when first read."""

    def __init__(self, make: Callable[[str], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Any:
        self[name] = self._make(name)
        return self[name]


def launched(spec: Spec, folder: Path, *extra: str) -> Result:
    """``spec`` run by accelerate as the harness does, with further words for the worker."""
    case, more = Case(spec, extra), {"timeout": 300, "added": ALONE}
    return launch.run(resolve(spec), folder, argv=lambda port: case.line(folder, port), **more)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run: further words for its worker, folders to copy (from, to) first, another module or
    launch file than the harness would take, whether its resident marks are looked at, further
    variables, and the name of a fault of ``tests.sabotage``, which the worker's hook takes."""

    spec: Spec
    words: tuple[str, ...] = ()
    copy: tuple[tuple[Path, Path], ...] = ()
    module: str = "harness.train"
    file: Path | None = None
    resident: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    fault: str = ""

    def line(self, folder: Path, port: int = 0) -> list[str]:
        """The command that starts it."""
        line = command.command(resolve(self.spec), folder, port=port)
        line[line.index("harness.train")] = self.module
        if self.file is not None:
            line[line.index("--config_file") + 1] = str(self.file)
        return [*line, *self.words]

    def asked(self, folder: Path) -> dict[str, object]:
        """The same for ``tests.made.one_start``."""
        line, altered = self.line(folder), {"HEADROOM_ALTER": f"tests.sabotage:{self.fault}"}
        return {
            "line": line[line.index("launch") :],
            "env": {**command.environment(resolve(self.spec)), **ALONE, **self.env}
            | (altered if self.fault else {}),
            "module": self.module,
            "words": line[line.index(self.module) + 1 :],
            "resident": self.resident,
            "copy": [[str(source), str(target)] for source, target in self.copy],
        }


def begin(**more: str) -> one_start.Start:
    """A start for all runs and predictions of this process, with ``more`` variables."""
    own = {**ALONE, **more, "DS_ACCELERATOR": "cpu"}  # read when DeepSpeed is imported
    return one_start.Start(command.inherited() | command.environment(resolve(TINY)) | own)


def launched_together(cases: dict[str, Case], folder: Path) -> dict[str, Result]:
    """Results of several runs, each in the folder of its name: their ranks are forks of one start,
    as ``tests.made.one_start`` says."""
    for name, case in cases.items():
        own, log = folder / name, folder / f"{name}.log"
        own.mkdir(parents=True)
        one_start.running(begin).case(case.asked(own), log, seconds=300)
        if not (own / "result.json").exists():
            failure, told = own / "ranks" / "rank0.failure.json", {}
            if failure.exists():
                told = json.loads(failure.read_text())
            lost = {"status": Status.FAILED, "log_tail": log.read_text(errors="replace")[-4000:]}
            lost |= {"reason": told.get("message", "it says nothing"), "way_out": told.get("hint")}
            Result(spec=case.spec, **lost).write(own / "result.json")
    return {name: load(folder / name / "result.json") for name in cases}


@pytest.fixture(scope="session", autouse=True)
def predictions_share_a_start() -> Iterator[None]:
    """What a command or a test lets be predicted is predicted in forks of that start."""
    with one_start.predictions_in_forks(begin):
        yield


@pytest.fixture
def row(request, runs) -> Result:
    """The run of that name among a module's ``runs`` (by name; their folder), which went well."""
    found = runs[0][request.param]
    assert found.status is Status.OK, f"{found.reason}\n{found.log_tail}"
    return found


def against(row: Result, reference: Result) -> parity.Verdict:
    return parity.against_the_reference(row, reference, parity.limits([reference]))


def hold_equal(row: Result, reference: Result) -> None:
    found = against(row, reference)
    assert found == parity.Verdict("equal"), parity.distances(row, reference)


def hold_apart(row: Result, reference: Result) -> None:
    """Norms and updates tell, whatever losses say."""
    assert row.status is Status.VOID, row.log_tail
    for one in (row, dataclasses.replace(row, losses=reference.losses)):
        assert against(one, reference).word == "DIFFERS"


def hold_alike(found: Mapping[str, Any], wanted: Mapping[str, Any], most: float = 1e-6) -> None:
    """Weights by name. Where a gradient is as small as Adam's eps, rounding shows."""
    assert found.keys() == wanted.keys()
    far = {name: float((found[name] - weight).abs().mean()) for name, weight in wanted.items()}
    assert {name: value for name, value in far.items() if value >= most} == {}


def in_fork(folder: Path, module: str, *words: object) -> None:
    """``python -m module words``, in a fork of the start; what it prints stays in ``folder``."""
    with (folder / "log.txt").open("w+") as log:
        start, words = one_start.running(begin), [module, *map(str, words)]
        program = one_start.Program(start, words, dict(os.environ), log.fileno())
        ended = program.wait()
        assert ended == 0, (folder / "log.txt").read_text()[-2000:]


def traced(kind: str, cases: list[dict], folder: Path) -> list[dict]:
    """What ``tests.children.traced`` says of each case, in a fork of its own."""
    asked, out, found = folder / "case.json", folder / "out.json", []
    for case in cases:
        asked.write_text(json.dumps(case))
        in_fork(folder, "tests.children.traced", kind, asked, out)
        found.append(json.loads(out.read_text()))
    return found


def part_named(text: str, name: str) -> Strategy:
    """The part of that name in the recipe ``text``."""
    return next(part for part in parse(text).strategies if part.name == name)


def showing(text: str) -> Spec:
    """The smallest training that shows all parts of the recipe ``text``."""
    names = {part.name for part in parse(text).strategies}
    whole = names & BY_BLOCKS or ",blocks=" in text
    model = TINY.model if whole else HALF if names & IN_EACH else FLAT
    return dataclasses.replace(TINY, recipe=text, model=model)


def observe_here(run, text: str) -> None:
    """One more step of a run of ``train_here``, watched for evidence as a measured run's is."""
    from harness.worker.loop import optimizer_step
    from strategies.evidence.watching import observing

    with observing(run, parse(text).strategies, run.feed.dataset):
        optimizer_step(run, run.optimizer_steps)


def living() -> list:
    """The plain tensors that live in this process: a trace counts what other tests have left."""
    import torch

    gc.collect()
    return [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]


def traced_here(train_here, spec: Spec, steps: int = 2):
    """A run of so many steps, and the categories of one more, without what other tests left."""
    from harness.memory.traced_step import trace_step
    from harness.worker.loop import optimizer_step

    left = living()
    run = train_here(spec, steps)
    held = [*vars(run.feed.dataset).values(), *left]
    return run, trace_step(run, "cpu", lambda: optimizer_step(run, steps), held)


def highest(prof) -> int:
    """The most bytes that lived at once, by torch's profiler."""
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def profiled(resolved, steps: int = 2) -> int:
    """Peak bytes of the training's tensors by the profiler, from the set-up on."""
    from torch.profiler import ProfilerActivity, profile

    from harness.worker import setup
    from harness.worker.loop import optimizer_step

    accelerator = setup.make_accelerator(resolved)
    feed = setup.build_feed(resolved, accelerator)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run = setup.prepare(resolved, feed, accelerator, Path("unused"), lambda phase: None)
        for step in range(steps):
            optimizer_step(run, step)
    return highest(prof)


LIBRARY = 100
"""Modules, of one that is large enough to matter."""
SETTLED = [0]
"""Modules that were here when this process settled last."""


def settle() -> None:
    """Before a process trains for the first time, and after a library has come: a trace collects
    garbage, and need not go through all that libraries and pytest keep."""
    importlib.import_module("torch._dynamo")  # as the first optimizer does
    if len(sys.modules) > SETTLED[-1] + LIBRARY:
        capability.keep()
        SETTLED.append(len(sys.modules))


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of the machine that tests run on changes no prediction of theirs."""
    monkeypatch.setattr("harness.planner.calibration.store.OWN", Path("no calibrations"))


@pytest.fixture
def sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict memory without uncertainty, for tests of what follows from a need alone."""
    known = {kind: uncertainty.Share(kind, 0.0, 0, 0, pooled=False) for kind in uncertainty.CLASSES}
    monkeypatch.setattr(uncertainty, "shares", lambda: known)


@pytest.fixture
def draw_here() -> Iterator[Callable]:
    """Prepare a spec in this process and draw two batches, the second watched:
    ``draw_here(spec) -> Drawing``."""
    import torch

    from harness.sampling.measure import Drawing
    from harness.worker import setup
    from strategies.evidence.watching import observing

    def go(spec: Spec):
        settle()
        forget()
        torch.set_num_threads(1)
        resolved = resolve(spec)
        accelerator = setup.make_accelerator(resolved)
        scratch = Path("unused")
        drawing = setup.prepare(resolved, None, accelerator, scratch, lambda phase: None, Drawing)
        drawing.step()
        with observing(drawing, resolved.recipe.strategies):
            drawing.watched_step()
        return drawing

    yield go
    forget()


def weights_digest(module) -> str:
    """A short hash of every parameter's bytes: equal weights, equal digest."""
    from harness.worker.setup import combined, tensor_digest

    return combined({name: tensor_digest(p) for name, p in module.named_parameters()})


def forget() -> None:
    """Let accelerate begin anew in this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def trained_here(
    spec: Spec, steps: int, scratch: Path = Path("unused"), first=lambda run: None, simulated=False
):
    """Prepare a spec in this process and take steps, behind what is done ``first``; return the run.

    ``simulated``: as rank 0 of the spec's processes, on torch's fake process group, which reports
    so many ranks and moves nothing.
    """
    import torch

    from harness.worker import setup
    from harness.worker.loop import optimizer_step

    settle()
    forget()
    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    resolved = resolve(spec)
    if simulated:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        group = {"store": FakeStore(), "rank": 0, "world_size": spec.processes}
        torch.distributed.init_process_group("fake", **group)
        launch = dataclasses.replace(resolved.launch, simulated=True)
        resolved = dataclasses.replace(resolved, launch=launch)
    accelerator = setup.make_accelerator(resolved)
    feed = setup.build_feed(resolved, accelerator)
    run = setup.prepare(resolved, feed, accelerator, scratch, lambda phase: None)
    first(run)
    for step in range(steps):
        optimizer_step(run, step)
    return run


@pytest.fixture
def train_here() -> Iterator[Callable]:
    """``trained_here``, after which accelerate begins anew."""
    yield trained_here
    forget()
