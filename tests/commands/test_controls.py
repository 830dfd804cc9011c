"""``controls``: what is launched, and what its table says. Runs are made up here; the real ones are
in ``tests/worker/test_sabotage.py``."""

from __future__ import annotations

import pytest

from harness import cli
from harness.commands import console, controls, single_run
from harness.launch import launch
from harness.result import Check, Result, Status
from harness.system import machine as machines
from harness.worker.sabotage import HYBRID, SABOTAGES, SHARDED
from harness.worker.sabotage_ranks import (
    BETWEEN,
    CUT,
    NUMBERS,
    RANKS,
    REPEATED,
    SHARED,
    SHARED_NUMBERS,
    SPLIT,
)
from tests.made.machines import machine

PLAIN = ([1.0, 0.9], [0.5, 0.4])


@pytest.fixture
def runs(monkeypatch) -> dict[str, tuple[str, list[str]]]:
    """What was launched: the folder's name -> recipe and further words. A sabotage moves the first
    gradient norm by a thousandth, but for those in the set "unnoticed"."""
    begun: dict = {"unnoticed": set(), "broken": set()}

    def start(resolved, folder, *, timeout, on_status, more) -> Result:
        begun[folder.name] = (resolved.spec.recipe, list(more))
        row = Result(status=Status.OK, spec=resolved.spec, losses=[*PLAIN[0]])
        row.grad_norms, row.evidence = [*PLAIN[1]], {"fp32": {"compute_dtype": "float32"}}
        if more and more[1] not in begun["unnoticed"]:
            row.grad_norms[0] += 5e-4
        if more:
            row.status = Status.VOID
            row.audit = [Check(name="untouched", asked="yes", found=more[1], ok=False)]
        if folder.name in begun["broken"]:
            row.status, row.reason = Status.FAILED, "it fell over"
        return row

    monkeypatch.setattr(launch, "run", start)
    monkeypatch.setattr(single_run, "recall", machines.look)
    monkeypatch.setattr(console, "examine", lambda folder, ops=(), **more: machine(folder))
    return begun


def called(tmp_path, *words: str) -> int:
    return cli.main(["controls", "--device", "cpu", "--out", str(tmp_path), *words])


def test_every_sabotage_and_every_other_way_is_launched(runs, tmp_path, capsys):
    assert called(tmp_path) == 0
    same = (*controls.SAME, *controls.SHARING, *controls.SAME_STAGED)
    broken = {*SABOTAGES, *RANKS, *SHARED, *CUT, *BETWEEN, *SHARDED, *NUMBERS, *SPLIT}
    names = {"plain", "fsdp2", *(name.replace(":", "_") for name in same), *broken}
    assert {name for name in runs if name not in ("unnoticed", "broken")} == names
    assert runs["plain"] == ("ddp", [])
    assert runs["stale"] == ("ddp", ["--sabotage", "stale"])
    assert runs["one_micro_batch_dropped"][0] == "ddp+accumulate:steps=2"
    assert runs["positions_of_the_first_part"][0] == "ddp+sp"
    assert runs["products_not_summed"][0] == "ddp+tp"
    assert runs["one_block_not_reduced"][0] == "fsdp2"
    assert runs["norm_of_one_stage"] == ("pp", ["--sabotage", "norm_of_one_stage"])
    said = capsys.readouterr().out
    assert f"all {len(names) - 1} controls ended as expected" in said
    assert "loss 1e-05, norm 2e-05" in said


def test_replicas_of_stages_are_tried_where_there_are_several(runs, tmp_path):
    assert called(tmp_path, "--processes", "4") == 0
    assert {*REPEATED, *SPLIT} <= set(runs) and runs[next(iter(REPEATED))][0] == "pp"
    assert {runs[name][0] for name in (*SHARED_NUMBERS, "pp_fsdp2")} == {"pp_fsdp2"}
    assert runs["tp+sp"] == ("ddp+tp+sp", [])
    assert runs["hsdp"] == ("hsdp", []) and {runs[name][0] for name in HYBRID} == {"hsdp"}


def test_one_process_trains_alone(runs, tmp_path):
    assert called(tmp_path, "--processes", "1") == 0
    assert runs["checkpoint"][0] == "single+checkpoint"
    others = {*RANKS, *SHARED, *CUT, *BETWEEN, *SHARDED, *HYBRID, *NUMBERS, *SPLIT}
    assert "stale" in runs and not set(runs) & others


@pytest.mark.parametrize("fault", ["unnoticed", "broken"])
def test_a_sabotage_that_is_not_noticed_fails_the_command(fault, runs, tmp_path, capsys):
    runs[fault].add("rounded")
    assert called(tmp_path) == 1
    assert "NOT as expected: rounded" in capsys.readouterr().out


def test_a_run_that_fails_is_told_with_its_reason(runs, tmp_path, capsys):
    runs["broken"].add("again")
    assert called(tmp_path) == 1
    said = capsys.readouterr().out
    assert "NOT as expected: again" in said
    assert "again did not end as expected: failed: it fell over" in said


def test_without_a_plain_run_nothing_is_compared(runs, tmp_path, capsys):
    runs["broken"].add("plain")
    assert called(tmp_path) == 1
    assert "the run without sabotage ended as failed: it fell over" in capsys.readouterr().out
    assert "stale" not in runs
