"""Launching: the line that is shown, the row that is written, and what accelerate makes of it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness import ROOT, files
from harness.launch import launch
from harness.report import write_report
from harness.resolve import resolve
from harness.result import Status, load
from harness.spec import Spec
from harness.system import process, tree
from harness.system.process import Ended, run_child
from tests.made.living import Looks, left, until

SPEC = Spec(recipe="single", model="DiT-T/4", data="synthetic")


def worker(mode: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.children.worker", mode, str(folder)]


def go(mode: str, folder: Path, timeout: float = 300.0, **options):
    words = worker(mode, folder)
    return launch.run(resolve(SPEC), folder, timeout=timeout, argv=lambda port: words, **options)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(process, "LINGER_SECONDS", 0.3)


def test_a_good_run_keeps_the_workers_result_and_adds_the_launch(tmp_path):
    seen = []

    def on_status(status):
        seen.append(status)
        if status["phase"] == "measure":
            (tmp_path / "seen").touch()

    row = go("good_once_seen", tmp_path, on_status=on_status)
    assert row.status is Status.OK and row.losses == [1.0]
    assert row.launch.exit_code == 0 and row.launch.tree_peak_bytes > 1 << 20
    assert left(tmp_path) == []
    assert row.command == launch.display(resolve(SPEC), tmp_path) and row.started
    assert load(tmp_path / "result.json") == row
    told = [(status["phase"], status["step"], status["of"]) for status in seen]
    assert ("measure", 1, 2) in told


def test_the_result_decides_and_the_exit_code_is_kept(tmp_path):
    row = go("good_then_exit_1", tmp_path)
    assert row.status is Status.OK and row.launch.exit_code == 1


@pytest.mark.parametrize(
    ("mode", "status", "phase", "peak"),
    [
        ("cuda_oom", Status.GPU_OOM, "warmup", 7000),
        ("memory", Status.HOST_OOM, "load", 7000),
        ("killed", Status.FAILED, "measure", 1000),
        ("torn", Status.FAILED, "start", None),
    ],
)
def test_a_run_that_did_not_finish_says_where_and_why(tmp_path, mode, status, phase, peak):
    row = go(mode, tmp_path)
    assert (row.status, row.phase, row.peak_so_far_bytes) == (status, phase, peak)
    assert row.reason and row.way_out and row.parity == "exact" and row.micro_batch == 16
    assert load(tmp_path / "result.json") == row


def test_a_log_s_control_characters_reach_neither_the_row_nor_its_first_report(tmp_path):
    row = go("noisy", tmp_path)
    assert row.reason.endswith("ValueError: red ? ? ? turned") and "20%\n fine" in row.log_tail
    write_report([row], [], tmp_path)
    for path in [tmp_path / "result.json", *tmp_path.glob("report.*")]:
        text = path.read_text(encoding="utf-8")
        assert not set(text) & {"\x00", "\x1b", "\r", "\u202e"} and "\\u001b" not in text, path


def test_what_a_run_recorded_before_it_was_killed_is_named_and_then_replaced(tmp_path):
    assert go("killed_while_recorded", tmp_path).recordings == ["snapshot.rank0.pickle"]
    assert go("killed", tmp_path).recordings == []


def test_the_deadline(tmp_path, monkeypatch):
    clock = process.time.monotonic

    def past_the_deadline_once_ready() -> float:
        return clock() + 300.0 * (tmp_path / "ready").exists()

    ticking = SimpleNamespace(**{**vars(process.time), "monotonic": past_the_deadline_once_ready})
    monkeypatch.setattr(process, "time", ticking)
    row = go("hang", tmp_path, timeout=300.0)
    assert row.status is Status.TIMEOUT and row.launch.killed and not left(tmp_path)
    assert "phase measure, step 4" in row.reason and "--timeout" in row.way_out


def test_a_rank_that_failed_and_hangs_is_not_waited_for(tmp_path):
    row = go("fail_and_hang", tmp_path)
    assert row.status is Status.FAILED and "the loss is nan" in row.reason


def test_a_taken_port_is_tried_again(tmp_path):
    row = go("port_taken", tmp_path)
    assert row.status is Status.OK and (tmp_path / "tries").read_text() == "3"


def test_what_an_earlier_try_left_is_removed(tmp_path):
    go("good", tmp_path)
    (tmp_path / "nvme").mkdir()
    row = go("killed", tmp_path)
    assert row.status is Status.FAILED and not (tmp_path / "nvme").exists()


def test_an_interrupted_run_is_a_row_and_then_ends_the_suite(tmp_path):
    def interrupt(status: dict) -> None:
        if status["phase"] == "measure":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        go("hang", tmp_path, on_status=interrupt)
    assert load(tmp_path / "result.json").status is Status.INTERRUPTED


def test_a_folder_that_cannot_be_written_is_said_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(files.OutputError, match=r"cannot write to .*; choose another"):
        go("good", tmp_path / "file" / "run")
    with pytest.raises(files.OutputError, match="cannot start /no/such"):
        launch.run(resolve(SPEC), tmp_path, timeout=9, argv=lambda port: ["/no/such/launcher"])


def test_the_shells_launch_variables_do_not_reach_the_run(tmp_path, monkeypatch):
    gone = {"ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "LOCAL_RANK", "PET_NNODES"}
    for name in (*gone, "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MY_PROXY", "kept")
    go("environment", tmp_path)
    found = json.loads((tmp_path / "env.json").read_text())
    assert found["MY_PROXY"] == "kept" and found["CUDA_VISIBLE_DEVICES"] == ""
    assert not gone & found.keys()


def test_what_a_run_compiles_is_not_found_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "shared"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "shared"))
    folder = tmp_path / "run"
    for _ in range(2):
        row = go("compiling", folder)
        assert row.status is Status.OK, "its caches were empty when it began"
        caches = json.loads((folder / "caches.json").read_text())
        assert all(Path(cache).is_relative_to(folder) for cache in caches)
        assert not any(Path(cache).exists() for cache in caches)


def test_the_line_shown_is_a_plain_accelerate_launch():
    spec = Spec(recipe="zero3+bf16", processes=2)
    words = shlex.split(launch.display(resolve(spec), ROOT / "results" / "runs" / "x"))
    assert words[0] == "env" and "DS_ACCELERATOR=cpu" in words
    plain = words[words.index("launch") :]
    assert plain == [
        *("launch", "--config_file", "launch_configs/zero3.yaml", "--num_processes", "2"),
        *("--main_process_port", "0", "--log_dir", "/dev/null"),
        *("-m", "harness.train", "--recipe", "zero3+bf16"),
        *("--processes", "2", "--out", "results/runs/x"),
    ]
    ddp, zero1 = Spec(recipe="ddp"), Spec(recipe="zero1", processes=2)
    on_cpu = [launch.environment(resolve(s)).get("ACCELERATE_USE_CPU") for s in (ddp, zero1)]
    assert on_cpu == ["true", None], "DeepSpeed chooses by itself"
    on_gpu = launch.environment(resolve(Spec(recipe="zero3", device="cuda")))
    assert "CUDA_VISIBLE_DEVICES" not in on_gpu


STARTED = """
import json, os, sys
import torch
from torch import distributed
from harness.resolve import resolve
from harness.spec import Spec
from harness.worker.setup import make_accelerator
here = make_accelerator(resolve(Spec(recipe=sys.argv[1], processes=2)))
groups = [distributed.group.WORLD, distributed.new_group()]
gloo = [group._get_backend(torch.device("cpu")).options for group in groups]
facts = {"type": here.distributed_type.value, "processes": here.num_processes,
         "device": here.device.type, "precision": here.mixed_precision,
         "threads": os.environ["OMP_NUM_THREADS"],
         "timeouts": [one._timeout.total_seconds() for one in gloo]}
with open(f"{os.path.dirname(__file__)}/rank{here.process_index}.json", "w") as stream:
    json.dump(facts, stream)
here.end_training()
"""
"""A script that says how accelerate started it."""


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "kind"), [("zero2", "DEEPSPEED"), ("ddp", "MULTI_CPU")])
def test_accelerate_starts_what_the_launch_file_says(tmp_path, recipe, kind):
    processes = 2
    spec = Spec(recipe=recipe, processes=processes)
    words = launch.command(resolve(spec), tmp_path, port=launch.free_port())
    (tmp_path / "started.py").write_text(STARTED)
    script = [*words[: words.index("-m")], str(tmp_path / "started.py"), recipe]
    env = {**os.environ, **launch.environment(resolve(spec)), **launch.group_limit(600.0)}
    env["PYTHONPATH"] = str(ROOT)
    ended = process.run_child(script, cwd=ROOT, env=env, log=tmp_path / "log", timeout=240)
    said = (tmp_path / "log").read_text()
    assert ended.exit_code == 0, said
    ranks = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    threads = launch.environment(resolve(spec))["OMP_NUM_THREADS"]
    facts = {"type": kind, "processes": processes, "device": "cpu", "precision": "no"}
    facts["timeouts"] = [660.0, 660.0]
    assert ranks == [{**facts, "threads": threads}] * processes
    assert "were not passed to" not in said and "Setting OMP_NUM_THREADS" not in said
    # launcher and workers, and at most one tool that DeepSpeed asks while each is importing it
    assert ended.tree_processes <= 1 + processes * (1 + (kind == "DEEPSPEED"))


@pytest.mark.parametrize(("deadline", "told"), [(300.0, "360.0"), (86400.0, None), (None, None)])
def test_the_deadline_comes_before_the_timeout_of_the_ranks_groups(tmp_path, deadline, told):
    """But not a long one: a hang would go on until then."""
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    words = [sys.executable, "-c", code, str(tmp_path / "variables.json")]
    launch.run(resolve(SPEC), tmp_path, timeout=deadline, argv=lambda port: words)
    found = json.loads((tmp_path / "variables.json").read_text())
    assert found.get("HEADROOM_GROUP_SECONDS") == told


# ---- real children: whatever ends a run, nothing of it is left, and nothing else is touched ----


def child(mode: str, folder: Path, **options) -> Ended:
    options = {"timeout": 300.0, "scratch": (folder / "nvme",), **options}
    return run_child(
        worker(mode, folder), cwd=ROOT, env=dict(os.environ), log=folder / "log.txt", **options
    )


@pytest.mark.parametrize("mode", ["daemon", "bare_daemon"])
def test_a_daemon_that_forked_away_is_found_and_ended(tmp_path, mode):
    ended = child(mode, tmp_path)
    assert ended.exit_code == 0
    assert (tmp_path / "daemon.pid").exists() and not left(tmp_path)


def test_a_child_that_hangs_after_its_work_is_ended(tmp_path):
    done = tmp_path / "result.json"
    ended = child("good_then_hang", tmp_path, finished=done.exists)
    assert ended.stopped == "lingered" and not left(tmp_path)


def test_a_foreign_process_of_the_same_name_is_not_touched(tmp_path):
    (tmp_path / "foreign").mkdir()
    foreign = subprocess.Popen(worker("hang", tmp_path / "foreign"), cwd=ROOT)
    segment = Path(f"/dev/shm/psm_foreign_{tmp_path.name}")
    try:
        until((tmp_path / "foreign" / "ready").exists)
        (tmp_path / "ours").mkdir()
        child("hang", tmp_path / "ours", timeout=1.0, on_tick=lambda _: segment.touch())
        assert not left(tmp_path / "ours")
        assert foreign.poll() is None and segment.exists()
    finally:
        foreign.kill()
        foreign.wait()
        segment.unlink(missing_ok=True)


def test_shared_memory_and_swap_of_the_tree_are_removed(tmp_path):
    child("shared_memory", tmp_path, on_tick=Looks(tmp_path))
    names = json.loads((tmp_path / "ready").read_text())
    assert len(names) == 2 and not any(Path(name).exists() for name in names)
    assert not (tmp_path / "nvme").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_harness_ends_the_tree_then_it(tmp_path, number):
    harness = start_harness("daemon_and_hang", tmp_path)
    harness.send_signal(number)
    said, _ = harness.communicate(timeout=120)
    assert harness.returncode == 7
    assert said.split() == ["interrupted", "by", number.name, "interrupted"]
    assert not left(tmp_path)


def test_a_killed_harness_leaves_nothing_and_touches_nothing_else(tmp_path):
    """A folder's name may have a line feed, and the rest of it may look like another path."""
    victim = tmp_path / "victim"
    (victim / "nvme").mkdir(parents=True)
    folder = Path(f"{tmp_path}/x\n{victim}")
    folder.mkdir(parents=True)
    harness = start_harness("daemon_and_hang", folder)
    (folder / "nvme").mkdir()
    harness.kill()
    harness.wait()
    until(lambda: not (folder / "nvme").exists() and not left(folder))
    assert (victim / "nvme").exists()


def test_a_killed_guard_leaves_nothing(tmp_path):
    harness = start_harness("daemon_and_hang", tmp_path)
    until((tmp_path / "seen").exists)
    (guard,) = psutil.Process(harness.pid).children()
    guard.kill()
    assert harness.wait(120) == 0
    assert not left(tmp_path)


def test_a_killed_harness_leaves_no_shared_memory(tmp_path):
    harness = start_harness("shared_memory_and_hang", tmp_path)
    until((tmp_path / "seen").exists)
    harness.kill()
    harness.wait()
    names = json.loads((tmp_path / "ready").read_text())
    until(lambda: not left(tmp_path) and not any(Path(name).exists() for name in names))


HARNESS = """
import os, sys
from pathlib import Path
from harness.system import process
from tests.made.living import Looks
process.GRACE_SECONDS, folder = 0.5, Path(sys.argv[-1])
try:
    process.run_child(sys.argv[1:], cwd=Path.cwd(), env=dict(os.environ), log=folder / "log.txt",
                      timeout=300, on_tick=Looks(folder), scratch=(folder / "nvme",))
except process.Interrupted as error:
    print(error, error.ended.stopped)
    sys.exit(7)
"""
"""A stand-in for the harness, to be killed: it runs one worker, and says how the run was ended."""


def start_harness(mode: str, folder: Path) -> subprocess.Popen:
    argv = [sys.executable, "-c", HARNESS, *worker(mode, folder)]
    harness = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    until((folder / "ready").exists)
    return harness


def test_a_stale_compile_lock_is_freed_and_a_held_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    old = time.time() - 2 * tree.STALE_SECONDS
    paths = [tmp_path / "py" / name / "lock" for name in ("stale", "held", "young")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(paths[0], (old, old))
    os.utime(paths[1], (old, old))
    with subprocess.Popen(["sleep", "60"], stdin=paths[1].open()) as holder:
        assert tree.free_stale_locks() == [paths[0]]
        assert [path.exists() for path in paths] == [False, True, True]
        paths[2].unlink()
        assert tree.awaited().startswith("compiling held, ") and str(paths[1]) in tree.awaited()
        holder.kill()
    paths[1].touch()
    assert tree.awaited().startswith(f"waiting for {paths[1]}, ")


@pytest.mark.parametrize(
    ("named", "plain"),
    [("8.0;9.0a+PTX", "8.0;9.0+PTX"), ("12.0f 8.6", "12.0 8.6")],
)
def test_deepspeed_gets_architectures_that_it_can_read(named, plain, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    process.plain_architectures()
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == plain
