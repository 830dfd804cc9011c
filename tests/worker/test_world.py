"""A world of N on one process: its memory against real ranks, its audit, and how it is shown."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conftest import TINY, Case, launched_together

from harness import cli
from harness.memory.record import as_measured
from harness.memory.tracer import BY_ENGINE
from harness.planner import pool
from harness.planner.comparison import predicted_categories
from harness.report import write_report
from harness.report.data import grouping
from harness.report.data.answers import answers, fastest_that_fits
from harness.report.rendering import tables
from harness.resolve import resolve
from harness.result import Status
from harness.spec import Spec, SpecError
from harness.suite import file as suite_file
from harness.suite import matrix
from tests.made.results import cpu_set

RECIPES = (
    *("ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"),
    *("fsdp2", "fsdp2_offload", "ddp+ema:place=cpu", "ddp+offload_activations"),
    *("ddp+sp"),
)
PAIR = Spec(recipe="zero2", model="DiT-T/8", global_batch=8, warmup=1, steps=2)
SLACK = 0.005


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Runs that share a start, and their folders: thirteen recipes on two ranks, the same on one
    process that stands for two, and rank 0 of 16 by the real worker."""
    base, module = tmp_path_factory.mktemp("world"), "tests.children.traced"
    real, world = (dataclasses.replace(PAIR, **more) for more in ({"processes": 2}, {"world": 2}))
    wide = dataclasses.replace(PAIR, recipe="zero3", world=16, global_batch=32)
    words = ("--several", *RECIPES)
    cases = {"real": Case(real, words, module=module), "world": Case(world, words, module=module)}
    return launched_together({**cases, "wide": Case(wide)}, base), base


@pytest.fixture(scope="module")
def pairs(found):
    """Traced categories of two real ranks' first, and of one process that stands for two."""
    rows, base = found
    files = [base / name / "traced.json" for name in ("real", "world")]
    assert all(file.exists() for file in files), rows["real"].log_tail
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_process_holds_what_rank_0_of_two_holds(pairs, recipe):
    real, world = (found[recipe] for found in pairs)
    assert real["total"] > 2**22
    for name in ("parameters", "gradients", "optimizer_state", "ema", "activations", "total"):
        assert world[name] == pytest.approx(real[name], rel=SLACK, abs=SLACK * real["total"]), name


def test_sharding_shows_in_the_pair(pairs):
    """The comparison above would hold for two runs that both ignore their sharding."""
    real, world = pairs
    for found in (real, world):
        for recipe in ("zero1", "zero2", "zero3"):
            share = found[recipe]["optimizer_state"] / found["ddp"]["optimizer_state"]
            # Half of two moments and of a float32 master, to ddp's two whole moments.
            assert share == pytest.approx(0.75, rel=0.02), recipe


def test_zero_1_holds_all_gradients_and_a_flat_half_of_them(pairs):
    """At its peak, before they are let go; whatever else lived then would be workspace."""
    for found in (run["zero1"] for run in pairs):
        assert found["phase"] == "backward"
        assert 1.5 * found["parameters"] <= found["gradients"] <= 1.6 * found["parameters"]
        assert found["workspace"] < SLACK * found["total"]


def test_zero_1_and_2_read_apart_by_what_their_tensors_differ_in(pairs):
    """Their resident marks do not: libraries' heap is larger than the difference."""
    for found in pairs:
        assert found["zero2"]["total"] < 0.95 * found["zero1"]["total"]


@pytest.mark.parametrize(
    ("recipe", "base", "moved"),
    [
        ("zero2_offload", "zero2", ("optimizer_state",)),
        ("zero3_offload", "zero3", ("optimizer_state",)),
        ("fsdp2_offload", "fsdp2", ("optimizer_state",)),
        ("ddp+ema:place=cpu", "ddp", ("ema",)),
    ],
)
def test_what_is_offloaded_leaves_the_device_and_is_on_the_host(pairs, recipe, base, moved):
    for run in pairs:
        found, whole = run[recipe], run[base]
        assert found["placed_by"] == BY_ENGINE and whole["host"] is None
        for name in moved:
            assert found[name] == 0
            assert found["host"][name] == pytest.approx(whole[name], rel=0.01)
        # Offload keeps gradients and buffers in host memory as well.
        assert found["total"] <= whole["total"] - sum(whole[name] for name in moved)
        assert found["everywhere"] > found["total"]


def test_activations_that_are_offloaded_are_on_the_host(pairs):
    for run in pairs:
        found, plain = run["ddp+offload_activations"], run["ddp"]
        assert found["host"]["activations"] > 0.3 * plain["activations"]
        assert found["beyond_state"] < plain["beyond_state"]


@pytest.fixture(scope="module")
def wide(found):
    """Rank 0 of 16, by the real worker."""
    return found[0]["wide"]


def test_rank_0_of_sixteen_is_audited(wide):
    assert wide.status is Status.OK, f"{wide.reason}\n{wide.log_tail}"
    checks = {check.name: check for check in wide.audit}
    assert checks["processes"].found == 16 and checks["process group"].found == "fake"
    assert checks["global batch"].found == [32] and checks["micro batch"].found == [2]
    assert "losses finite" not in checks and "data order" in checks
    assert wide.evidence["zero3"]["parameter_share"] == pytest.approx(1 / 16, abs=0.02)
    assert len(wide.ranks) == 1 and wide.losses == [] and wide.grad_norms == []


def test_the_prediction_is_what_the_simulated_rank_of_sixteen_holds(wide, tmp_path):
    predicted = pool.predict_all([resolve(wide.spec)], tmp_path)[0]
    assert predicted.method == "trace", predicted.reason
    true = wide.ranks[0].categories
    found = as_measured(predicted.steady, buckets="gradients")
    assert found.total == pytest.approx(true.total, rel=SLACK)
    assert {p.name: p for p in predicted_categories(found, true) if abs(p.error) > 0.02} == {}


def shown(results):
    return grouping.build(list(results), [])


def test_it_is_shown_apart_and_in_no_answer(wide, tmp_path):
    report = shown([wide, *cpu_set().values()])
    real, simulated = report.groups[0], report.groups[-1]
    assert real.world == 0 and simulated.world == 16
    assert all(not row.spec.world for row in real.rows)
    assert answers(simulated) == [] and fastest_that_fits(simulated) == []
    assert not any(row.versus.front for row in simulated.rows)
    grids = tables.group_grids(simulated)
    assert "Samples/s" not in grids["ranking"].heads and not grids["parity"].lines
    for path in write_report([wide], [], tmp_path):
        if path.suffix in (".html", ".md"):
            text = path.read_text()
            assert "SIMULATED WORLD: one process ran rank 0 of 16." in text
            assert "without communication" in text and "Samples/s as" not in text.split("<h2")[0]


def test_simulated_rows_are_ordered_by_their_peak(wide):
    less = dataclasses.replace(wide, spec=dataclasses.replace(wide.spec, recipe="zero3+checkpoint"))
    ranks = [dataclasses.replace(rank, phases=dict(rank.phases)) for rank in wide.ranks]
    for rank in ranks:
        held = rank.categories
        rank.categories = dataclasses.replace(held, activations=0, workspace=held.workspace // 2)
        rank.step_seconds = [10 * s for s in rank.step_seconds]
    less.ranks = ranks
    group = shown([wide, less]).groups[0]
    assert [row.label for row in group.rows] == ["zero3+checkpoint", "zero3"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"world": 1}, "--world at least 2"),
        ({"world": -4}, "--world at least 2"),
        ({"world": 4, "processes": 2}, "leave --processes out"),
        ({"world": 3, "global_batch": 8}, "use 6 or 9"),
    ],
)
def test_a_world_that_cannot_be_is_bad_input(fields, words):
    with pytest.raises(SpecError, match=words):
        resolve(dataclasses.replace(TINY, recipe="zero2", **fields))


def test_what_trains_alone_refuses_a_world():
    refusal = str(resolve(dataclasses.replace(TINY, world=4)).refusal)
    assert "no world to simulate" in refusal and "leave --world out" in refusal


@pytest.mark.parametrize("recipe", ["ddp+topk", "ddp+compress"])
def test_what_rewrites_the_all_reduce_refuses_a_world(recipe):
    spec = dataclasses.replace(TINY, recipe=recipe, world=4)
    assert "leave --world out" in str(resolve(spec).refusal)
    assert resolve(dataclasses.replace(spec, world=0, processes=2)).refusal is None


def test_a_suite_runs_in_a_world_on_one_process():
    suite = matrix.ad_hoc(["ddp", "zero3"], "cpu")
    specs = matrix.specs(suite, {"world": 8})
    assert {(s.world, s.processes, s.ranks) for s in specs} == {(8, 1, 8)}
    with pytest.raises(suite_file.SuiteError, match="leave --processes out"):
        matrix.specs(suite, {"world": 8, "processes": 2})


def test_the_command_starts_one_process_and_train_knows_no_world(capsys):
    assert cli.main(["run", "--recipes", "zero2", "--world", "64", "--global-batch", "64",
                     "--device", "cpu", "--dry-run"]) == 0  # fmt: skip
    line = capsys.readouterr().out
    assert "--num_processes 1 " in line and "--world 64" in line and "-of64-" in line
    with pytest.raises(SystemExit):
        cli.main(["train", "--recipe", "zero2", "--world", "4"])
