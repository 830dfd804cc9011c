"""Evidence is lost where the effect is: each strategy, stubbed in the ways that it could fail."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from conftest import (
    FLAT,
    SUBJECT,
    TINY,
    launchable,
    observe_here,
    part_named,
    showing,
    weights_digest,
)

from harness import ROOT
from strategies import CATALOG, parse
from strategies.base import NotInForce
from strategies.precision.mixed import Bf16Master, Fp32
from strategies.sharding import sharding_kinds
from tests.made import mission
from tests.made.recipes import DRAWN_HERE, TRAINED_HERE
from tests.made.stand_ins import STAND_INS
from tests.made.stubs import LOST, LOST_WHEN_DRAWN, nothing

ELSEWHERE = {"bf16_master", "compress", "topk", "sp", "tp"}
"""What loses its effect below, in test_compress, test_parallel and test_tensor."""


def evidence(name: str, text: str, train_here) -> dict:
    """What part ``name`` finds after two steps and a watched one, where it has what it needs."""
    spec = dataclasses.replace(showing(text), **mission.FITTING.get(name, {}))
    with STAND_INS.get(name, contextlib.nullcontext)():
        run = train_here(spec, 2)
        observe_here(run, text)
        return part_named(text, name).evidence(run)


def pairs() -> dict[str, tuple[str, str]]:
    """Part and recipe of each stub, once, that ``test_catalog`` does not show."""
    shown = {str(parse(text)) for text in TRAINED_HERE}
    found = {(kind.name, text) for text, kind, _, _ in LOST.values()}
    return {f"{n} in {t}": (n, t) for n, t in sorted(found) if str(parse(t)) not in shown}


@pytest.mark.parametrize("case", pairs())
def test_evidence_is_shown_when_nothing_is_stubbed(case, train_here):
    assert evidence(*pairs()[case], train_here)


FIRST = {kind: case for case, (_, kind, _, _) in reversed(LOST.items())}
"""A stub of each strategy, which runs by default."""


@pytest.mark.parametrize("case", launchable(LOST, FIRST.values()))
def test_evidence_is_lost_when_the_effect_is_stubbed(case, train_here, monkeypatch):
    text, kind, stage, stub = LOST[case]
    monkeypatch.setattr(kind, stage, stub)
    with pytest.raises(NotInForce):
        evidence(kind.name, text, train_here)


def test_every_strategy_without_a_launch_file_is_stubbed():
    here = {kind.name for _, kind, _, _ in (*LOST.values(), *LOST_WHEN_DRAWN.values())}
    assert here | ELSEWHERE == set(CATALOG) - set(sharding_kinds())


def test_each_row_of_the_mission_is_run():
    """test_catalog runs mission.TRAINED itself."""
    assert set(mission.STOOD_IN.values()) <= {text for text, *_ in LOST.values()}
    assert set(mission.DRAWN.values()) <= set(DRAWN_HERE)
    files = ("worker/test_runs.py", "strategies/test_launched.py")
    lists = "".join((ROOT / "tests" / file).read_text(encoding="utf-8") for file in files)
    assert [text for text in mission.LAUNCHED.values() if f'"{text}"' not in lists] == []
    for file in mission.TESTS.values():
        assert "def test_" in (ROOT / "tests" / file).read_text()


def test_a_master_is_read_off_the_optimizer(train_here):
    """A run as DeepSpeed leaves one: bfloat16 weights, and an optimizer of float32 copies."""
    run = train_here(TINY, 1)
    for group in run.inner_optimizer.param_groups:
        group["params"] = [p.detach().clone() for p in group["params"]]
    run.module.to(torch.bfloat16)
    launch = parse("single").launch("cpu", 1, SUBJECT)
    run.launch = dataclasses.replace(launch, traits=launch.traits | {"float_master"})
    assert Bf16Master().evidence(run)["master"] == "float32"
    weights = [p for p in run.module.parameters() if p.requires_grad]
    run.inner_optimizer.param_groups[0]["params"] = weights
    with pytest.raises(NotInForce, match="the optimizer updates bfloat16 weights"):
        Bf16Master().evidence(run)


def test_tf32_left_on_is_noticed(train_here, monkeypatch):
    monkeypatch.setattr(Fp32, "edit_model", nothing)
    run = train_here(TINY, 1)
    matmul = torch.backends.cuda.matmul  # monkeypatch cannot undo an attribute of this object
    try:
        matmul.allow_tf32 = True
        with pytest.raises(NotInForce, match="TF32 is on"):
            Fp32().evidence(run)
    finally:
        matmul.allow_tf32 = False


# -- the step that is watched --


def test_a_watched_step_trains_as_any_other_and_leaves_no_hook_behind(train_here):
    spec = dataclasses.replace(TINY, model=FLAT, recipe="single+muon+accumulate")
    run = train_here(spec, 2)
    backward = run.accelerator.backward
    optimizer = run.inner_optimizer

    def hooks() -> tuple[int, int]:
        return len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)

    before = hooks()
    observe_here(run, spec.recipe)
    assert hooks() == before and run.accelerator.backward == backward
    assert run.observed.micro_steps == 2 and run.optimizer_steps == 3
    assert not any(p._post_accumulate_grad_hooks for p in run.module.parameters())
    plain = train_here(spec, 3)
    assert run.all_losses() == plain.all_losses()
    assert weights_digest(run.module) == weights_digest(plain.module)


def test_operators_are_told_apart_by_phase_and_type(train_here):
    run = train_here(dataclasses.replace(TINY, recipe="single+bf16"), 1)
    observe_here(run, "single+bf16")
    seen = run.observed
    # Fetching samples is none of the step's phases.
    assert {ran.phase for ran in seen.ran} == {"data", "forward", "backward", "optimizer"}
    assert seen.products("forward").keys() == {"bfloat16"} and not seen.products("optimizer")
    assert seen.products("backward")["bfloat16"] > seen.products("forward")["bfloat16"]
    assert any("_fused_adamw_" in ran.name for ran in seen.ran if ran.phase == "optimizer")
    assert seen.sent == [], "one process sends nothing"
