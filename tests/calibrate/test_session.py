"""A session of ``calibrate`` on a made machine: order, budget, resuming, and failing stations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import ROOT
from harness.planner import pool
from harness.planner.calibrate import ending, parts, running
from harness.planner.calibrate.parts import (
    LOW,
    PARTS,
    Budget,
    Outcome,
    Setting,
    Station,
    kept,
    schedule,
    stations_of,
)
from harness.planner.calibrate.running import Session, default_jobs
from harness.planner.calibration import store
from harness.report.figures import derive
from harness.resolve import resolve
from harness.result import Peak, Rank, Result, Status
from harness.spec import Spec
from harness.suite.file import load_suite
from harness.suite.run import SuiteInterrupted
from harness.system import gpus
from strategies import CATALOG, parse
from tests.made.calibrations import CPU, made
from tests.made.machines import machine

# ---- stations, in order, within minutes ----


def test_a_station_is_measured_again_if_its_code_changes(monkeypatch):
    rooms = []
    monkeypatch.setattr(parts, "digest", lambda found: rooms.extend(found) or "")
    parts.mark_of(stations_of("memory", Setting(device="cpu"))[0], made(CPU).device, small=False)
    assert rooms and all((ROOT / "harness" / room).is_dir() for room in rooms)


def test_the_check_has_every_strategy_of_the_catalog():
    recipes = [row.recipe for device in ("cpu", "cuda") for row in load_suite("check", device).rows]
    assert {part.name for text in recipes for part in parse(text).strategies} == set(CATALOG)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda", 1), ("cuda", 4)])
def test_every_station_can_be_and_has_a_name_of_its_own(device, gpus, small):
    setting = Setting(device=device, gpus=gpus, gpu_bytes=80 * 2**30, small=small)
    every = [station for part in PARTS for station in stations_of(part, setting)]
    assert len({station.key for station in every}) == len(every)
    assert all(0 < station.minutes <= 30 for station in every)
    rows = [station for station in every if station.kind == "row"]
    assert [r.name for r in rows if resolve(r.spec).refusal] == []
    assert {row.spec.device for row in rows} == {device}
    low = [row for row in rows if row.spec.global_batch == 128 and row.spec.recipe in LOW]
    assert bool(low) == (device == "cuda")


@pytest.mark.parametrize(
    ("given", "usual"), [({"small": True}, "DiT-T/8"), ({"model": "DiT-S/2"}, "DiT-S/2")]
)
def test_a_check_of_another_model_leaves_rows_theirs_that_need_one(given, usual):
    """All of them can be asked for; a vocabulary's loss has no DiT."""
    own = {row.recipe for row in load_suite("check", "cpu").rows if "model" in row.settings}
    checks = stations_of("check", Setting(device="cpu", **given))
    others = {station.name for station in checks if station.spec.model != usual}
    assert own and others == own
    assert [s.name for s in checks if s.name in own and resolve(s.spec).refusal] == []


def test_one_gpu_has_nobody_to_communicate_with():
    one, four = (
        {s.name for s in stations_of("memory", Setting(device="cuda", gpus=n, gpu_bytes=2**36))}
        for n in (1, 4)
    )
    assert four - one >= {"collective", "ddp+bf16", "zero3+bf16+checkpoint"}
    assert "zero2_offload+bf16+checkpoint" in one


def station(name: str, minutes: float, kind: str = "measure") -> Station:
    return Station(name=name, part="memory", kind=kind, minutes=minutes)


def test_what_no_longer_fits_is_skipped_by_name_and_what_is_shorter_still_runs():
    asked = [station("a", 3), station("b", 6), station("c", 4), station("d", 1), station("e", 9)]
    found = schedule(asked, 9.0, {"memory e"})
    assert [one.action for one in found] == ["run", "run", "skip", "skip", "done"]
    assert found[2].reason == "needs about 4.0 min, 0.0 of 9 are left"
    assert [one.action for one in schedule(asked, None, ())] == ["run"] * 5
    assert [o.action for o in schedule(asked[:4], 8.0, ())] == ["run", "skip", "run", "run"]


def test_checks_share_the_time_that_they_run_in_together():
    asked = [station(str(i), 1, "check") for i in range(8)]
    assert [o.action for o in schedule(asked, 2.0, (), at_a_time=4)] == ["run"] * 8
    assert [o.action for o in schedule(asked, 2.0, ())].count("run") == 2


@pytest.mark.parametrize(
    ("gpu_gib", "cores", "memory_gib", "jobs"),
    [(0, 2, 24, 2), (0, 32, 24, 4), (80, 16, 128, 8), (24, 16, 128, 4), (8, 16, 128, 1)],
)
def test_as_many_run_at_a_time_as_fit(gpu_gib, cores, memory_gib, jobs, tmp_path):
    here = machine(tmp_path, cores=cores, memory_bytes=memory_gib << 30)
    assert default_jobs(here, gpu_gib << 30) == jobs


# ---- running ----


@pytest.fixture
def session(tmp_path, monkeypatch):
    """A session whose children are made up: by name, what each leaves or how it fails."""
    said: list[str] = []
    monkeypatch.setattr(store, "OWN", tmp_path / "own")
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(store, "processor", lambda: CPU.name)
    made = Session(
        folder=tmp_path / "s",
        machine=machine(tmp_path),
        setting=Setting(device="cpu"),
        budget=Budget(minutes=None, now=lambda: clock.seconds, began=0.0),
        tell=said.append,
        live=lambda name, seconds: contextlib.nullcontext(),
    )
    made.said, made.clock, made.started = said, clock, []

    def child(argv, *, env, log, timeout, **more):
        words = argv[1:]
        assert env["CUDA_DEVICE_ORDER"] == gpus.order(), "a row's number names the same card"
        if "harness.planner.calibrate.stations" in words:
            name, out = words[2], Path(words[3])
            made.started.append(name)
            clock.seconds += 60
            if name == "attention":
                log.write_text("Traceback\nRuntimeError: no kernel image\n")
                return SimpleNamespace(exit_code=1, signal=None, stopped=None, wall_seconds=1.0)
            out.parent.mkdir(parents=True, exist_ok=True)
            facts = {"products": {"products": {"float32": 1e11}, "missing": {"float16": "slow"}}}
            out.write_text(json.dumps(facts.get(name, {"context": 5})))
        return SimpleNamespace(exit_code=0, signal=None, stopped=None, wall_seconds=1.0)

    monkeypatch.setattr(running.process, "run_child", child)
    monkeypatch.setattr(running, "run_suite", lambda suite, rows, out, **more: [ended(rows[0])])
    return made


def ended(row, status=Status.OK) -> Result:
    odd = row.resolved.spec.recipe == "zero3"
    reason = "made up" if odd else None
    return Result(status=Status.FAILED if odd else status, spec=row.resolved.spec, reason=reason)


def test_a_station_that_fails_ends_no_other_and_says_why(session):
    found = {o.station: o for o in running.run_part("memory", session)}
    assert found["attention"].status == "failed"
    assert found["attention"].reason == "exit code 1: RuntimeError: no kernel image"
    assert found["zero3"].status == "failed" and "made up" in found["zero3"].reason
    others = [o.status for n, o in found.items() if n not in ("attention", "zero3", "zero3 of 8")]
    assert set(others) == {"ok"} and len(others) > 15
    assert any("attention: failed: exit code 1" in line for line in session.said)


def test_load_is_what_others_took_of_the_cores_and_not_the_station_s_own(session, monkeypatch):
    busy, own = iter([100.0, 105.0] + [200.0] * 99), iter([7.0, 11.5] + [20.0] * 99)
    monkeypatch.setattr(running, "busy_now", lambda: next(busy))
    monkeypatch.setattr(running, "_children_seconds", lambda: next(own))
    found = {o.station: o for o in running.run_part("memory", session)}
    assert found["products"].facts["load"] == pytest.approx(0.5), "of a station of one second"
    assert found["streams"].facts["load"] == 0.0


def test_a_station_that_raises_is_a_failure_too(session, monkeypatch):
    def broken(*given, **named):
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(running, "run_suite", broken)
    found = running.run_part("memory", session)
    assert {o.reason for o in found if o.station == "single"} == {"RuntimeError: the disk is gone"}
    assert session.started == ["products", "streams", "standing", "attention", "collective"]


def test_an_interruption_ends_all_and_keeps_what_had_ended(session, monkeypatch):
    def interrupted(*given, **named):
        raise SuiteInterrupted([])

    monkeypatch.setattr(running, "run_suite", interrupted)
    with pytest.raises(SuiteInterrupted):
        running.run_part("memory", session)
    assert kept("memory", "products", session.folder).status == "ok"
    assert kept("memory", "single", session.folder) is None


def test_the_next_call_repeats_only_what_failed(session):
    running.run_part("memory", session)
    session.started.clear()
    again = {o.station: o for o in running.run_part("memory", session)}
    assert session.started == ["attention"]
    assert again["products"].status == "ok" and again["products"].facts["products"]
    session.fresh = True
    session.started.clear()
    running.run_part("memory", session)
    assert len(session.started) == 5


def test_another_device_is_measured_anew(session, monkeypatch):
    running.run_part("memory", session)
    session.started.clear()
    monkeypatch.setattr(store, "processor", lambda: "another CPU, 8 cores")
    del session.device
    running.run_part("memory", session)
    assert len(session.started) == 5


def test_what_no_time_is_left_for_is_skipped_by_name_and_run_by_the_next_call(session):
    session.budget = Budget(minutes=2.5, now=session.budget.now, began=0.0)
    found = {o.station: o for o in running.run_part("memory", session)}
    assert [n for n, o in found.items() if o.status != "skipped"][:3] == [
        "products", "streams", "standing",
    ]  # fmt: skip
    assert found["single"].status == "skipped" and "are left" in found["single"].reason
    session.budget = Budget(minutes=None, now=session.budget.now, began=0.0)
    assert {o.station: o for o in running.run_part("memory", session)}["single"].status == "ok"


def test_what_measuring_costs_is_read_from_its_bench():
    text = (
        "plain     wall    351.2 ms  CPU    349.0 ms  minor faults         9\n"
        "measured  wall    352.0 ms  CPU    349.9 ms  minor faults        10\n"
        "          wall off by +0.23 % (pairs -0.10 to +0.60)\n"
        "          cpu off by +0.30 % (pairs -0.10 to +0.60)\n"
        "bent      wall    440.0 ms  CPU    441.0 ms  minor faults    172000\n"
        "          wall off by +25.30 % (pairs +20.00 to +30.00)\n"
    )
    assert running.meter_share(text) == pytest.approx(0.0023)
    assert running.meter_share("Traceback") is None


# ---- what it leaves ----


def test_a_session_leaves_a_calibration_a_page_and_an_archive(session, monkeypatch):
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: [])
    outcomes = running.run_part("memory", session)
    (session.folder / "memory" / "compiled").mkdir(parents=True)
    (session.folder / "memory" / "compiled" / "kernel.so").write_bytes(b"x")
    (session.folder / "memory" / "large.bin").write_bytes(bytes(ending.FILE_BYTES + 1))
    left = ending.leave(session, outcomes)
    assert left.calibration.ceilings.products == {"float32": 1e11}
    assert left.calibration.missing["products: float16"] == "slow"
    assert left.calibration.missing["attention"].startswith("failed: exit code 1")
    assert left.kept.parent == store.OWN and len(store.every(store.OWN)) == 1
    with tarfile.open(left.archive) as tar:
        names = set(tar.getnames())
    assert {"s/calibration.json", "s/calibration.md"} <= names
    assert not [name for name in names if "kernel.so" in name or "large.bin" in name]
    text = left.page.read_text()
    assert "| products float32 | 0.1 TFLOP/s |" in text and "unmeasured |" in text
    assert "| memory: attention | failed |" in text


def test_a_rehearsal_is_not_kept(session, monkeypatch):
    monkeypatch.setattr(pool, "predict_all", lambda rows, folder, **more: [])
    session.setting = Setting(device="cpu", small=True)
    assert ending.leave(session, running.run_part("memory", session)).kept is None
    assert store.every(store.OWN) == []


def test_numbers_of_a_station_that_failed_are_not_taken():
    good = Outcome(station="products", part="memory", status="ok", facts={"products": {"a": 1.0}})
    bad = Outcome(station="streams", part="memory", status="failed", facts={"launch_seconds": 9.0})
    found = ending.ceilings_of([good, bad])
    assert found.products == {"a": 1.0} and found.launch_seconds is None


# ---- the check, several at a time ----


@pytest.fixture
def checked(session, monkeypatch):
    """A check of three recipes: its outcomes by recipe, of launches that end as they are told."""
    session.jobs, stations = 2, stations_of("check", Setting(device="cpu", small=True))[:3]

    def check(end):
        def run(resolved, folder, *, stop, **more):
            return end(resolved.spec.recipe, stop) or Result(status=Status.OK, spec=resolved.spec)

        monkeypatch.setattr(running.launch, "run", run)
        found = running._checked(stations, session)
        return {outcome.station: (outcome.status, outcome.reason) for outcome in found}

    return check


def again(*_):
    pytest.fail("it was run again")


def test_checks_that_ended_are_kept(checked):
    found = checked(lambda *_: None)
    assert set(found.values()) == {("ok", "")} and len(found) == 3
    assert checked(again) == found


def test_checks_share_the_cores_and_leave_only_what_is_their_own(session, monkeypatch):
    """Twelve runs of sixteen threads each on sixteen cores were ten times slower on an H100."""
    given = {}

    def run(resolved, folder, *, added, **more):
        given.update(added)
        peak = Peak(allocated=1, reserved=2, process=9)
        none = dict(categories=None, host_peak_bytes=0, pinned_bytes=0, nvme_bytes=0)
        times = dict(warmup_seconds=[1.0], step_seconds=[1.0], phase_seconds={})
        place = dict(rank=0, device="cuda:0", baseline_bytes=0, phases={"steady": peak})
        rank = Rank(**place, **none, **times)
        return Result(status=Status.OK, spec=resolved.spec, meter="cuda", ranks=[rank])

    monkeypatch.setattr(running.launch, "run", run)
    session.jobs, session.machine = 2, dataclasses.replace(session.machine, cores=16)
    start = running._start(session, lambda: None)
    found = start(resolve(Spec(recipe="single", model="DiT-T/8")), Path("none"))
    peak = found.ranks[0].phases["steady"]
    assert given == {"OMP_NUM_THREADS": "8"} and found.beside == 2
    assert found.ranks[0].step_seconds == [] and peak == Peak(allocated=1, reserved=2)
    assert derive.need_bytes(found.ranks, "cuda") is None


def test_no_check_begins_when_no_time_is_left(session, checked):
    session.budget = Budget(minutes=0.1, now=session.budget.now, began=0.0)
    reasons = {reason for _, reason in checked(again).values()}
    assert reasons == {"needs about 0.3 min, 0.1 of 0.1 are left"}


def test_a_check_that_raises_ends_no_other(checked):
    def broken(recipe, _):
        if recipe == "single":
            raise OSError("no space left on device")

    ends = sorted(checked(broken).values())
    assert ends == [("failed", "OSError: no space left on device"), ("ok", ""), ("ok", "")]


def test_an_interruption_ends_the_checks_that_run(session, checked):
    def interrupted(recipe, stop):
        if recipe == "single":
            raise KeyboardInterrupt
        while stop() is None:
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        checked(interrupted)
    assert not (session.folder / "stations").exists()


def test_an_outcome_is_read_back(tmp_path):
    one = Outcome(station="a: b/c", part="memory", status="ok", mark="m", facts={"x": [1]})
    one.write(tmp_path)
    assert kept("memory", "a: b/c", tmp_path) == one and kept("memory", "a", tmp_path) is None
