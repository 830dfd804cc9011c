"""Lint of DeepSpeed settings: a bad file for each rule, and our own files pass."""

from __future__ import annotations

import json

import pytest
from conftest import Case, launched_together

from harness import cli
from harness.commands import lint as lint_command
from harness.resolve import resolve
from harness.result import Status
from harness.spec import Spec
from harness.subjects.dit.presets import PRESETS
from harness.system.machine import recall
from harness.system.requirements import notes
from strategies import users_launch
from strategies.engines.zero import waste as lint
from strategies.launch_file import FOLDER

SPEC = Spec(
    recipe="zero3+bf16", model="DiT-XL/2", data="synthetic", processes=8, global_batch=8
)  # fmt: skip
KEYS = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
RIGHT = dict.fromkeys(("reduce_bucket_size", "sub_group_size"), "auto")
RIGHT |= {f"stage3_{k}": "auto" for k in (*KEYS, "param_persistence_threshold")}
NVME = {"offload_optimizer": {"device": "nvme"}}
# stage, the bad settings, the key named, its cost in bytes a device
XL = 674_834_720
BLOCKS = 2 * 23_905_152
BAD = [
    (2, {"reduce_bucket_size": 10**9}, "reduce_bucket_size", 2 * (10**9 - XL // 16)),
    (3, {"stage3_max_reuse_distance": 2 * 10**9},
     "stage3_max_reuse_distance", 2 * (XL - BLOCKS) * 7 // 8),
    (3,
     {"stage3_max_live_parameters": 10**9, "stage3_prefetch_bucket_size": 10**9},
     "stage3_max_live_parameters", 2 * (XL - BLOCKS) * 7 // 8),
    (3, {"stage3_prefetch_bucket_size": 5 * 10**7},
     "stage3_prefetch_bucket_size", 2 * (5 * 10**7 - BLOCKS // 4) * 7 // 8),
    (3, {"stage3_param_persistence_threshold": 2 * 10**6},
     "stage3_param_persistence_threshold", None),
    (3, {"sub_group_size": 10**9, **NVME}, "sub_group_size",
     16 * (XL - XL // 8) // 8),
]  # fmt: skip


def job_of(spec: Spec) -> lint.Job:
    resolved = resolve(spec)
    itemsize = 2 if "half_compute" in resolved.launch.traits else 4
    return lint.Job(sizes=resolved.subject.survey.sizes, itemsize=itemsize, ranks=spec.processes)


def findings(zero: dict, spec: Spec = SPEC) -> dict[str, lint.Finding]:
    return {f.key: f for f in lint.waste(zero, job_of(spec))}


@pytest.mark.parametrize(("stage", "bad", "key", "cost"), BAD)
def test_each_rule_names_a_bad_setting_its_bytes_and_the_way_out(
    stage, bad, key, cost, tmp_path, capsys
):
    zero = {"stage": stage, **RIGHT, **bad}
    found = findings(zero)
    assert key in found and f'"{key}": ' in found[key].fix
    if cost is not None:
        assert found[key].bytes == cost
    # The value that the finding names removes it.
    healed = {**zero, key: "auto"}
    assert key not in findings(healed)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"zero_optimization": zero}))
    assert cli.main(["lint", str(path)]) == 1
    (told,) = [x for x in capsys.readouterr().out.splitlines() if f"bad.json: {key} is" in x]
    assert "MiB a device; set" in told


def test_the_bytes_are_those_of_a_real_engine(tmp_path):
    """Two ranks under a bad file that overlaps: both buckets lie in the traced memory."""
    config = json.loads((FOLDER / "zero2.json").read_text())
    config["zero_optimization"] |= {"reduce_bucket_size": 10**7, "overlap_comm": True}
    own = tmp_path / "bad.json"
    own.write_text(json.dumps(config))
    spec = Spec(recipe=f"@{own}", model="DiT-T/8", global_batch=4, processes=2, warmup=1, steps=1)
    file = users_launch.write(users_launch.opened(resolve(spec).launch.engine.file), tmp_path)
    row = launched_together({"run": Case(spec, file=file)}, tmp_path)["run"]
    assert row.status is Status.OK, f"{row.reason}\n{row.log_tail}"
    (found,) = lint.waste(config["zero_optimization"], job_of(spec))
    held = row.ranks[0].categories.gradients
    assert found.bytes < 2 * 4 * 10**7 < held < 1.2 * found.bytes
    assert row.configs["deepspeed"]["zero_optimization"]["overlap_comm"] is True


@pytest.mark.parametrize(("model", "processes"), [("DiT-T/8", 2), ("DiT-XL/2", 64)])
def test_our_own_files_pass(model, processes):
    assert model in PRESETS
    spec = Spec(recipe="zero2", model=model, processes=processes, global_batch=processes)
    found = {path.name: lint_command.findings(path, spec) for path in lint_command.own_files()}
    assert len(found) >= 6 and not any(found.values()), found


def test_a_run_tells_what_its_launch_file_wastes(monkeypatch, tmp_path):
    resolved = resolve(Spec(recipe="zero2", global_batch=16))
    machine = recall(tmp_path)
    assert not any("bucket" in note for note in notes(resolved, machine))
    resolved.launch.engine.zero["reduce_bucket_size"] = 5 * 10**8
    (told,) = [note for note in notes(resolved, machine) if "bucket" in note]
    assert told.startswith("zero2.yaml: reduce_bucket_size is 500000000") and "MiB" in told


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "unreadable as JSON"), ("{}", "no zero_optimization block"),
     ('{"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}',
      "reduce_bucket_size is 'big'"),
     ('{"zero_optimization": {"reduce_bucket_size": 1e400}}', "beyond a float's range"),
     ('{"zero_optimization": {"stage": "two"}}', "stage is 'two'; one of 0, 1, 2, 3"),
     ('{"zero_optimization": {"stage": 3, "offload_optimizer": "cpu"}}',
      "offload_optimizer is 'cpu'; write a block"),
     (None, "No such file or directory; name a DeepSpeed JSON file")],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_bad_input(text, words, tmp_path, capsys):
    path = tmp_path / "odd.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["lint", str(path)]) == 2
    message = capsys.readouterr().err
    assert words in message and len(message.splitlines()) == 1 and "odd.json" in message
