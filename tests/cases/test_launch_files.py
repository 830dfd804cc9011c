"""Launch files as people have them: each key is understood, refused, or named as not counted."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT, cli
from harness.planner import pool
from harness.planner.export import files, launches
from harness.planner.export.reading import reading
from strategies import CATALOG
from strategies.base import BadInput
from strategies.launch_keys import PATH, check_accelerate, check_deepspeed, table

FILES = Path(__file__).parent / "launch"


@pytest.fixture(autouse=True)
def copies(tmp_path, monkeypatch):
    """Copies of planned files are made in a folder of the test."""
    monkeypatch.setattr(pool, "default_folder", lambda: tmp_path)


def read(*paths: Path, model: str = "pixart-sigma", processes: int | None = None) -> Any:
    return reading(files.read(paths), model, processes)


def written(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def engine_of(made: Any) -> Any:
    return CATALOG[made.recipe.partition("+")[0]].engine("cuda")


def test_an_offloaded_optimizer_is_planned_in_host_memory():
    made = read(FILES / "optimizer-on-cpu.json", processes=2)
    engine = engine_of(made)
    places = (engine.place("optimizer"), engine.place("parameters"))
    assert (engine.stage, places) == (3, ("cpu", "device"))
    assert engine.usual_name == "zero3_offload" and made.recipe.endswith("+bf16")


def test_nvme_is_planned_with_what_it_swaps():
    made = read(FILES / "nvme-both.json")
    engine = engine_of(made)
    assert engine.place("optimizer") == "nvme" and engine.place("parameters") != "device"
    assert [(one.what, one.errs) for one in made.unpredicted] == [
        ("offload_param.device nvme", "less")
    ]


def test_fsdp_checkpoints_if_its_file_says_so_and_its_version_is_told():
    made = read(FILES / "fsdp-checkpointing.yaml")
    assert (made.recipe, made.processes) == ("fsdp2+bf16+checkpoint", 8)
    assert [one.what for one in made.unpredicted] == ["no fsdp_version: 2"]


def test_a_field_s_own_name_is_the_key_that_deepspeed_takes(tmp_path):
    """Its models are filled by name and by alias (zero/config.py: populate_by_name)."""
    zero = {"stage": 3, "gather_16bit_weights_on_model_save": True, "prefetch_bucket_size": 7}
    assert check_deepspeed({"zero_optimization": zero}).faults == []
    assert check_deepspeed({"zero_optimization": {**zero, "buffer_sise": 1}}).faults
    config = {"bf16": {"enabled": True}, "zero_optimization": zero}
    settings = engine_of(read(written(tmp_path / "ds.json", config), processes=2)).file.settings
    assert settings["zero_optimization"]["stage3_prefetch_bucket_size"] == 7


def test_a_precision_that_is_left_to_the_training_is_assumed_aloud(tmp_path):
    auto = {"enabled": "auto"}
    config = {"zero_optimization": {"stage": 2}, "bf16": auto, "fp16": auto}
    made = read(written(tmp_path / "ds.json", config), processes=2)
    assert any("float32: bf16 and fp16 are auto" in one for one in made.assumed), made.assumed


REFUSED = {
    "unknown-key.json": ("stage3_param_persistance_threshold", "buffer_sise", "not permitted"),
    "two-halves.json": ("bf16 and fp16 are both on", "8, which is not 2 x 1 x 1"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("words", [
    "lint {} --processes 1", "plan --from {} --model pixart-sigma --gpus 1 --gpu RTX-4090 --check",
])  # fmt: skip
def test_what_a_library_refuses_is_refused_with_every_key(name, words, capsys):
    assert cli.main(words.format(FILES / name).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(said in line for said in REFUSED[name]), line


# ---- every key ----

BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
ON = {"device": "cpu"}
ZERO3 = {"stage": 3, "offload_optimizer": ON, "offload_param": ON}
DEEPSPEED = {"distributed_type": "DEEPSPEED", "num_processes": 2}
FSDP = {
    "distributed_type": "FSDP", "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
}  # fmt: skip


def other(field: Mapping[str, Any]) -> list[Any]:
    """Values of a field that differ from its default."""
    kind, usual = field.get("type", ""), field.get("default")
    if "choices" in field:
        return [one for one in field["choices"] if str(one).lower() != str(usual).lower()][-1:]
    if kind == "bool" or str(usual).lower() in ("true", "false"):
        return [str(usual).lower() != "true"]
    if kind in ("int", "float"):
        number = (usual or 0) + 1
        return [number if number <= field.get("le", number) else field["le"] / 2]
    return ["something"]


def outcome(content: Mapping[str, Any], config: Mapping[str, Any] | None) -> Any:
    """The launch as it is understood, or its refusal."""
    found = [files.Found(Path("a.yaml"), files.ACCELERATE, dict(content), data=content)]
    if config is not None:
        found.append(files.Found(Path("b.json"), files.DEEPSPEED, {}, data=config))
    try:
        return dataclasses.asdict(launches.launch_of(found))
    except BadInput as error:
        return str(error)


def of_models() -> Iterator[tuple[str, Any, Any]]:
    """Every field of DeepSpeed's models: its name, and its block without it and with it."""
    usual: dict[str, Any] = {**BASE, "zero_optimization": ZERO3}
    for block, fields in table()["deepspeed"]["models"].items():
        for name, field in fields.items():
            inner = field["fields"] if field["type"] == "model" else {"": field}
            for key, one in inner.items():
                # Older names stand in for blocks, beside which they are refused.
                start = {"stage": 3} if "deprecated" in one else usual.get(block, {})
                without = start if key else {k: v for k, v in start.items() if k != name}
                for value in other(one):
                    given = {**start.get(name, {}), key: value} if key else value
                    yield f"{block}.{name}.{key}", without, {**without, name: given}


def test_each_key_that_deepspeed_reads_changes_the_plan_the_refusal_or_a_note():
    zero3 = {**BASE, "zero_optimization": ZERO3}
    for name, *blocks in of_models():
        configs = [{**zero3, name.partition(".")[0]: block} for block in blocks]
        without, given = (outcome(DEEPSPEED, config) for config in configs)
        assert without != given, name
    start = {**BASE, "zero_optimization": {"stage": 2}}
    for name in table()["deepspeed"]["read"]:
        block, _, key = name.partition(".")
        if block not in table()["deepspeed"]["models"]:  # else above
            value: Any = {key.partition(".")[0]: 3} if key else 3
            assert outcome(DEEPSPEED, {**start, block: value}) != outcome(DEEPSPEED, start), name


def test_each_key_that_deepspeed_has_removed_is_refused():
    for name in table()["deepspeed"]["removed"]:
        block, _, key = name.rpartition(".")
        config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
        config = {**config, key: {}} if not block else {block: {"stage": 2, key: 1}}
        assert any(name in fault for fault in check_deepspeed(config).faults), name


def test_each_key_of_accelerates_blocks_changes_something():
    bases: dict[str, dict[str, Any]] = {
        "deepspeed_config": DEEPSPEED, "fp8_config": {**FSDP, "mixed_precision": "fp8"},
        "megatron_lm_config": {"distributed_type": "MEGATRON_LM", "num_processes": 2},
    }  # fmt: skip
    for block, fields in table()["accelerate"]["blocks"].items():
        base = {block: {}, **bases.get(block, FSDP)}
        plain = outcome(base, None)
        for name, field in fields.items():
            for value in ["1"] if name == "fsdp_version" else other(field):  # the base has 2
                changed = {**base, block: {**base[block], name: value}}
                assert outcome(changed, None) != plain, (block, name)


VALUES = {
    "distributed_type": "MULTI_XPU", "mixed_precision": "fp16", "num_processes": 4,
    "fp8_config": {"fp8_backend": "TE"}, "deepspeed_config": {"zero_stage": 1},
    "fsdp_config": {"fsdp_version": 1}, "parallelism_config": {"parallelism_config_tp_size": 2},
    "megatron_lm_config": {"megatron_lm_tp_degree": 2}, "mpirun_config": {"mpirun_hostfile": "f"},
    "dynamo_config": {"dynamo_backend": "INDUCTOR"}, "use_cpu": True, "num_machines": 2,
    "machine_rank": 1, "main_process_port": 7,
}  # fmt: skip


def test_each_key_of_accelerates_file_changes_something():
    for name in table()["accelerate"]["file"]:
        changed = {**FSDP, name: VALUES.get(name, "something")}
        assert outcome(changed, None) != outcome(FSDP, None), name


def test_a_key_that_accelerate_does_not_know_is_refused_as_accelerate_does():
    (fault,) = check_accelerate({**FSDP, "num_procesess": 2}).faults
    assert "num_procesess" in fault and "num_processes" in fault
    passed = check_accelerate({**FSDP, "fsdp_config": {"fsdp_ofload_params": True}}).passed
    assert any("fsdp_ofload_params" in told for told in passed)


@pytest.mark.parametrize("more", [{"zero_stage": 3}, {"gradient_accumulation_steps": 2}])
def test_keys_beside_a_json_that_accelerate_refuses_are_refused(more, tmp_path):
    written(tmp_path / "z.json", {**BASE, "zero_optimization": {"stage": 2}})
    content = {**DEEPSPEED, "deepspeed_config": {"deepspeed_config_file": "z.json", **more}}
    launch = written(tmp_path / "a.yaml", content)
    with pytest.raises(BadInput, match=f"{next(iter(more))} beside"):
        read(launch)
    (tmp_path / "z.json").unlink()
    with pytest.raises(BadInput, match=r"z.json, which is not there; give it as another FILE"):
        read(launch)


@pytest.mark.parametrize(("processes", "refused"), [(4, False), (12, True), (16, False)])
def test_groups_that_do_not_divide_the_processes_are_refused_as_deepspeed_does(processes, refused):
    config = {**BASE, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}
    faults = check_deepspeed(config, processes).faults
    assert any("zero_hpz_partition_size is 8" in fault for fault in faults) is refused


@pytest.mark.parametrize(("sizes", "recipe"), [
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, "hsdp"), ({"dp_shard_size": 4}, "fsdp2"),
    ({"dp_shard_size": 2, "tp_size": 2}, "fsdp2+bf16+tp"),
])  # fmt: skip
def test_a_mesh_is_read_as_its_sizes_say(sizes, recipe, tmp_path):
    block = {f"parallelism_config_{key}": size for key, size in sizes.items()}
    given = {"num_processes": 4, "mixed_precision": "bf16", "parallelism_config": block}
    launch = written(tmp_path / "a.yaml", {**FSDP, **given})
    assert read(launch, model="DiT-S/4").recipe.startswith(recipe)
    with pytest.raises(BadInput, match="--gpus 4"):
        read(launch, model="DiT-S/4", processes=8)


@pytest.mark.thorough
def test_the_table_is_what_the_libraries_classes_say():
    code = "import json; from docs.make.launch_keys import made; print(json.dumps(made()))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found == json.loads(PATH.read_text()), "run python -m docs.make.launch_keys"
