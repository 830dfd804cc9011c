"""Verdicts: which distance is read as which word, and what each design explains."""

from __future__ import annotations

import dataclasses
import math

import pytest

from harness.report.figures import parity
from harness.result import Projections, Result, Status, by_block
from harness.spec import Spec

FLOAT32 = {"compute_dtype": "float32", "parameters": "float32", "master": "float32"}
AUTOCAST = {**FLOAT32, "compute_dtype": "bfloat16"}


def result(recipe: str = "ddp", **fields) -> Result:
    """Eight steps of a made-up run that did nothing unusual."""
    usual = {
        "losses": [1.0 - 0.01 * i for i in range(8)],
        "grad_norms": [0.5 + 0.01 * i for i in range(8)],
        "projections": did(),
        "evidence": {"fp32": FLOAT32},
        "parity": "exact" if "+" not in recipe else "by design",
    }
    return Result(status=Status.OK, spec=Spec(recipe=recipe), **{**usual, **fields})


def did(**changed) -> Projections:
    """What an optimizer did to two parameters."""
    sums = {"a": [1.0, -2.0, 0.5, 0.1], "b": [0.1, 0.2, -0.3, 0.4]}
    kinds = {"update": sums, "moment": sums, "average": sums, "inputs": {"t": [4.0, 2.0, 1.0, 3.0]}}
    return Projections(**{**{k: dict(v) for k, v in kinds.items()}, **changed})


def test_sums_of_blocks_are_those_of_an_older_result_s_parameters():
    """Older results have a sum for each parameter; a name such as x.proj is a block's already."""
    names = ("x.proj.weight", "x.proj.bias", "x.norm.weight", "blocks.0.a.b.weight", "blocks.0.c")
    old = {name: [1.0 + i, -2.0, 0.5 * i, 0.1] for i, name in enumerate(names)}
    new = by_block(old)
    assert list(new) == ["x.proj", "x.norm", "blocks.0"]
    both = (result(projections=did(update=sums, moment=sums)) for sums in (new, old))
    assert parity.distances(*both)["update"] == 0


def moved(values: list[float], by: float, at: int = 0) -> list[float]:
    """The same curve with one step a share ``by`` away."""
    return [v * (1 + by) if i == at else v for i, v in enumerate(values)]


AWAY = {
    by: {"a": [1.0 + by * 2.3627, -2.0, 0.5, 0.1], "b": [0.1, 0.2, -0.3, 0.4]}
    for by in (0.02, 0.04)
}
"""Sums that are so far from those of ``did``, of all parameters together."""
REFERENCE = result()
LIMITS = parity.limits([REFERENCE])


def word(row: Result, reference: Result = REFERENCE) -> str:
    return parity.against_the_reference(row, reference, LIMITS).word


# ---- rows that promise the same ----


def test_a_row_within_all_limits_is_equal():
    near = result(
        losses=moved(REFERENCE.losses, 0.9e-5),
        grad_norms=moved(REFERENCE.grad_norms, 1.9e-5),
        projections=did(update={"a": [1.001, -2.0, 0.5, 0.1], "b": [0.1, 0.2, -0.3, 0.4]}),
    )
    assert word(near) == "equal"


SUMS = did().update
OTHER = {
    "loss 1.1e-05 away": {"losses": moved(REFERENCE.losses, 1.1e-5)},
    "norm 2.2e-05 away": {"grad_norms": moved(REFERENCE.grad_norms, 2.2e-5, 3)},
    "loss inf away": {"losses": [math.nan, *REFERENCE.losses[1:]]},
    "moment of b 1.0e+00 away": {"projections": did(moment={"a": SUMS["a"]})},
    "moment of a 6.1e-05 away": {
        "projections": did(moment={**SUMS, "a": [1.00014, -2.0, 0.5, 0.1]})},
    "update of a 6.1e-04 away": {
        "projections": did(update={**SUMS, "a": [1.0014, -2.0, 0.5, 0.1]})},
    "average of b": {"projections": did(average={**SUMS, "b": [0.1, 0.2, -0.3, 0.3]})},
    "first step: t": {"projections": did(inputs={"t": [4.0, 2.0, 1.0, 3.1]})},
    "other first weights: other": {"configs": {"initial_weights": "other"}},
}  # fmt: skip
"""What is told -> how a row differs."""


@pytest.mark.parametrize("what", OTHER)
def test_a_row_that_did_another_thing_differs_and_is_told_in_what(what):
    fields = OTHER[what]
    reference = result(configs={"initial_weights": "these"} if "configs" in fields else {})
    verdict = parity.against_the_reference(result(**fields), reference, LIMITS)
    assert verdict.word == "DIFFERS" and what in verdict.what, verdict.what


@pytest.mark.parametrize(("fields", "reference", "expected"), [
    ({"grad_norms": [], "projections": None}, REFERENCE, "equal losses"),
    ({"losses": []}, REFERENCE, "not comparable"),
    ({}, result(parity="by design"), "not comparable"), ({"projections": None}, REFERENCE, "equal"),
])  # fmt: skip
def test_what_a_row_lacks_is_not_made_up(fields, reference, expected):
    assert word(result(**fields), reference) == expected


def test_late_steps_are_held_to_the_wider_limit():
    steps = parity.EARLY_STEPS + 1
    long = result(losses=[1.0] * steps, grad_norms=[1.0] * steps)
    for at, by, expected in ((3, 3e-5, "DIFFERS"), (-1, 3e-5, "equal"), (-1, 2e-3, "DIFFERS")):
        losses = moved(long.losses, by, at % steps)
        row = result(losses=losses, grad_norms=long.grad_norms)
        found = parity.against_the_reference(row, long, parity.limits([long]))
        assert found.word == expected


def test_a_block_with_next_to_no_gradient_counts_by_as_much_less():
    """Below a thousandth of all moments together what is apart is told as a share of that."""
    sums = {"a": [3.0, 4.0], "keys": [5e-9, 0.0]}
    reference = result(projections=Projections(update=sums, moment=sums))
    for gap, moment in ((5e-9, 1e-6), (1e-3, 0.2)):
        ours = {**sums, "keys": [5e-9 + gap, 0.0]}
        far = parity.distances(result(projections=did(moment=ours, update=ours)), reference)
        assert far["moment"] == pytest.approx(moment, rel=1e-3)
        assert far["update"] == pytest.approx(moment, rel=1e-3)
    gone = result(projections=Projections(update={"a": sums["a"]}, moment={"a": sums["a"]}))
    assert parity.distances(gone, reference)["moment"] == 1.0, "what is missing is no rounding"
    alike = result(projections=Projections(update=sums))
    assert "moment" not in parity.distances(alike, reference)


# ---- limits ----


@pytest.mark.parametrize(("meter", "facts", "tight"), [
    ("resident", FLOAT32, True), ("resident", AUTOCAST, False), ("resident", {}, False),
    ("cuda", {**FLOAT32, "tf32": True}, False), ("cuda", FLOAT32, False),
])  # fmt: skip
def test_float32_on_a_cpu_is_held_closely(meter, facts, tight):
    found = parity.limits([result(meter=meter, evidence={"fp32": facts})])
    assert found == (parity.FLOAT32 if tight else parity.WIDE)


def test_on_a_gpu_the_limit_follows_from_what_the_reference_is_away_from_itself():
    first = result(meter="cuda")
    again = dataclasses.replace(first, losses=moved(first.losses, 1e-5))
    found = parity.limits([first, again])
    assert found.loss == pytest.approx(parity.SLACK * 1e-5)
    assert found.norm == parity.FLOAT32.norm
    chaotic = dataclasses.replace(first, losses=moved(first.losses, 0.5))
    assert parity.limits([first, chaotic]).loss == parity.WIDE.loss


# ---- rows that change it by design ----


@pytest.mark.parametrize(
    ("recipe", "fields", "expected"),
    [
        ("ddp+bf16", {"losses": moved(REFERENCE.losses, 5e-3, 4)}, "by design"),
        ("ddp+bf16", {"losses": moved(REFERENCE.losses, 2e-2, 4)}, "DIFFERS"),
        ("ddp+bf16", {"grad_norms": moved(REFERENCE.grad_norms, 0.1, 4)}, "DIFFERS"),
        ("ddp+bf16", {"projections": did(moment=AWAY[0.02])}, "by design"),
        ("ddp+bf16", {"projections": did(moment=AWAY[0.04])}, "DIFFERS"),
        ("ddp+sgd", {"projections": did(moment=AWAY[0.04])}, "by design"),
        # Another optimizer explains all but the first step.
        ("ddp+sgd", {"losses": moved(REFERENCE.losses, 0.5, 1)}, "by design"),
        ("ddp+sgd", {"losses": moved(REFERENCE.losses, 2e-5, 0)}, "DIFFERS"),
        # An adapter has gradients of its own; its first forward is the model's.
        ("single+lora", {"grad_norms": moved(REFERENCE.grad_norms, 0.5, 0)}, "by design"),
        ("single+lora", {"losses": moved(REFERENCE.losses, 2e-5, 0)}, "DIFFERS"),
        ("single+prune", {"losses": moved(REFERENCE.losses, 0.5, 0)}, "by design"),
        ("single+bf16_pure+sgd", {"losses": moved(REFERENCE.losses, 0.5, 0)}, "DIFFERS"),
    ],
)
def test_a_design_explains_so_much_and_no_more(recipe, fields, expected):
    assert word(result(recipe, **fields)) == expected
