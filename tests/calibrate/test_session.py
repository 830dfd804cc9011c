"""A session of ``calibrate`` on a made machine: what it runs, resumes and leaves; and its stations
on this CPU with small shapes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from harness import cli
from harness.planner import pool
from harness.planner.calibrate import command, stations
from harness.planner.calibrate.command import Outcome, Session, build_from, run_stations, specs
from harness.planner.calibrate.stations import Asked, main, measure_collective
from harness.planner.calibration import store
from harness.planner.calibration.record import Ceilings
from harness.resolve import resolve
from harness.result import Result, Status
from harness.suite.file import load_suite
from harness.suite.run import SuiteInterrupted
from harness.system import gpus, process
from strategies import CATALOG, parse
from tests.made.calibrations import CPU
from tests.made.machines import machine

# ---- stations and rows ----


def test_the_check_has_every_strategy_of_the_catalog():
    recipes = [row.recipe for device in ("cpu", "cuda") for row in load_suite("check", device).rows]
    assert {part.name for text in recipes for part in parse(text).strategies} == set(CATALOG)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("device", "cards"), [("cpu", 0), ("cuda", 1), ("cuda", 4)])
def test_every_row_can_be_and_is_its_own(device, cards, small):
    found = specs(device, cards, 80 * 2**30, small=small)
    assert [spec.recipe for spec in found if resolve(spec).refusal] == []
    assert {spec.device for spec in found} == {device} and len(set(found)) == len(found)
    assert ([s.recipe for s in found if s.global_batch == 1] != []) == (device == "cuda")


# ---- running ----


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session whose children are made up: by name, what each leaves or how it fails."""
    monkeypatch.setattr(store, "OWN", tmp_path / "own")
    monkeypatch.setattr(store, "processor", lambda: CPU.name)
    console = Console(file=open(tmp_path / "said", "w"), width=200)  # noqa: SIM115
    made = Session(tmp_path / "s", machine(tmp_path), "cpu", console)
    made.started = []

    def child(argv, *, env, log, **more):
        assert env["CUDA_DEVICE_ORDER"] == gpus.order(), "a row's number names the same card"
        name, out = argv[3], Path(argv[4])
        made.started.append(name)
        if name == "attention":
            log.write_text("Traceback\nRuntimeError: no kernel image\n")
            return SimpleNamespace(exit_code=1, signal=None, stopped=None, wall_seconds=1.0)
        facts = {"products": {"products": {"float32": 1e11}, "missing": {"float16": "slow"}}}
        out.write_text(json.dumps(facts.get(name, {"context": 5})))
        return SimpleNamespace(exit_code=0, signal=None, stopped=None, wall_seconds=1.0)

    monkeypatch.setattr(command.process, "run_child", child)
    return made


def test_a_station_that_fails_ends_no_other_and_is_all_that_the_next_call_repeats(session):
    found = {o.station: o for o in run_stations(session)}
    assert found["attention"].status == "failed"
    assert found["attention"].reason == "exit code 1: RuntimeError: no kernel image"
    assert [o.status for n, o in found.items() if n != "attention"] == ["ok"] * 4
    session.console.file.flush()
    assert "attention: failed: exit code 1" in Path(session.console.file.name).read_text()
    session.started.clear()
    new = Session(session.folder, session.machine, session.kind, session.console)
    found = {o.station: o for o in run_stations(new)}
    assert session.started == ["attention"] and found["products"].facts["products"]
    session.started.clear()
    new.fresh = True
    assert len(run_stations(new)) == len(session.started) == 5


def test_an_interruption_ends_all_and_keeps_what_had_ended(session, monkeypatch):
    child = command.process.run_child

    def interrupted(argv, **more):
        if argv[3] == "streams":
            raise process.Interrupted(2, SimpleNamespace())
        return child(argv, **more)

    monkeypatch.setattr(command.process, "run_child", interrupted)
    with pytest.raises(process.Interrupted):
        run_stations(session)
    assert session.earlier("products").status == "ok" and session.earlier("streams") is None


# ---- what it leaves ----


@pytest.fixture
def call(session, monkeypatch):
    """The command on that machine, with rows that end as they are told: exit code and folder."""
    monkeypatch.setattr(command, "recall", lambda folder: session.machine)
    monkeypatch.setattr(command, "examined", lambda *given: session.machine)
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: [None for _ in rows])

    def act(*words, end=lambda spec: Status.FAILED):
        def run(suite, planned, out, **more):
            ran = [row.resolved.spec for row in planned]
            return [Result(status=end(spec), spec=spec, reason="made up") for spec in ran]

        monkeypatch.setattr(command, "run_suite", run)
        folder = session.folder
        return cli.main(["calibrate", "--device", "cpu", "--out", str(folder), *words]), folder

    return act


def test_the_command_leaves_a_calibration_and_says_that_rows_failed(call, session):
    code, folder = call()
    (kept,) = store.every(store.OWN)
    assert code == 1 and json.loads((folder / "calibration.json").read_text())["rows"]
    assert kept.ceilings.products == {"float32": 1e11} and kept.device.name == CPU.name
    assert kept.missing["products: float16"] == "slow"
    assert kept.missing["attention"].startswith("failed: exit code 1")
    assert len(kept.rows) == len(specs(session.kind)) and kept.rows[0].reason == "made up"


def test_a_rehearsal_is_not_kept_and_ctrl_c_in_a_row_leaves_no_calibration(call):
    def interrupted(spec):
        raise SuiteInterrupted([])

    code, folder = call(end=interrupted)
    assert code == 130 and not (folder / "calibration.json").exists()
    assert (folder / "stations" / "products.json").exists()
    call("--small")
    assert store.every(store.OWN) == []


# ---- the stations ----

HERE = Asked(device=torch.device("cpu"), small=True)


@pytest.mark.thorough
def test_what_the_stations_of_a_cpu_find_fits_a_calibration():
    found = {
        "products": stations.measure(HERE),
        "streams": stations.measure_streams(HERE),
        "attention": stations.measure_attention(HERE),
        "collective": measure_collective(HERE),
    }
    told = json.loads(json.dumps(found)).items()
    ceilings = build_from([Outcome(station=n, status="ok", facts=f) for n, f in told], Ceilings)
    assert {"float32", "bfloat16"} <= set(ceilings.products) >= set(ceilings.model_products)
    assert all(1e6 < rate < 1e15 for rate in ceilings.products.values())
    assert [s.bytes for s in ceilings.streams] == [2**20, 4 * 2**20]
    kinds = {(a.kernel, a.tokens, a.width) for a in ceilings.attention}
    assert kinds >= {(kernel, 64, width) for kernel in ("flash", "math") for width in (64, 72)}
    assert ceilings.collective.ranks == 2 and ceilings.collective.rate > 1e5


def test_a_type_that_a_library_lacks_is_a_reason_and_no_end(monkeypatch):
    def square(name, side, asked):
        if name == "bfloat16":
            raise RuntimeError("not implemented for 'BFloat16'\nmore")
        return 1e9

    monkeypatch.setattr(stations, "_square", square)
    found = stations.measure(HERE)
    assert found["missing"] == {"bfloat16": "RuntimeError: not implemented for 'BFloat16'"}
    assert "float32" in found["products"] and "bfloat16" not in found["model_products"]


def test_a_station_writes_what_it_measured(tmp_path):
    assert main(["streams", str(tmp_path / "s.json"), "--small"]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["launch_seconds"] > 0
    with pytest.raises(SystemExit):
        main(["strems", str(tmp_path / "s.json")])
