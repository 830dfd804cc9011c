"""Every phase that is entered anywhere is one of the lists in ``harness.phases``."""

from __future__ import annotations

import ast
import contextlib
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

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


def calls(monkeypatch, take, warmup: int, switched: bool = True) -> list[str]:
    """What is called of a run, a step among them, in order: names and plain arguments."""
    run = Mock()
    run.resolved.spec = SimpleNamespace(warmup=warmup, steps=2, sampling=False)
    run.optimizer_steps, run.log.losses, run.log.seconds = 0, [0.0], []

    @contextlib.contextmanager
    def marks(_, enter):
        for phase in STEP_PHASES:
            enter(phase)
        yield

    run.engine.phase_hooks = marks
    run.samples.keep_freed.return_value = switched
    monkeypatch.setattr(passes, "samples", run.samples)
    monkeypatch.setattr(passes, "timed", lambda run: run.log.seconds.append(run.step()))
    passes.take(run, take(run))
    assert len(run.log.seconds[run.log.timed_from :]) == 2
    return [
        " ".join([name, *(str(one) for one in (*given, *more.values()) if not hasattr(one, "run"))])
        for name, given, more in run.mock_calls
        if name not in ("reporter.at", "meter.synchronize")
    ]


@pytest.mark.parametrize("warmup", [1, 2])
def test_memory_is_read_in_steps_of_its_own_before_the_clock(warmup, monkeypatch):
    more = ["meter.enter warmup", "step"] if warmup > 1 else []
    assert calls(monkeypatch, passes.measured_steps, warmup) == [
        *(f"reporter.enter warmup {warmup}", "meter.enter first_step", "step", *more),
        *("reporter.enter memory 2", "meter.enter steady", "step"),
        *(*(f"meter.enter {phase}" for phase in STEP_PHASES), "step", "meter.close"),
        *("samples.keep_freed", "reporter.enter settle 2"),
        *("gpus.begin before", "step", "gpus.end", "step"),
        *("reporter.enter measure 2", "step", "step", "gpus.begin after"),
    ]


@pytest.mark.parametrize("switched", [True, False])
def test_a_training_takes_no_step_that_it_was_not_asked_for(switched, monkeypatch):
    def take(run):
        return passes.training_steps(run, run.training)

    # On a GPU, whose heap did not change, reading goes on: it costs no step anything.
    reading = [] if switched else ["meter.enter steady"]
    assert calls(monkeypatch, take, 2, switched) == [
        *("reporter.enter warmup 2", "meter.enter first_step", "step", "training.after_step False"),
        *("meter.enter steady", "step", "training.after_step False", "meter.close"),
        *("samples.keep_freed", "reporter.enter measure 2", *reading),
        *("step", "training.after_step False", "step", "training.after_step True", "meter.close"),
    ]


def test_what_reads_phases_knows_all_of_them():
    assert tuple(RUN_PHASES) == outcome.PHASES
    assert set(STEP_PHASES) < set(PEAK_PHASES)
