"""Every phase that is entered anywhere is one of the lists in ``harness.phases``."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from harness import ROOT
from harness.launch import outcome
from harness.phases import PEAK_PHASES, RUN_PHASES
from harness.worker import passes
from strategies.engine import STEP_PHASES


def entered(*paths) -> dict[str, str]:
    """Names that these sources give as text to something called ``enter`` -> where."""
    names = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                for part in ast.walk(node.args[0]) if called == "enter" else ():
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        names[part.value] = f"{path}:{node.lineno}"
    return names


def test_every_phase_that_a_worker_enters_is_in_the_list():
    worker = [ROOT / "harness" / "train.py", *(ROOT / "harness" / "worker").rglob("*.py")]
    names = entered(*worker)
    assert len(names) > 5 and "measure" in names
    known = {*RUN_PHASES, *PEAK_PHASES}  # a rank enters the first, a meter the others
    assert {name: at for name, at in names.items() if name not in known} == {}
    # "start" is where a rank is before it enters anything.
    assert set(RUN_PHASES) - set(names) == {"start"}


def test_every_phase_that_an_engine_enters_is_one_of_the_step(tmp_path):
    names = entered(*(ROOT / "strategies").rglob("*.py"))
    assert set(names) == set(STEP_PHASES)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("enter('sideways' if odd else 'forward')")
    assert set(entered(wrong)) == {"sideways", "forward"}


@dataclasses.dataclass
class Steps:
    """Stands in for a bench: which phases were entered when, by the number of steps taken."""

    warmup: int
    steps: int = 2
    taken: int = 0
    sampling: bool = False

    def __post_init__(self) -> None:
        self.peaks, self.phases, self.calls = [], [], []
        self.resolved = SimpleNamespace(spec=self)
        marks = contextlib.contextmanager(self.marks)
        engine = SimpleNamespace(phase_hooks=lambda trained, enter: marks(enter))
        self.run = SimpleNamespace(trained=SimpleNamespace(optimizer_steps=0, engine=engine))
        self.log = SimpleNamespace(losses=[torch.zeros(())], seconds=[], timed_from=0)
        self.meter = SimpleNamespace(
            enter=lambda phase: self.peaks.append((phase, self.taken)),
            close=lambda: self.peaks.append(("closed", self.taken)),
            synchronize=lambda: None,
        )
        self.watch = SimpleNamespace(
            begin=lambda when: self.calls.append((f"asks {when}", self.taken)),
            end=lambda: self.calls.append(("answered", self.taken)),
        )
        self.reporter = SimpleNamespace(
            enter=lambda phase, of: self.phases.append((phase, of, self.taken)),
            at=lambda step, **more: None,
        )

    def marks(self, enter):
        for phase in STEP_PHASES:
            enter(phase)
        yield

    def step(self, *_) -> None:
        self.taken += 1

    def timed(self, *_) -> None:
        self.step()
        self.log.seconds.append(0.0)

    def keep(self) -> bool:
        self.calls.append(("other heap", self.taken))
        return True


@pytest.fixture
def bench(monkeypatch):
    def made(warmup: int) -> Steps:
        steps = Steps(warmup)
        monkeypatch.setattr(passes, "timed", steps.timed)
        monkeypatch.setattr(passes.samples, "keep_freed", steps.keep)
        return steps

    return made


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_memory_is_read_in_steps_of_its_own_before_the_clock(warmup, bench):
    here = bench(warmup)
    passes.measured_steps(here)
    between = [("warmup", 1)] if warmup > 1 else []
    cut = [(phase, warmup + 1) for phase in STEP_PHASES]
    watched = [("first_step", 0), *between, ("steady", warmup), *cut, ("closed", warmup + 2)]
    assert here.peaks == watched, "and no phase is open in a timed step"
    assert {name for name, _ in watched} - {"closed"} <= set(PEAK_PHASES)
    timed = warmup + 2 + passes.SETTLING
    asked = [("asks before", warmup + 2), ("answered", warmup + 3), ("asks after", timed + 2)]
    assert here.calls == [("other heap", warmup + 2), *asked], "beside steps that are not timed"
    assert here.phases == [
        ("warmup", warmup, 0), ("memory", 2, warmup), ("settle", passes.SETTLING, warmup + 2),
        ("measure", 2, timed),
    ]  # fmt: skip
    assert here.taken == timed + 2 and len(here.log.seconds[here.log.timed_from :]) == 2


@pytest.mark.parametrize("switched", [True, False])
def test_a_training_takes_no_step_that_it_was_not_asked_for(switched, bench, monkeypatch):
    here = bench(2)
    monkeypatch.setattr(passes.samples, "keep_freed", lambda: switched)
    training = SimpleNamespace(after_step=lambda *_, last: here.calls.append(last))
    passes.training_steps(here, training)
    assert here.taken == 4 and here.calls == [False, False, False, True]
    watched = [("first_step", 0), ("steady", 1), ("closed", 2)]
    # On a GPU, whose heap did not change, reading goes on: it costs no step anything.
    assert here.peaks == [*watched, *([] if switched else [("steady", 2)]), ("closed", 4)]


def test_what_reads_phases_knows_all_of_them():
    assert tuple(RUN_PHASES) == outcome.PHASES
    assert set(STEP_PHASES) < set(PEAK_PHASES)
