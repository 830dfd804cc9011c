"""Specs: every value that no run could honour is refused with its name and the way out."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from harness.spec import Spec, SpecError, add_arguments, from_arguments

BAD = [
    ("global_batch", 0), ("steps", 0), ("warmup", 0), ("processes", 0), ("grad_clip", -1.0),
    ("weight_decay", -0.1), ("ema", 1.0), ("learning_rate", 0.0), ("objective", "epsilom"),
    ("init", "zero"), ("device", "tpu"), ("class_dropout", 1.0), ("beta2", 1.5),
    ("learning_rate", float("nan")), ("grad_clip", float("nan")), ("seed", -1), ("nodes", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(SpecError) as error:
        Spec(recipe="ddp", **{name: value}).check()
    assert name in str(error.value) and str(value) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_micro_batch_is_derived():
    assert Spec(recipe="ddp", global_batch=24, processes=2).micro_batch(2, 3) == 4


def test_a_batch_that_does_not_divide_names_the_nearest():
    with pytest.raises(SpecError, match="use 8 or 16"):
        Spec(recipe="ddp", global_batch=10, processes=4).micro_batch(4, 2)
    with pytest.raises(SpecError, match="use 8"):
        Spec(recipe="ddp", global_batch=3, processes=4).micro_batch(4, 2)


def other(value):
    if isinstance(value, bool):
        return not value
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Spec)])
def test_every_field_changes_the_key_and_survives_the_command_line(field):
    spec = Spec(recipe="ddp")
    changed = dataclasses.replace(spec, **{field: other(getattr(spec, field))})
    assert changed.key != spec.key
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert from_arguments(parser.parse_args(changed.arguments())) == changed
