"""The step that is watched for evidence: what it notes, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from conftest import FLAT, TINY, observe_here, part_named

from harness.worker import measure
from strategies import parse
from strategies.base import NotInForce
from strategies.engine import TrainingRun
from strategies.engines.zero import effects as zero_effects
from strategies.evidence.readings import Observed, Ran, Sent
from strategies.evidence.rules import SETTINGS, effects, label, settings, worded

MUON = "single+muon+accumulate"
SHORT = dataclasses.replace(TINY, model=FLAT)


def test_a_watched_step_leaves_no_hook_behind(train_here):
    run, log = train_here(dataclasses.replace(SHORT, recipe=MUON), 2)
    trained, backward = run.trained, run.trained.accelerator.backward
    optimizer = trained.inner_optimizer
    before = len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)
    observe_here(run, log, MUON)
    hooks = len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)
    assert hooks == before and trained.accelerator.backward == backward
    assert trained.observed.micro_steps == 2 and trained.optimizer_steps == 3
    assert not any(p._post_accumulate_grad_hooks for p in trained.module.parameters())


def test_a_watched_step_trains_as_any_other(train_here):
    spec = dataclasses.replace(SHORT, recipe="single+accumulate")
    watched, log = train_here(spec, 2)
    observe_here(watched, log, spec.recipe)
    plain, other = train_here(spec, 3)
    assert log.all_losses(watched) == other.all_losses(plain)
    for mine, theirs in zip(
        watched.trained.module.parameters(), plain.trained.module.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_operators_are_told_apart_by_phase_and_type(train_here):
    run, log = train_here(dataclasses.replace(TINY, recipe="single+bf16"), 1)
    observe_here(run, log, "single+bf16")
    seen = run.trained.observed
    # Fetching samples is none of the step's phases.
    assert {ran.phase for ran in seen.ran} == {"data", "forward", "backward", "optimizer"}
    assert seen.products("forward").keys() == {"bfloat16"} and not seen.products("optimizer")
    assert seen.products("backward")["bfloat16"] > seen.products("forward")["bfloat16"]
    assert any("_fused_adamw_" in ran.name for ran in seen.ran if ran.phase == "optimizer")
    assert seen.sent == [], "one process sends nothing"


def test_it_is_taken_when_everything_has_been_measured(monkeypatch, tmp_path):
    """Neither the timed steps nor the traced ones are watched, and training runs never are."""
    order: list[str] = []
    named = ("train_steps", "traced_steps", "observe_step", "collect_evidence")
    for name in named:
        result = {"traced_steps": {}, "collect_evidence": ({}, [])}.get(name)
        monkeypatch.setattr(
            measure,
            name,
            lambda *_, name=name, result=result, **more: (order.append(name), result)[1],
        )
    watch = SimpleNamespace(end=lambda gathered: None)
    rest = {"watch_from_here": watch, "audit": [], "measured_rank": None, "result_of": None}
    bench = SimpleNamespace(
        run=SimpleNamespace(trained=None, feed=SimpleNamespace(dataset=None), digest=""),
        log=SimpleNamespace(all_losses=lambda run: []),
        step=None,
        accelerator=SimpleNamespace(is_main_process=True),
    )
    for name, result in {**rest, "begin": bench, "gather": [None]}.items():
        monkeypatch.setattr(measure, name, lambda *_, result=result: result)
    spec = SimpleNamespace(profile=False)
    resolved = SimpleNamespace(recipe=parse("single"), spec=spec)
    reporter = SimpleNamespace(enter=lambda phase: None)
    measure.measure(resolved, tmp_path, reporter)
    assert order == list(named)
    order.clear()
    idle = SimpleNamespace(begin=lambda *_: None, finish=lambda *_: None)
    measure.measure(resolved, tmp_path, reporter, idle)
    assert order == ["train_steps", "collect_evidence"]


UNWATCHED = ["single+muon", "single+sgd", "single+attend:kernel=flash+bf16", "single+dora"]


@pytest.mark.parametrize("text", UNWATCHED)
def test_a_training_run_has_no_such_step_and_still_shows_its_parts(text, train_here):
    run, _ = train_here(dataclasses.replace(SHORT, recipe=text), 2)
    for part in parse(text).strategies:
        assert effects(part.evidence(run.trained)), f"{part} without a watched step"


# -- settings ---------------------------------------------------------------------------------


def test_settings_are_labelled_by_name():
    facts = label(label({"stage": 2, "share": 0.5, "flag": True}, "stage"), "flag", "absent")
    assert facts[SETTINGS] == settings(facts) == ["flag", "stage"] and effects(facts) == ["share"]
    assert worded(facts) == {
        "stage (setting, not effect)": 2,
        "share": 0.5,
        "flag (setting, not effect)": True,
    }
    assert settings({"share": 0.5}) == [] and worded({"share": 0.5}) == {"share": 0.5}
    with pytest.raises(KeyError, match="none of stage"):
        label({"share": 0.5}, "stage")


@pytest.mark.parametrize(
    ("text", "name", "fact"),
    [
        ("single", "single", "distributed_type"),
        ("single+tf32", "tf32", "tf32"),
        ("single+ema:place=cpu", "ema", "device"),
        ("single+accumulate", "accumulate", "steps"),
    ],
)
def test_what_a_cpu_cannot_show_is_a_setting(text, name, fact, train_here):
    run, log = train_here(dataclasses.replace(SHORT, recipe=text), 2)
    observe_here(run, log, text)
    facts = part_named(text, name).evidence(run.trained)
    assert fact in settings(facts) and effects(facts)


# -- on the wire ------------------------------------------------------------------------------


def of_zero(
    stage: int,
    processes: int,
    most: int,
    sent: str = "float32",
    asked: str = "",
    early: bool = False,
) -> TrainingRun:
    """What the evidence of ZeRO reads, of a model of 100 elements under a bucket of ten."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(10)) for _ in range(10)])
    settings = {"communication_data_type": asked} if asked else {}
    observed = Observed(
        ran=[Ran("aten::mm", [], "float32", "forward")],
        sent=[
            Sent("allreduce_", sent, 400, "backward"),
            Sent("allreduce_", "float32", 4, "optimizer"),
        ],
        engine=zero_effects.Effects(most=most),
    )
    return SimpleNamespace(
        model=SimpleNamespace(
            config={"zero_optimization": {"reduce_bucket_size": 10}},
            optimizer=SimpleNamespace(overlap_comm=early, cpu_offload=early),
        ),
        module=module,
        engine=SimpleNamespace(stage=stage, file=SimpleNamespace(settings=settings)),
        launch=SimpleNamespace(processes=processes),
        observed=observed,
    )


def test_another_type_on_zero_s_wire_is_noticed():
    assert zero_effects._wire(of_zero(2, 2, 100)) == {"gradients_sent_as": "float32"}
    with pytest.raises(NotInForce, match=r"sent as \['bfloat16'\], expected \['float32'\]"):
        zero_effects._wire(of_zero(2, 2, 100, sent="bfloat16"))
    lowered = of_zero(2, 2, 100, sent="bfloat16", asked="bfp16")
    assert zero_effects._wire(lowered) == {"gradients_sent_as": "bfloat16"}
    with pytest.raises(NotInForce, match="expected \\['bfloat16'\\]"):
        zero_effects._wire(of_zero(2, 2, 100, asked="bfp16"))


@pytest.mark.parametrize(("most", "shown"), [(220, True), (180, False)])
def test_stage_1_moves_its_own_share_to_the_host_within_a_gpu_s_backward(most, shown):
    trained = of_zero(1, 2, most, early=True)
    with (
        contextlib.nullcontext()
        if shown
        else pytest.raises(NotInForce, match="stage 1 keeps all of them")
    ):
        zero_effects._gradients(trained, trained.observed.engine)


SPARSE = "single+sgd:momentum=0.0+sparse_embedding"


@pytest.mark.parametrize(
    ("types", "shown"), [(("int64", "float32"), True), (("float32",), False), ((), None)]
)
def test_a_sparse_gradient_that_travels_dense_is_noticed(types, shown, train_here):
    run, _ = train_here(dataclasses.replace(TINY, recipe=SPARSE), 2)
    trained = run.trained
    traits = trained.launch.traits - {"one_process"}
    trained.launch = dataclasses.replace(trained.launch, processes=2, traits=traits)
    sent = [Sent("allreduce_", kind, 64, "backward") for kind in types]
    trained.observed = Observed(sent=sent)
    part = part_named(SPARSE, "sparse_embedding")
    if shown is False:
        with pytest.raises(NotInForce, match="sent as a dense tensor"):
            part.evidence(trained)
        return
    facts = part.evidence(trained)
    assert facts.get("place_bytes_sent") == (64 if shown else None)
    assert settings(facts) == ([] if shown else ["wire_bytes"])
