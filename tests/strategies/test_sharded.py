"""FSDP2's evidence on one process that stands for rank 0 of several (test_runs has real ones)."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from conftest import TINY, observe_here
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from strategies import CATALOG, parse
from strategies.base import NotInForce
from strategies.engine import Engine, TrainingRun
from strategies.engines.fsdp import shard
from strategies.engines.fsdp.engine import Fsdp
from strategies.evidence.rules import settings
from strategies.launch_file import LaunchFileError, read

ACCUMULATING = "fsdp2+bf16+accumulate"
EARLY = "fsdp2+optimizer_in_backward"


@pytest.fixture
def rank_0(train_here, monkeypatch):
    """``rank_0(recipe, ranks)``: what is trained, two steps and a watched one later."""

    def go(recipe: str, ranks: int = 2) -> TrainingRun:
        file = parse(recipe).sharding.engine("cpu").file
        launched = {key.upper(): str(value) for key, value in file.content["fsdp_config"].items()}
        launched |= {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        launched |= dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(ranks))
        for key, value in launched.items():
            monkeypatch.setenv(key, value)
        spec = dataclasses.replace(TINY, recipe=recipe, processes=ranks, global_batch=16)
        run = train_here(spec, 2, simulated=True)
        observe_here(run, recipe)
        return run

    try:
        yield go
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


# ---- shown ----


@pytest.mark.parametrize(
    ("recipe", "ranks", "share"),
    [
        (ACCUMULATING, 2, 1 / 2),
        ("fsdp2:reshard=off", 4, 1 / 4),
        ("hsdp:replicate=4", 8, 1 / 2),
        ("fsdp2_offload", 2, 1 / 2),
    ],
)
def test_a_rank_s_share_is_read_off_its_bytes(recipe, ranks, share, rank_0):
    run = rank_0(recipe, ranks)
    engine, layout = run.engine, run.launch.layout
    facts = engine.evidence(run)
    whole = sum(p.numel() for p in run.module.parameters())
    assert facts["parameter_bytes"] == pytest.approx(4 * whole * share, rel=0.02)
    assert facts["optimizer_share"] == pytest.approx(share, abs=0.01)
    assert facts["groups"] == facts["blocks"] + 1 == 5
    assert facts["reductions"] == 5 and layout.ranks == ranks and 1 / layout.shard == share
    assert facts["gradients_sent_as"] == ("bfloat16" if "bf16" in recipe else "float32")
    again = facts["gathered_bytes"]["backward"]
    assert (again == 0) == (recipe == "fsdp2:reshard=off")
    host = {"parameters_on", "optimizer_on"}
    assert host & set(settings(facts)) == (host if engine.offloads else set())


def test_within_backward_one_block_s_gradients_are_alive_at_once(rank_0, monkeypatch):
    run = rank_0(EARLY, 2)
    (part,) = (p for p in parse(EARLY).strategies if p.name == "optimizer_in_backward")
    facts = part.evidence(run)
    block = 4 * sum(p.numel() for p in run.blocks()[0].parameters()) // 2
    assert facts["most_gradient_bytes"] == block < facts["all_gradient_bytes"] / 4
    torch.distributed.destroy_process_group()
    # What hybrid sharding averages torch holds: nothing would be freed early.
    own = Fsdp.traits.fget
    monkeypatch.setattr(Fsdp, "traits", property(lambda self: own(self) - {"held_gradients"}))
    run = rank_0("hsdp+optimizer_in_backward", 4)
    with pytest.raises(NotInForce, match="gradients were alive at once"):
        part.evidence(run)


@pytest.mark.parametrize(
    ("recipe", "name", "bits"), [("fsdp2+cast+lora", "cast", 8), ("hsdp+qlora", "qlora", 4)]
)
def test_codes_are_cut_as_bytes_and_their_scales_are_whole(recipe, name, bits, rank_0):
    run = rank_0(recipe, 4)
    (part,) = (p for p in parse(recipe).strategies if p.name == name)
    facts, engine = part.evidence(run), run.engine.evidence(run)
    (whole,) = (facts[k] for k in ("coded_bytes", "packed_bytes") if k in facts)
    (here,) = (facts[k] for k in ("coded_bytes_here", "packed_bytes_here") if k in facts)
    codes = [p for p in run.module.parameters() if not p.is_floating_point()]
    packed = [m for m in run.module.modules() if type(m).__name__ in ("Packed", "Coded")]
    elements = sum(m.in_features * m.out_features for m in packed)
    assert whole == elements * bits // 8 and here == whole // run.launch.layout.shard
    assert len(codes) == len(packed) >= len(run.subject.linears)
    # What is gathered is what is stored: blocks, with their codes, in backward again.
    gathered = engine["gathered_bytes"]
    assert gathered["forward"] == engine["parameter_bytes"] > gathered["backward"] > here


def test_weights_are_gathered_in_float8(rank_0, monkeypatch):
    run = rank_0("fsdp2+fp8:emulate=on,gather=fp8", 2)
    (part,) = (p for p in parse("fsdp2+fp8:emulate=on,gather=fp8").strategies if p.name == "fp8")
    facts = part.evidence(run)
    assert facts["gathered_in_float8"] > 0 and run.engine.evidence(run)
    # A share keeps nothing of torchao's wrapper, which refers to the whole weight.
    assert [p for p in run.module.parameters() if "_tensor" in vars(p)] == []
    torch.distributed.destroy_process_group()
    monkeypatch.setattr("strategies.precision.float8._gather_in_float8", lambda layer: None)
    with pytest.raises(NotInForce, match=r"0 of \d+ weights are gathered"):
        part.evidence(rank_0("fsdp2+fp8:emulate=on,gather=fp8", 2))


# ---- lost ----


def without_blocks(make):
    def whole(accelerator, module, blocks, draw=None):
        return make(accelerator, module, [], draw)

    return whole


def kept_in_forward(group):
    """What ``reshard`` does not do behind forward, whatever the setting says."""
    if group._training_state.name != "FORWARD":
        group._to_sharded()


def codes_apart(block, **options):
    """Codes are left as they are."""
    codes = {p for p in block.parameters() if not p.is_floating_point()}
    return FULLY(block, ignored_params=codes, **options)


def always_in_sync(self, model=None):
    return contextlib.nullcontext()


def settled_without(accelerator, reshard):
    accelerator.state.fsdp_plugin.reshard_after_forward = reshard


def never_offloaded(accelerator, reshard):
    SETTLE(accelerator, reshard)
    accelerator.state.fsdp_plugin.cpu_offload = OffloadPolicy()


def one_group_of_all(accelerator, layout):
    STAND_IN(accelerator, dataclasses.replace(layout, replicate=1, shard=layout.ranks))


SHARD, SETTLE, STAND_IN = shard.shard, shard.settle, shard.stand_in
FULLY = shard.fully_shard
LOST = {
    "nothing is sharded": ("fsdp2", Fsdp, "prepare", Engine.prepare, "is a DiT"),
    "blocks are not wrapped": (
        "fsdp2", shard, "shard", without_blocks(SHARD), "4 of 4 blocks are not FSDP groups",
    ),
    "blocks are kept, and no setting says so": (
        "fsdp2", FSDPParamGroup, "reshard", kept_in_forward, "gathered again in backward",
    ),
    "timesteps are rounded": (
        ACCUMULATING, shard, "settle", settled_without, "timesteps included",
    ),
    "codes stay whole": (
        "fsdp2+cast+lora", shard, "fully_shard", codes_apart, "16 parameters are not sharded",
    ),
    "nothing is offloaded": (
        "fsdp2_offload", shard, "settle", never_offloaded, "torch's offload policy is [False]",
    ),
    "one group of all ranks": (
        "hsdp", shard, "stand_in", one_group_of_all, "expected (2, 2)",
    ),
}  # fmt: skip
"""What happened instead -> (recipe, owner, what is stubbed, the stub, what gives it away)."""


@pytest.mark.parametrize("case", LOST)
def test_evidence_is_lost_when_the_effect_is_stubbed(case, rank_0, monkeypatch):
    recipe, owner, name, stub, words = LOST[case]
    monkeypatch.setattr(owner, name, stub)
    if case == "nothing is sharded":  # nor before, block by block
        monkeypatch.setattr(Fsdp, "fill", Engine.fill)
        monkeypatch.setattr("accelerate.Accelerator.prepare", lambda self, *objects: objects)
        monkeypatch.setattr("accelerate.Accelerator.no_sync", always_in_sync)
    run = rank_0(recipe, 4 if {"hsdp", "fsdp2+tp"} & {recipe} else 2)
    with pytest.raises(NotInForce) as caught:
        run.engine.evidence(run)
    assert words in str(caught.value)


def test_a_share_that_is_a_view_of_the_whole_saves_nothing(rank_0):
    run = rank_0("fsdp2", 2)
    p = max(run.module.parameters(), key=lambda p: p.numel())
    mine = p._local_tensor
    p._local_tensor = torch.zeros(8 * mine.numel()).narrow(0, 0, mine.numel()).view(mine.shape)
    with pytest.raises(NotInForce, match="bytes of weights, expected at most"):
        run.engine.evidence(run)


# ---- refused ----


FILES = {
    "version 1": ("fsdp_version: 2", "fsdp_version: 1", "fsdp_version 1; write 2"),
    "no blocks": ("TRANSFORMER_BASED_WRAP", "NO_WRAP", "'NO_WRAP'; write TRANSFORMER_BASED_WRAP"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_launch_file_that_would_do_something_else_is_refused(case, tmp_path):
    old, new, words = FILES[case]
    file = CATALOG["fsdp2"].engine("cuda").file
    text = file.path.read_text()
    assert old in text
    (tmp_path / "other.yaml").write_text(text.replace(old, new))
    with pytest.raises(LaunchFileError, match=words):
        Fsdp.of(read(tmp_path / "other.yaml"))
