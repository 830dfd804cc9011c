"""Every phase that is entered anywhere is one of the lists in ``harness.phases``."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from harness import ROOT
from harness.launch import outcome
from harness.phases import PEAK_PHASES, RUN_PHASES
from harness.report.data import derive
from harness.worker import measure
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
    worker = [ROOT / "harness" / "train.py", *(ROOT / "harness" / "worker").glob("*.py")]
    names = entered(*worker)
    assert len(names) > 5 and "measure" in names
    assert {name: at for name, at in names.items() if name not in RUN_PHASES} == {}
    # "start" is where a rank is before it enters anything.
    assert set(names) == set(RUN_PHASES) - {"start"}


def test_every_phase_that_an_engine_enters_is_one_of_the_step(tmp_path):
    names = entered(*(ROOT / "strategies").rglob("*.py"))
    assert set(names) == set(STEP_PHASES)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("enter('sideways' if odd else 'forward')")
    assert set(entered(wrong)) == {"sideways", "forward"}


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_steps_have_their_peaks_in_the_phases_of_the_list(warmup, monkeypatch):
    peaks, phases, steps = [], [], []
    log = SimpleNamespace(losses=[])
    bench = SimpleNamespace(
        resolved=SimpleNamespace(spec=SimpleNamespace(warmup=warmup, steps=2)),
        run=SimpleNamespace(trained=SimpleNamespace(optimizer_steps=0)),
        log=log,
        meter=SimpleNamespace(enter=lambda p: peaks.append((p, len(steps))), close=lambda: None),
        reporter=SimpleNamespace(enter=lambda p, of: phases.append(p), at=lambda step: None),
    )
    monkeypatch.setattr(measure, "timed_step", lambda run, step, log, meter: steps.append(step))
    measure.train_steps(bench, None)
    between = [("warmup", 1)] if warmup > 1 else []
    assert peaks == [("first_step", 0), *between, ("steady", warmup)]
    assert {name for name, _ in peaks} <= set(PEAK_PHASES)
    assert phases == ["warmup", "measure"]


def test_what_reads_phases_knows_all_of_them():
    assert tuple(RUN_PHASES) == outcome.PHASES
    assert set(derive.PHASES) | {"warmup"} == set(PEAK_PHASES)
    assert set(STEP_PHASES) < set(PEAK_PHASES)
