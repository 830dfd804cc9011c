"""Evidence is lost where the effect is: each strategy, stubbed in the ways that it could fail.

A stub proves nothing where the evidence is missing anyway: what is stubbed here is shown, with
nothing stubbed, by ``test_catalog``, or here where that trains another recipe. What a CPU lacks is
stood in for, with the stub and without.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from conftest import SUBJECT, TINY, launchable, observe_here, part_named, showing

from strategies import CATALOG, parse
from strategies.base import NotInForce
from strategies.engine import TrainingRun
from strategies.precision.bfloat import Bf16Master
from strategies.precision.mixed import Fp32
from strategies.sharding import sharding_kinds
from tests.made.mission import FITTING
from tests.made.recipes import TRAINED_HERE
from tests.made.stand_ins import STAND_INS
from tests.made.stubs import LOST, LOST_WHEN_DRAWN, parallel, wire
from tests.made.stubs.parts import nothing

BY_HAND = {Bf16Master}
"""Strategies whose objects are made by hand, below or in ``test_drawn``."""


@contextlib.contextmanager
def stood_in(name: str):
    """While it lasts, this machine has what strategy ``name`` needs."""
    with STAND_INS.get(name, contextlib.nullcontext)():
        yield


def evidence(name: str, text: str, train_here) -> dict:
    """What the evidence of part ``name`` finds after two steps and one that was watched."""
    spec = dataclasses.replace(showing(text), **FITTING.get(name, {}))
    run, log = train_here(spec, 2)
    observe_here(run, log, text)
    return part_named(text, name).evidence(run.trained)


def pairs() -> dict[str, tuple[str, str]]:
    """Part and recipe of each stub, once, that ``test_catalog`` does not show."""
    shown = {str(parse(text)) for text in TRAINED_HERE}
    found = {(kind.name, text) for text, kind, _, _ in LOST.values()}
    return {f"{n} in {t}": (n, t) for n, t in sorted(found) if str(parse(t)) not in shown}


@pytest.mark.parametrize("case", pairs())
def test_evidence_is_shown_when_nothing_is_stubbed(case, train_here):
    name, text = pairs()[case]
    with stood_in(name):
        assert evidence(name, text, train_here)


FIRST = {kind: case for case, (_, kind, _, _) in reversed(LOST.items())}
"""A stub of each strategy, which runs by default."""


@pytest.mark.parametrize("case", launchable(LOST, FIRST.values()))
def test_evidence_is_lost_when_the_effect_is_stubbed(case, train_here, monkeypatch):
    text, kind, stage, stub = LOST[case]
    monkeypatch.setattr(kind, stage, stub)
    with stood_in(kind.name), pytest.raises(NotInForce):
        evidence(kind.name, text, train_here)


def test_every_strategy_without_a_launch_file_is_stubbed():
    stubs = (*LOST.values(), *LOST_WHEN_DRAWN.values())
    here = {kind.name for _, kind, _, _ in stubs} | {kind.name for kind in BY_HAND}
    on_the_wire = {strategy.name for strategy, _ in wire.LOST.values()}
    ranks = (*parallel.LOST.values(), *parallel.LOST_PARTS.values())
    shared = {name for name, _ in ranks if name} - set(sharding_kinds())  # "": the audit notices
    assert here | on_the_wire | shared == set(CATALOG) - set(sharding_kinds())


def with_master(train_here) -> TrainingRun:
    """A run as DeepSpeed leaves one: bfloat16 weights, and an optimizer of float32 copies."""
    run, _ = train_here(TINY, 1)
    trained = run.trained
    for group in trained.inner_optimizer.param_groups:
        group["params"] = [p.detach().clone() for p in group["params"]]
    trained.module.to(torch.bfloat16)
    launch = CATALOG["single"].launch("cpu", 1, SUBJECT)
    trained.launch = dataclasses.replace(launch, traits=launch.traits | {"float_master"})
    return trained


def weights_instead(trained: TrainingRun) -> None:
    weights = [p for p in trained.module.parameters() if p.requires_grad]
    trained.inner_optimizer.param_groups[0]["params"] = weights


def float_weights(trained: TrainingRun) -> None:
    trained.module.float()


def no_such_engine(trained: TrainingRun) -> None:
    trained.launch = CATALOG["single"].launch("cpu", 1, SUBJECT)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (weights_instead, "the optimizer updates bfloat16 weights"),
        (float_weights, "computes in float32"),
        (no_such_engine, "the engine keeps no float32 master"),
    ],
)
def test_a_master_is_read_off_the_optimizer(spoil, words, train_here):
    trained = with_master(train_here)
    assert Bf16Master().evidence(trained)["master"] == "float32"
    spoil(trained)
    with pytest.raises(NotInForce, match=words):
        Bf16Master().evidence(trained)


def test_moments_on_the_device_are_not_in_host_memory(train_here):
    with stood_in("offload_adamw"):
        spec = dataclasses.replace(TINY, recipe="single+offload_adamw")
        trained = train_here(spec, 1)[0].trained
    part = part_named(spec.recipe, "offload_adamw")
    assert part.evidence(trained)
    for state in trained.inner_optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to("meta")
    with pytest.raises(NotInForce, match="the moments are on"):
        part.evidence(trained)


def test_tf32_left_on_is_noticed(train_here, monkeypatch):
    monkeypatch.setattr(Fp32, "edit_model", nothing)
    run, _ = train_here(TINY, 1)
    assert Fp32().evidence(run.trained)
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        with pytest.raises(NotInForce, match="TF32 is on"):
            Fp32().evidence(run.trained)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
