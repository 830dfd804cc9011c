"""Suites: files, specs, the reference measured again, resuming; a fake launcher stands in."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from harness.commands.progress import Progress
from harness.planner import pool
from harness.resolve import resolve, run_name
from harness.result import Result, Status
from harness.spec import Spec, SpecError, located
from harness.suite import matrix
from harness.suite import run as suite_run
from harness.suite.file import SuiteError, known_suites, load_suite
from harness.suite.matrix import specs
from harness.suite.rows import identity, with_reference_again
from tests.made.machines import SUITE, FakeLaunch, machine, named


@pytest.fixture
def suite_file(tmp_path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SUITE)
    return path


def test_the_reference_comes_first_and_single_has_one_process(suite_file):
    found = specs(load_suite(str(suite_file), "cpu"), {})
    assert [s.recipe for s in found] == ["ddp", "zero2", "single", "zero3"]
    assert [s.processes for s in found] == [2, 2, 1, 2]
    assert {s.global_batch for s in found} == {8}
    assert [s.steps for s in found] == [3, 3, 3, 5]


def test_the_command_line_wins_and_repeats(suite_file):
    suite = load_suite(str(suite_file), "cpu")
    found = specs(suite, {"steps": 9, "repeat": 2, "seed": None})
    assert {s.steps for s in found} == {9}
    assert [s.repeat for s in found] == [0] * 4 + [1] * 4


def test_all_gpus_share_a_batch_that_grows_with_them(suite_file):
    suite = load_suite(str(suite_file), "cuda")
    found = specs(suite, {}, gpus=4)
    assert "ddp+tf32" in {s.recipe for s in found}
    assert {s.global_batch for s in found} == {16}
    assert {s.processes for s in found} == {4, 1}
    assert {s.global_batch for s in specs(suite, {"global_batch": 12}, gpus=4)} == {12}
    assert {s.global_batch for s in specs(suite, {"processes": 2}, gpus=4)} == {8}
    with pytest.raises(SuiteError, match="--processes"):
        specs(suite, {}, gpus=0)


def test_a_folder_of_latents_is_where_the_user_is(suite_file, monkeypatch):
    monkeypatch.chdir(suite_file.parent)
    suite = load_suite(str(suite_file), "cpu")
    found = specs(suite, located({"data": "latents:here"}))
    assert {s.data for s in found} == {f"latents:{suite_file.parent}/here"}


@pytest.mark.parametrize("name", known_suites())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_suites_that_come_along_are_sound(name, device, tmp_path):
    suite = load_suite(name, device)
    gpus = 4 if name == "sharding" else 2  # hybrid sharding takes two groups of two
    found = specs(suite, {}, gpus=gpus, gpu_bytes=80 * 2**30)
    planned = suite_run.plan([resolve(spec) for spec in found], tmp_path, machine(tmp_path))
    assert not [row for row in planned if row.status is Status.REFUSED]
    assert found[0].recipe == suite.reference


BAD = {
    "typo": ("cpu:", "cpuu:", "unknown key 'cpuu'; did you mean 'cpu'?"),
    "wrong type": ("steps: 3", "steps: three", "cpu.steps is 'three', not a whole number"),
    "syntax": ("recipes: [", "recipes: [[", "line "),
    "twice": ("[zero2,", "[zero2, zero2,", "'zero2' is there already"),
    "key twice": ("name: mine", "name: mine\nname: his", "line 3: not YAML (key 'name'"),
    "empty": ("[zero2, ddp, single, {recipe: zero3, steps: 5}]", "[]", "recipes is empty"),
    "two of a place": ("[zero2,", "[zero2+zero3,", "both fill the place SHARD"),
    "reference": ("reference: ddp", "reference: zero1", "reference 'zero1' is not among"),
    "two batches": ("global_batch: 8", "global_batch: 8, per_process_batch: 2", "keep one"),
}


@pytest.mark.parametrize("case", BAD)
def test_each_mistake_is_one_line_with_the_way_out(case, suite_file):
    old, new, said = BAD[case]
    suite_file.write_text(SUITE.replace(old, new, 1))
    with pytest.raises(SuiteError) as caught:
        load_suite(str(suite_file), "cpu")
    text = str(caught.value)
    assert said in text
    assert str(suite_file) in text
    assert "\n" not in text


# ---- running a suite ----


def asked(recipes: str, times: int = 1, **given: object) -> list[Spec]:
    """The rows of a suite of these recipes, the reference measured so many times."""
    suite = matrix.ad_hoc(recipes.split(), "cpu")
    return with_reference_again(specs(suite, given), suite.reference, times)


def go(
    out: Path, launch: FakeLaunch, recipes: str, times: int = 1, console=None, **more: object
) -> list[Result]:
    here = more.pop("machine", machine(out))
    rows = [resolve(spec) for spec in asked(recipes, times, data="synthetic")]
    plan, told = suite_run.plan(rows, out, here), Progress(console or Console(quiet=True))
    suite = matrix.ad_hoc(recipes.split(), "cpu")
    with mock.patch.object(suite_run.launch, "run", launch):
        return suite_run.run_suite(suite, plan, out, machine=here, progress=told, **more)


@pytest.mark.parametrize(
    ("others", "times", "order"),
    [
        ("", 3, "ddp"),
        ("zero2 zero3", 2, "ddp zero2 zero3 ddp1"),
        ("zero2 zero3", 3, "ddp zero2 ddp1 zero3 ddp2"),
        ("zero1 zero2 zero3 single", 4, "ddp zero1 ddp1 zero2 zero3 ddp2 single ddp3"),
    ],
)
def test_the_reference_is_measured_first_last_and_between(others, times, order):
    assert named(asked(f"ddp {others}", times)) == order


def test_a_repetition_is_a_run_of_its_own_that_differs_in_nothing_else():
    runs = [run for run in asked("ddp zero2", 3, steps=9) if run.recipe == "ddp"]
    assert len({run_name(run) for run in runs}) == len({run.key for run in runs}) == 3
    assert {dataclasses.replace(run, repeat=0) for run in runs} == {runs[0]}


def test_a_suite_says_how_often(tmp_path):
    file = tmp_path / "mine.yaml"
    for words, often in (("", 3), ("noise_floor: 5\n", 5), ("noise_floor: 1\n", 1)):
        file.write_text(words + SUITE)
        assert load_suite(str(file), "cpu").noise_floor == often
    file.write_text("noise_floor: 0\n" + SUITE)
    with pytest.raises(SuiteError, match="noise_floor is 0; write at least 1"):
        load_suite(str(file), "cpu")
    with pytest.raises(SuiteError, match="noise_floor is 0; give --noise-floor at least 1"):
        asked("ddp zero2", 0)


def test_a_suite_that_was_cut_short_goes_on_with_the_repetition_it_lacks(tmp_path):
    launcher = FakeLaunch()
    found = go(tmp_path, launcher, "ddp zero2 zero3", 3)
    assert launcher.started == ["ddp", "zero2", "ddp1", "zero3", "ddp2"]
    assert [r.spec.repeat for r in found] == [0, 0, 1, 0, 2]
    (last,) = tmp_path.glob("runs/ddp-r2-*/result.json")
    last.unlink()
    again = FakeLaunch()
    assert len(go(tmp_path, again, "ddp zero2 zero3", 3)) == 5
    assert again.started == ["ddp2"]


def test_a_reference_that_ended_badly_is_not_tried_again(tmp_path, capsys):
    launcher = FakeLaunch(ddp=Status.GPU_OOM)
    found = go(tmp_path, launcher, "ddp zero2 zero3", 3, console=Console(width=100))
    assert launcher.started == [r.spec.recipe for r in found] == ["ddp", "zero2", "zero3"]
    text = capsys.readouterr().out
    assert "[3/5] ddp (repeat 1): not run, because its first run ended as gpu_oom" in text


def test_a_second_run_repeats_only_what_may_end_otherwise(tmp_path):
    recipes = "ddp zero2 zero3 single"
    ends = {"zero2": Status.FAILED, "zero3": Status.VOID}
    first, again, fresh = FakeLaunch(**ends), FakeLaunch(), FakeLaunch()
    go(tmp_path, first, recipes)
    results = go(tmp_path, again, recipes)
    go(tmp_path, fresh, recipes, fresh=True)
    assert first.started == fresh.started == recipes.split()
    assert again.started == ["zero2"]
    assert [r.status for r in results] == [Status.OK, Status.OK, Status.VOID, Status.OK]


def test_other_code_or_another_machine_is_measured_again(tmp_path, monkeypatch):
    again = FakeLaunch()
    go(tmp_path, FakeLaunch(), "ddp")
    go(tmp_path, again, "ddp", machine=machine(tmp_path, cores=64))
    monkeypatch.setattr("harness.suite.rows.digest", lambda rooms: "changed")
    go(tmp_path, again, "ddp")
    assert again.started == ["ddp", "ddp"]


def test_rows_that_cannot_run_are_results_too(tmp_path):
    here, launch = machine(tmp_path), FakeLaunch()
    here.probe["ops"]["async_io"] = {"ok": False, "reason": "not compatible", "built": False}
    found = go(tmp_path, launch, "ddp zero3_nvme ddp+bf16_master", machine=here)
    assert launch.started == ["ddp"]
    assert [r.status for r in found] == [Status.OK, Status.UNSUPPORTED, Status.REFUSED]
    assert "libaio-dev" in found[1].way_out
    assert all(r.reason and r.way_out and r.command for r in found[1:])
    written = json.loads(next(tmp_path.glob("runs/zero3_nvme*/result.json")).read_text())
    assert written["status"] == "unsupported"


def test_interrupted_keeps_what_was_measured(tmp_path):
    launch = FakeLaunch(zero2=KeyboardInterrupt())
    with pytest.raises(suite_run.SuiteInterrupted) as caught:
        go(tmp_path, launch, "ddp zero2 zero3")
    assert [r.spec.recipe for r in caught.value.results] == ["ddp"]
    again = FakeLaunch()
    go(tmp_path, again, "ddp zero2 zero3")
    assert again.started == ["zero2", "zero3"]


def test_bad_input_in_the_last_row_starts_nothing(tmp_path):
    launch = FakeLaunch()
    with pytest.raises(ValueError, match="does not divide"):
        go(tmp_path, launch, "ddp ddp+accumulate:steps=3")
    assert launch.started == []


@pytest.mark.parametrize("status", [Status.OK, Status.INTERRUPTED])
def test_the_row_that_was_running_is_kept_as_far_as_it_came(tmp_path, status):
    class Cut(FakeLaunch):
        def __call__(self, resolved, folder, *, timeout, on_status) -> Result:
            super().__call__(resolved, folder, timeout=timeout, on_status=on_status)
            raise KeyboardInterrupt

    with pytest.raises(suite_run.SuiteInterrupted) as caught:
        go(tmp_path, Cut(ddp=status), "ddp")
    assert [r.status for r in caught.value.results] == [status]
    again = FakeLaunch()
    go(tmp_path, again, "ddp")
    assert again.started == ([] if status is Status.OK else ["ddp"])


def test_two_suites_do_not_share_a_folder(tmp_path):
    def second(*args: object, **more: object) -> Result:
        with pytest.raises(suite_run.OutputError, match="another run"):
            go(tmp_path, FakeLaunch(), "ddp")
        raise KeyboardInterrupt

    with pytest.raises(suite_run.SuiteInterrupted):
        go(tmp_path, second, "ddp")


def test_identity_moves_with_the_spec_alone(tmp_path):
    asked, here = resolve(Spec(recipe="ddp", processes=2)), machine(tmp_path)

    def other(**fields):
        return dataclasses.replace(asked, spec=dataclasses.replace(asked.spec, **fields))

    mark = identity(asked, here)
    assert mark == identity(asked, dataclasses.replace(here, disk_free_bytes=1))
    assert mark != identity(other(seed=1), here)
    folder = tmp_path / "imagenet256_features"
    folder.mkdir()
    latents = other(data=f"latents:{tmp_path}")
    before = identity(latents, here)
    assert before == identity(latents, here) != mark
    (folder / "0.npy").touch()
    assert identity(latents, here) != before


def test_a_row_keeps_its_recipe_and_its_batch_on_any_number_of_processes(suite_file):
    """What cannot be is refused, with the reason, and stays in the report."""
    suite = load_suite(str(suite_file), "cpu")
    found = specs(suite, {"processes": 1, "repeat": 1})
    assert sorted(s.recipe for s in found) == sorted(row.recipe for row in suite.rows)
    refused = {str(resolve(s).refusal) for s in found if s.recipe == "ddp"}
    assert len(refused) == 1 and "use single" in refused.pop()


def test_a_batch_that_does_not_divide_refuses_its_row_alone():
    spec = Spec(recipe="ddp", data="synthetic", processes=2, global_batch=7)
    refusal = resolve(spec, whole=False).refusal
    assert "global_batch 7 does not divide by 2 processes" in refusal.text
    assert refusal.hint == "use 6 or 8"
    with pytest.raises(SpecError, match="use 6 or 8"):
        resolve(spec)


def test_a_file_system_without_locks_is_not_another_run(tmp_path, monkeypatch, capsys):
    def flock(stream, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with suite_run._alone(tmp_path):
        text = capsys.readouterr().err
    assert os.strerror(errno.ENOLCK) in text and "goes unnoticed" in text


# ---- a batch that fits ----


GIB = 2**30


@pytest.mark.parametrize(
    ("model", "gib", "processes", "wanted"),
    [
        ("DiT-XL/2", 139, 1, 64),
        ("DiT-XL/2", 80, 8, 32),  # the paper's global batch of 256
        ("DiT-XL/2", 24, 2, 8),
        ("DiT-XL/2", 12, 1, 4),  # not even the state fits: the rows that save memory are left
        ("DiT-T/8", 24, 1, 64),
    ],
)
def test_the_batch_of_a_suite_fits_the_smallest_gpu(model, gib, processes, wanted):
    settings, room = {"model": model, "data": "synthetic"}, matrix.HEADROOM * gib * GIB
    assert matrix.fitting_batch(settings, gib * GIB, processes) == wanted
    if wanted not in (matrix.most(processes), 4):
        subject = resolve(Spec(recipe="ddp", **settings)).subject
        fits = [matrix.plain_bytes(subject, n * wanted, ema=True) <= room for n in (1, 2)]
        assert fits == [True, False]


def test_a_batch_that_fits_is_a_process_s():
    suite = load_suite("default", "cuda")
    found = specs(suite, {}, gpus=2, gpu_bytes=139 * GIB)
    assert {s.global_batch for s in found} == {128}
    assert specs(suite, {"global_batch": 6}, gpus=2)[0].global_batch == 6
    with pytest.raises(SuiteError, match="--global-batch"):
        specs(suite, {}, gpus=2)


@pytest.mark.thorough
def test_the_rule_of_thumb_is_the_trace_within_two_percent(tmp_path):
    """Of states that outweigh activations, and of activations that outweigh states."""
    plain = Spec(recipe="ddp", model="", data="synthetic", device="cuda", processes=2)
    cases = [("DiT-S/4", 64, 0.9), ("DiT-B/8", 4, 0.0), ("DiT-B/2", 16, 0.9), ("DiT-L/2", 16, 0.0)]
    specs = [dataclasses.replace(plain, model=m, global_batch=2 * n, ema=e) for m, n, e in cases]
    rows = [resolve(spec) for spec in specs]
    found = pool.predict_all(rows, tmp_path)
    for row, (_, samples, ema), one in zip(rows, cases, found, strict=True):
        assert one.method == "trace", one.reason
        rule = matrix.plain_bytes(row.subject, samples, ema=ema > 0)
        assert rule == pytest.approx(one.steady.bytes, rel=0.02), row.spec.model
