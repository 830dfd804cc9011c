"""What follows from a card's compute capability: kernels of attention, and what cannot run."""

from __future__ import annotations

import dataclasses

import pytest
from test_predict import asked, prediction

from harness.predict import attention, gpus, pool, workspace
from harness.predict.attention import NoKernel, choose, preferred

EVERY = {"flash", "efficient", "math", "cudnn"}


@pytest.mark.parametrize(
    ("card", "kind"),
    [
        ("V100-16GB", "efficient"),
        ("T4", "efficient"),
        ("A100-40GB", "flash"),
        ("RTX-3090", "flash"),
        ("L40S", "flash"),
        ("RTX-5090", "flash"),
        ("H100-80GB", "cudnn"),
        ("GH200", "cudnn"),
        ("B200", "cudnn"),
        ("MI300X", "flash"),
    ],
)
def test_a_card_s_attention(card, kind):
    assert preferred(gpus.find(card).capability) == kind


@pytest.mark.parametrize(
    ("kind", "dtype", "kernel"),
    [
        ("efficient", "float16", "efficient"),
        ("efficient", "bfloat16", "math"),
        ("efficient", "float32", "efficient"),
        ("flash", "bfloat16", "flash"),
        ("flash", "float32", "efficient"),
        ("cudnn", "float16", "cudnn"),
        ("cudnn", "float32", "efficient"),
        ("cudnn", "float64", "math"),
    ],
)
def test_a_type_s_kernel(kind, dtype, kernel):
    assert choose(kind, dtype, 72, False, EVERY) == kernel


def test_what_a_kernel_does_not_take_falls_to_the_next_that_is_allowed():
    assert choose("cudnn", "bfloat16", 256, False, EVERY) == "flash"
    assert choose("cudnn", "bfloat16", 320, False, EVERY) == "efficient"
    assert choose("flash", "bfloat16", 64, True, EVERY) == "efficient"
    assert choose("flash", "float32", 6, False, EVERY) == "math"
    assert choose("flash", "bfloat16", 64, False, {"cudnn"}) == "cudnn"
    assert choose("flash", "bfloat16", 64, False, EVERY - {"flash"}) == "efficient"
    for kind, only in (("efficient", "flash"), ("efficient", "cudnn")):
        with pytest.raises(NoKernel, match=f"{only} attention does not take float16 heads of 64"):
            choose(kind, "float16", 64, False, {only})
    with pytest.raises(NoKernel, match="no attention"):
        choose("flash", "float16", 64, False, set())


def test_cards_share_predictions_with_their_kind_alone(monkeypatch, tmp_path):
    row = asked("ddp+bf16")
    old, usual, new = (pool.path_of(row, tmp_path, kind) for kind in attention.ORDERS)
    assert len({old, usual, new}) == 3
    prediction(3).write(usual)
    monkeypatch.setattr(pool, "_run", lambda *given: "asked anew")
    assert pool.predict_all([row], tmp_path, kind="flash")[0].method == "trace"
    assert "asked anew" in pool.predict_all([row], tmp_path, kind="cudnn")[0].reason
    here = dataclasses.replace(row, spec=dataclasses.replace(row.spec, device="cpu"))
    assert len({pool.path_of(here, tmp_path, kind) for kind in attention.ORDERS}) == 1


def test_cudnn_s_backward_holds_the_sum_of_dq():
    shapes = [[2, 16, 256, 72]] * 4
    op = "aten._scaled_dot_product_cudnn_attention_backward.default"
    assert workspace.scratch(op, shapes) == 4 * 2 * 16 * 256 * (72 + 1)
    assert workspace.scratch(op.replace("_backward", ""), shapes) == 0


def test_larger_workspaces_of_cublas_follow_from_the_capability():
    large = {name for name, card in gpus.table().items() if card.hopper}
    new = "H100-PCIe", "H100-NVL", "H100-80GB", "GH200-96GB", "H200-141GB", "B200-180GB"
    assert large == set(new)
