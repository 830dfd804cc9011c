"""ZeRO's further settings, in process: what a recipe chooses, what a launch file may not ask for,
and what accelerate makes of an optimizer that is offloaded."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.planner import pool
from harness.planner.speed.roofline import COLLECTIVES, sent
from harness.resolve import resolve
from harness.spec import Spec
from harness.system import requirements
from strategies import engines, parse
from strategies.base import NotInForce, Parity, Settings, Sizes, load
from strategies.engines.alone import Broken
from strategies.engines.zero import variants
from strategies.engines.zero.config import piece_size
from strategies.engines.zero.inputs import tell_local_ranks
from strategies.evidence.readings import Observed, Ran, Sent
from strategies.launch_file import FOLDER
from tests.made.machines import machine

JSONS = sorted(FOLDER.glob("*.json"))


def launch(recipe: str, processes: int, device: str = "cuda"):
    spec = Spec(recipe=recipe, processes=processes, global_batch=processes, device=device)
    return resolve(spec).launch


def changed(folder: Path, name: str, **zero) -> Path:
    """The launch file ``name`` and its JSON with other settings, in a folder of their own; a key
    that a JSON has outside of its zero_optimization is changed there."""
    config, yaml = json.loads((FOLDER / f"{name}.json").read_text()), FOLDER / f"{name}.yaml"
    for key, value in zero.items():
        outside = key in {*config, "activation_checkpointing", "compile"}
        (config if outside else config["zero_optimization"])[key] = value
    own, file = folder / "own.json", folder / "own.yaml"
    own.write_text(json.dumps(config))
    file.write_text(yaml.read_text().replace(f"launch_configs/{name}.json", str(own)))
    return file


# -- what a recipe chooses --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "processes", "device", "size"),
    [
        ("zero3_hpz", 64, "cuda", 8),
        ("zero3_hpz", 4, "cpu", 2),
        ("zero3_hpz:group=4", 8, "cuda", 4),
        ("zero3_hpz:group=4", 8, "cpu", 4),
    ],
)
def test_a_group_is_a_node_unless_another_is_named(recipe, processes, device, size):
    assert launch(recipe, processes, device).engine.zero["zero_hpz_partition_size"] == size


def test_a_ratio_is_the_files_unless_another_is_named():
    found = launch("zero3_offload_partial:ratio=0.25", 8).engine
    assert found.zero["offload_optimizer"]["ratio"] == 0.25 and found.partly
    assert launch("zero3_offload_partial", 8).engine.zero["offload_optimizer"]["ratio"] == 0.5
    assert not launch("zero3_offload", 8).engine.partly and launch("zero3", 8).engine.choices == {}
    assert str(parse("zero3_offload_partial:ratio=0.5")) == "zero3_offload_partial"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("zero3_hpz:group=1", "group is 1; node, or a whole number of ranks from 2"),
        ("zero3_hpz:group=all", "group is all; node, or a whole number"),
        ("zero3_offload_partial:ratio=1.0", "ratio is 1.0; a share of the optimizer between 0"),
        ("zero3_offload_partial:ratio=0.0", "ratio is 0.0; a share of the optimizer between 0"),
    ],
)
def test_values_out_of_range_are_refused_by_name(recipe, words):
    with pytest.raises(ValueError, match=words):
        parse(recipe)


@pytest.mark.parametrize(
    ("recipe", "processes", "words"),
    [
        ("zero3_hpz", 8, "each 8 of 8 processes takes memory and saves no traffic .* take group=4"),
        ("zero3_hpz:group=2", 2, "take more processes, or zero3"),
        ("zero3_hpz:group=4", 6, "6 processes are not groups of 4; take a group that divides them"),
    ],
)
def test_groups_that_cannot_be_are_refused_before_anything_starts(recipe, processes, words):
    spec = Spec(recipe=recipe, processes=processes, global_batch=processes, device="cuda")
    assert re.search(words, str(resolve(spec).refusal))


def test_pieces_are_small_enough_for_the_share_that_is_asked_for():
    """DeepSpeed deals whole pieces, and gives all of them to the host where there is one."""
    sizes = Sizes(total=10**9, block=10**7, tensor=10**6, bias=10**3)
    for ranks in (1, 8, 1024):
        count = -(-(sizes.total // ranks) // piece_size(sizes, ranks))
        assert 16 <= count <= 17


# -- what a launch file may not ask for -------------------------------------------------------


def test_our_own_files_leave_the_cpu_adam_as_it_was_made():
    offloading = [p.name for p in JSONS if "offload_optimizer" in p.read_text()]
    assert len(offloading) >= 5
    for name in offloading:
        assert json.loads((FOLDER / name).read_text())["zero_force_ds_cpu_optimizer"] is False


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("zero3", {"mics_shard_size": 2}, "there is no mics: .* take hsdp"),
        (
            "zero2",
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            "there is no cpu_checkpointing: .* take checkpoint",
        ),
        ("zero3", {"compile": {"deepcompile": True}}, "there is no deepcompile: .* take compile"),
        ("zero2", {"zero_quantized_weights": True}, "is of stage 3, which gathers weights"),
        (
            "zero3",
            {"zero_quantized_nontrainable_weights": True},
            "there is no quantized_nontrainable_weights: .* take cast",
        ),
        ("zero3", {"zero_quantized_gradients": True}, "there is no qgz: .* take zero2"),
        ("zero2_offload", {"zenflow": {"topk_ratio": 0.1}}, "there is no zenflow: .* take zero3"),
        (
            "zero3",
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            "there is no superoffload: .* take zero3_offload_partial",
        ),
        (
            "zero2_offload",
            {"zero_force_ds_cpu_optimizer": True},
            'without decoupled weight decay and betas: write "zero_force_ds_cpu_optimizer": false',
        ),
        (
            "zero2_offload",
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "a ratio, which is of stage 3",
        ),
    ],
)
def test_what_a_file_may_not_ask_for_is_refused_by_name(name, settings, words, tmp_path):
    assert not isinstance(engines.of_file(changed(tmp_path, name)), Broken)
    found = engines.of_file(changed(tmp_path, name, **settings))
    assert isinstance(found, Broken) and re.search(words, found.refuses(launch("zero2", 2)))


# -- weight decay under offload ---------------------------------------------------------------


def stepped(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """A weight behind three steps, whose last gradients are smaller than its decay."""
    (weight,) = optimizer.param_groups[0]["params"]
    for size in (1.0, 1e-3, 1e-3):
        weight.grad = torch.linspace(-size, size, weight.numel())
        optimizer.step()
    return weight.detach()


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, 1000).roll(17))]


def test_accelerate_would_couple_the_decay_of_a_cpu_adam_that_it_is_given():
    """Unless the JSON forbids it, accelerate makes an offloaded optimizer anew; one that is no
    ``torch.optim.AdamW`` gets Adam's decay, which is added to the gradient: nothing that a run
    without weight decay shows, and a thousandth of the loss with one."""
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    settings = Settings(learning_rate=1e-3, weight_decay=0.1)
    engine = launch("zero2_offload", 2, "cpu").engine
    plain = stepped(torch.optim.AdamW(weights(), **settings.adam))
    make = load(engine.host_adamw)
    ours = make(weights(), **settings.adam)
    assert ours.adam_w_mode and torch.allclose(stepped(ours), plain, rtol=0, atol=1e-6)
    remade = map_pytorch_optim_to_deepspeed(make(weights(), **settings.adam))
    assert not remade.adam_w_mode
    away = (stepped(remade) - plain).abs()
    assert away.max() > settings.learning_rate and (away > 1e-5).float().mean() > 0.3
    without = Settings(learning_rate=1e-3)
    same = map_pytorch_optim_to_deepspeed(make(weights(), **without.adam))
    plain = stepped(torch.optim.AdamW(weights(), **without.adam))
    assert torch.allclose(stepped(same), plain, rtol=0, atol=1e-6)


def test_who_asks_again_for_the_processor_starts_no_process(monkeypatch):
    """Each CPU Adam asks, and each op that is loaded."""
    import cpuinfo
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    from strategies.engines.zero import processor  # noqa: F401 (asks)

    monkeypatch.setattr(subprocess, "Popen", None)
    assert CPUAdamBuilder().simd_width().startswith("-D__")
    assert cpuinfo.get_cpu_info()["arch"] and cpuinfo.get_cpu_info() is cpuinfo.get_cpu_info()


# -- predicted for GPUs -----------------------------------------------------------------------


@pytest.mark.thorough
def test_a_plan_knows_what_stays_within_a_node_and_what_lies_on_the_host(tmp_path):
    """Rank 0 of sixteen GPUs on two nodes, beside ZeRO-3's."""
    recipes = ("zero3", "zero3_hpz", "zero3_offload_partial", "zero3_qwz")
    base = Spec(recipe="zero3", model="DiT-S/4:depth=2", data="synthetic", device="cuda",
                processes=16, global_batch=16)  # fmt: skip
    asked = [resolve(dataclasses.replace(base, recipe=recipe)) for recipe in recipes]
    plain, again, partial, eight = pool.predict_all(asked, tmp_path)
    assert {found.method for found in (plain, again, partial, eight)} == {"trace"}
    told = [sent(found.work, 16, 8) for found in (plain, again)]
    assert told[0].within == 0 < told[1].within
    assert sum(told[1]) == pytest.approx(told[0].across, rel=0.01), "as much, by other ways"
    # Of two blocks ZeRO-3 keeps most from forward to backward, and gathers the rest alone again.
    assert told[1].across < 0.95 * told[0].across
    states = [found.steady.categories["optimizer_state"] for found in (plain, partial)]
    assert states[1] == pytest.approx(states[0] / 2, rel=0.15)
    hosted = partial.host_steady.categories["optimizer_state"]
    assert hosted == pytest.approx(states[0] - states[1], rel=0.02)
    # In forward, where nothing but weights travels, one byte for four and a scale for thousands.
    gathers = [
        sum(w.bytes * w.count for w in found.work if w.phase == "forward" and w.kind in COLLECTIVES)
        for found in (plain, eight)
    ]
    assert gathers[1] == pytest.approx(gathers[0] / 4, rel=0.05)


# -- weights in 8 bits on their way (qwZ) -----------------------------------------------------


@pytest.mark.parametrize(
    ("processes", "words"),
    [(1, "one process gathers nothing"), (16, None),
     (64, "weight of 384384 elements is 6006, and DeepSpeed quantises multiples of 8; take")],
)  # fmt: skip
def test_a_share_that_the_kernels_cannot_take_is_refused_by_name(processes, words):
    spec = Spec(recipe="zero3_qwz+bf16", model="DiT-S/4", data="synthetic", device="cuda",
                processes=processes, global_batch=processes)  # fmt: skip
    refusal = resolve(spec).refusal
    assert refusal is None if words is None else re.search(words, str(refusal)), refusal


def test_a_cpu_has_no_kernels_to_quantise_with(tmp_path):
    """As DeepSpeed's accelerator for it says; where there is a GPU the op is compiled."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    assert CPU_Accelerator().create_op_builder("QuantizerBuilder").NAME.endswith("not_implemented")
    spec = Spec(recipe="zero3_qwz", data="synthetic", processes=2)
    lack = requirements.obstacle(resolve(spec), machine(tmp_path))
    assert "CUDA kernels, and has none for CPUs" in lack.text and "zero3_hpz" in lack.hint
    assert "quantizer" in requirements.needed_ops([resolve(spec)])
    assert resolve(spec).recipe.parity is Parity.BY_DESIGN


GATHERED = {
    "all in 8 bits": ([("int8", 900), ("float32", 4)], None),
    "none in 8 bits": ([("bfloat16", 900)], "gathered as ['bfloat16'], expected int8"),
    "nothing": ([], "gathered as nothing, expected int8"),
    "some in 16": ([("int8", 900), ("bfloat16", 90)], "['bfloat16'] besides int8"),
    "whole ones beside": ([("int8", 90), ("float32", 900)], "900 bytes of scales"),
}


@pytest.mark.parametrize("case", GATHERED)
def test_the_type_in_which_weights_were_gathered_is_read_off_a_step(case):
    """Collectives of a watched step, made up: no GPU has run the kernels here."""
    sizes, words = GATHERED[case]
    sent = [Sent("_allgather_base_", kind, size, "forward") for kind, size in sizes]
    ran = [Ran("aten::mm", [], "float32", "forward")]
    trained = SimpleNamespace(engine=launch("zero3_qwz", 2).engine, launch=launch("zero3_qwz", 2),
                              observed=Observed(sent=sent, ran=ran))  # fmt: skip
    if words is None:
        assert variants.quantised_evidence(trained)["gathered_bytes"] == 900
        trained.engine = launch("zero3", 2).engine
        words = "900 bytes of weights were gathered in 8 bits, expected none"
    with pytest.raises(NotInForce, match=re.escape(words)):
        variants.quantised_evidence(trained)


def test_deepspeed_asks_no_program_how_many_ranks_a_cpu_s_machine_has(monkeypatch):
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    def asked() -> None:
        raise AssertionError("numactl, in each step")

    monkeypatch.setattr("deepspeed.utils.numa.get_numa_cores", asked)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_SIZE", "")
    monkeypatch.delenv("LOCAL_SIZE")
    tell_local_ranks()
    assert CPU_Accelerator().device_count() == 3
