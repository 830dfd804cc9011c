"""ZeRO's further settings, in process: what a launch file may not ask for, what accelerate makes of
an optimizer that is offloaded, and an example file of one's own."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from harness.resolve import resolve
from harness.spec import Spec
from strategies import engines
from strategies.base import Settings, load
from strategies.engines.alone import Broken
from strategies.engines.zero.inputs import tell_local_ranks
from strategies.launch_file import FOLDER

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


# -- what a launch file may not ask for -------------------------------------------------------


def test_our_own_files_leave_the_cpu_adam_as_it_was_made():
    offloading = [p.name for p in JSONS if "offload_optimizer" in p.read_text()]
    assert len(offloading) >= 4
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
        ("zero3", {"zero_quantized_weights": True}, "there is no zero3_qwz: .* take zero3"),
        (
            "zero3",
            {"zero_quantized_nontrainable_weights": True},
            "there is no quantized_nontrainable_weights: .* take cast",
        ),
        ("zero3", {"zero_quantized_gradients": True}, "there is no qgz: .* take zero2"),
        ("zero2_offload", {"zenflow": {"topk_ratio": 0.1}}, "there is no zenflow: .* take zero2"),
        (
            "zero3",
            {"offload_optimizer": {"device": "cpu", "super_offload": True}},
            "there is no superoffload: .* take zero3_offload",
        ),
        (
            "zero2_offload",
            {"zero_force_ds_cpu_optimizer": True},
            'without decoupled weight decay and betas: write "zero_force_ds_cpu_optimizer": false',
        ),
        (
            "zero2_offload",
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
            "there is no zero3_offload_partial: .* take zero3_offload",
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
